"""Data in ADE20K's layout: a class for each pixel.

    data = Ade20k("ADEChallengeData2016", "training", classes=150, view=CropView(512))
    image, labels = data[0]

root/images/training/*.jpg        root/annotations/training/*.png      and the same for validation and other splits
image    float32 `[3, H, W]` in [0, 1]
labels   int64 `[H, W]`: 0 to classes - 1, or 255 (`IGNORED`) for pixels that no loss and no score counts. Label files
         count from 1: their 0 (unlabeled) is read as 255, and every other label as one less.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_int, check_number, is_number

from .image_files import DamagedImageError, is_image, open_image, read_image

IGNORED = 255
LABEL_FORMATS = ("PNG", "BMP", "TIFF")  # JPEG changes labels, and PIL scales those of PPM
MAX_TRIES = 10  # crops to draw before one that is nearly all of one class is accepted


@dataclass(frozen=True)
class CropView:
    """Random scale, crop and flip, as UperNet is trained.

    Attributes:
        size: side of the crop; smaller images are padded with black, their labels with 255.
        scales: smallest and largest factor that the image is scaled by.
        flip: probability of a horizontal flip.
        max_class_share: largest fraction of a crop's labeled pixels that one class can have; other crops are drawn
            up to `MAX_TRIES` times.
    """

    size: int = 512
    scales: tuple[float, float] = (0.5, 2.0)
    flip: float = 0.5
    max_class_share: float = 0.75

    def __post_init__(self) -> None:
        check_int("size", self.size, 1)
        if not isinstance(self.scales, (tuple, list)) or not all(map(is_number, self.scales)):
            raise TypeError(f"scales must be two numbers, got {self.scales!r}")
        if len(self.scales) != 2 or not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"scales must be the smallest and the largest factor, both > 0, got {self.scales!r}")
        object.__setattr__(self, "scales", tuple(self.scales))
        check_number("flip", self.flip, 0, 1)
        check_number("max_class_share", self.max_class_share, 0, 1, open_low=True)

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Transform image and labels; random numbers come from torch's default generator, so that runs can resume."""
        low, high = self.scales
        image, labels = scale(image, labels, low + (high - low) * float(torch.rand(())))
        image, labels = pad(image, labels, self.size, self.size)
        image, labels = self._crop(image, labels)
        if self.flip and torch.rand(()) < self.flip:
            image, labels = image.flip(-1), labels.flip(-1)
        return image, labels

    def _crop(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(MAX_TRIES):
            top, left = (int(torch.randint(side - self.size + 1, ())) for side in labels.shape)
            window = (slice(top, top + self.size), slice(left, left + self.size))
            cropped = labels[window]
            counts = cropped[cropped != IGNORED].bincount()
            if counts.numel() and counts.max() <= self.max_class_share * counts.sum():
                break
        return image[:, *window], labels[window]


def scale(image: Tensor, labels: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Scale image (bilinear, antialiased) and labels (nearest) by a factor."""
    size = [max(1, round(side * factor)) for side in labels.shape]
    if size == list(labels.shape):
        return image, labels
    image = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0].clamp(0, 1)
    return image, F.interpolate(labels[None, None].float(), size, mode="nearest-exact")[0, 0].to(labels.dtype)


def pad(image: Tensor, labels: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Pad on the right and at the bottom to at least this size: the image with black, the labels with 255."""
    missing = (0, max(0, width - labels.shape[1]), 0, max(0, height - labels.shape[0]))
    if not any(missing):
        return image, labels
    return F.pad(image, missing), F.pad(labels, missing, value=IGNORED)


def shift_labels(labels: Tensor) -> Tensor:
    """Convert labels of a file to labels for training: 0 (unlabeled) becomes 255, 255 stays, others become one less."""
    return torch.where((labels == 0) | (labels == IGNORED), IGNORED, labels - 1)


class Ade20k(Dataset):
    """Images with a label for each pixel.

    Attributes:
        pairs: files of images and labels, sorted by name.
        classes: number of classes.
    """

    def __init__(self, root: str | Path, split: str, classes: int = 150, view: CropView | None = None) -> None:
        """`split` is the name of a folder, such as `"training"`; without a view, images are returned unchanged."""
        check_int("classes", classes, 1)
        if classes >= IGNORED:
            raise ValueError(f"classes must be less than {IGNORED}, got {classes}")
        self.classes, self.view = classes, view
        images, labels = (_files_by_name(Path(root) / kind / split) for kind in ("images", "annotations"))
        for files, others, kind in ((images, labels, "annotations"), (labels, images, "images")):
            single = sorted(set(files) - set(others))
            if single:
                raise FileNotFoundError(
                    f"{files[single[0]]} must have a partner in {Path(root) / kind / split}, got none"
                )
        self.pairs = [(images[name], labels[name]) for name in sorted(images)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image_path, label_path = self.pairs[index]
        image, labels = read_image(image_path).float() / 255, self.labels(index)
        if image.shape[1:] != labels.shape:
            sizes = f"{tuple(labels.shape)} and {tuple(image.shape[1:])} (height, width)"
            raise DamagedImageError(f"{label_path} must have the size of {image_path}, got {sizes}")
        return self.view(image, labels) if self.view else (image, labels)

    def class_shares(self, images: int) -> list[float]:
        """Each class's share of the labeled pixels, over so many evenly spaced images."""
        count = min(images, len(self))
        pixels = torch.zeros(self.classes, dtype=torch.int64)
        for i in range(count):
            labels = self.labels(i * len(self) // count)
            pixels += torch.bincount(labels[labels != IGNORED], minlength=self.classes)
        return (pixels / pixels.sum().clamp(min=1)).tolist()

    def labels(self, index: int) -> Tensor:
        """Read the labels of one image, int64 `[H, W]`."""
        path = self.pairs[index][1]
        image = open_image(path)
        if image.mode not in ("L", "P", "1"):
            raise DamagedImageError(f"{path} must have one byte per pixel (mode L, P or 1), got mode {image.mode!r}")
        stored = image.info["rawmode"]
        if image.format not in LABEL_FORMATS or not (stored in ("L", "1") or stored.startswith("P")):
            wanted = f"be a {', '.join(LABEL_FORMATS)} file with labels as they are, not scaled or compressed with loss"
            raise DamagedImageError(f"{path} must {wanted}, got {image.format} with samples {stored!r}")
        labels = shift_labels(torch.from_numpy(np.array(image).astype(np.int64)))
        wrong = labels[(labels >= self.classes) & (labels != IGNORED)]
        if wrong.numel():
            wanted = f"labels 0 to {self.classes} (classes), or {IGNORED}"
            raise DamagedImageError(f"{path} must have {wanted}, got {int(wrong[0]) + 1}")
        return labels


def _files_by_name(folder: Path) -> dict[str, Path]:
    """The images in a folder, by name without suffix."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} must be a folder of images, got no folder; root has images/ and annotations/"
        )
    files = [path for path in sorted(folder.iterdir()) if is_image(path)]
    if not files:
        raise ValueError(f"{folder} must have one or more images, got none")
    by_name: dict[str, Path] = {}
    for path in files:
        if path.stem in by_name:
            raise ValueError(f"{folder} must have one file per name, got {by_name[path.stem].name} and {path.name}")
        by_name[path.stem] = path
    return by_name
