"""Data in ADE20K's layout: a class for each pixel.

    data = Ade20k("ADEChallengeData2016", "training", classes=150, view=CropView(512))
    image, labels = data[0]

root/images/training/*.jpg        root/annotations/training/*.png      and the same for validation and others
image    float32 `[3, H, W]` in [0, 1]
labels   int64 `[H, W]`: 0 to classes - 1, or 255 where nothing is to be learned. Files have one more: their 0 (nothing)
         becomes 255, and what is left is one less.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import is_int, is_number

from .image_files import DamagedImageError, is_image, open_image, read_image

IGNORED = 255
TRIES = 10  # crops drawn until one is not nearly all of one class


@dataclass(frozen=True)
class CropView:
    """Random scale, crop and mirror, as UperNet is trained.

    Attributes:
        size: side of the crop; smaller images are filled with black, their labels with 255.
        scales: least and most of the factor that the image is scaled by.
        flip: chance to be mirrored, left to right.
        most: share of a crop's labelled pixels that one class may have; other places are tried for a while.
    """

    size: int = 512
    scales: tuple[float, float] = (0.5, 2.0)
    flip: float = 0.5
    most: float = 0.75

    def __post_init__(self) -> None:
        if not is_int(self.size, 1):
            raise ValueError(f"size is {self.size!r}; it may be an integer >= 1")
        object.__setattr__(self, "scales", tuple(self.scales))
        if len(self.scales) != 2 or not 0 < self.scales[0] <= self.scales[1]:
            raise ValueError(f"scales is {self.scales!r}; it may be the least and the most factor, > 0")
        for name, least in (("flip", 0), ("most", 1e-9)):
            value = getattr(self, name)
            if not is_number(value) or not least <= value <= 1:
                raise ValueError(f"{name} is {value!r}; it may be in {'[' if least == 0 else '('}0, 1]")

    def __call__(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Image and labels, changed by numbers from torch's default generator so that a resumed run draws the same."""
        low, high = self.scales
        image, labels = scale(image, labels, low + (high - low) * float(torch.rand(())))
        image, labels = fill(image, labels, self.size)
        image, labels = self._crop(image, labels)
        if self.flip and torch.rand(()) < self.flip:
            image, labels = image.flip(-1), labels.flip(-1)
        return image, labels

    def _crop(self, image: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(TRIES):
            top, left = (int(torch.randint(side - self.size + 1, ())) for side in labels.shape)
            window = (slice(top, top + self.size), slice(left, left + self.size))
            found = labels[window]
            counts = found[found != IGNORED].bincount()
            if counts.numel() and counts.max() <= self.most * counts.sum():
                break
        return image[:, *window], labels[window]


def scale(image: Tensor, labels: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Image (bilinear, with a low-pass filter) and labels (nearest), larger or smaller by a factor."""
    size = [max(1, round(side * factor)) for side in labels.shape]
    if size == list(labels.shape):
        return image, labels
    image = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0].clamp(0, 1)
    return image, F.interpolate(labels[None, None].float(), size, mode="nearest-exact")[0, 0].to(labels.dtype)


def fill(image: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Makes both sides `size` at least: on the right and at the bottom, black and with nothing to learn."""
    missing = (0, max(0, size - labels.shape[1]), 0, max(0, size - labels.shape[0]))
    if not any(missing):
        return image, labels
    return F.pad(image, missing), F.pad(labels, missing, value=IGNORED)


def shift_labels(labels: Tensor) -> Tensor:
    """Labels as files have them to those of training: 0 (nothing) becomes 255, all others one less; 255 stays."""
    return torch.where((labels == 0) | (labels == IGNORED), IGNORED, labels - 1)


class Ade20k(Dataset):
    """Images with a label for each pixel.

    Attributes:
        pairs: files of images and labels, in the order of their names.
        classes: how many.
    """

    def __init__(self, root: str | Path, part: str, classes: int = 150, view: CropView | None = None) -> None:
        """`part` is the name of a folder, such as `"training"`; view None shows images as they are."""
        if not is_int(classes) or not 1 <= classes < IGNORED:
            raise ValueError(f"classes is {classes!r}; it may be an integer from 1 to {IGNORED - 1}")
        self.classes, self.view = classes, view
        images, labels = (_files(Path(root) / inside / part) for inside in ("images", "annotations"))
        for one, other, folder in ((images, labels, "annotations"), (labels, images, "images")):
            alone = sorted(set(one) - set(other))
            if alone:
                raise FileNotFoundError(f"{one[alone[0]]} has no partner of its name in {Path(root) / folder / part}")
        self.pairs = [(images[name], labels[name]) for name in sorted(images)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        path, labelled = self.pairs[number]
        image, labels = read_image(path).float() / 255, self.labels(number)
        if image.shape[1:] != labels.shape:
            sizes = f"{tuple(labels.shape)} and {path} {tuple(image.shape[1:])} (height, width)"
            raise DamagedImageError(f"{labelled} is {sizes}; they may be of one size")
        return self.view(image, labels) if self.view else (image, labels)

    def shares(self, images: int) -> list[float]:
        """The share of each class among the labelled pixels of so many images, evenly apart."""
        count = min(images, len(self))
        pixels = torch.zeros(self.classes, dtype=torch.int64)
        for i in range(count):
            labels = self.labels(i * len(self) // count)
            pixels += torch.bincount(labels[labels != IGNORED], minlength=self.classes)
        return (pixels / pixels.sum().clamp(min=1)).tolist()

    def labels(self, number: int) -> Tensor:
        """The labels of one image, int64 `[H, W]`."""
        path = self.pairs[number][1]
        image = open_image(path)
        if image.mode not in ("L", "P", "1"):
            raise DamagedImageError(f"{path} is an image of mode {image.mode!r}; labels may be one byte a pixel")
        labels = shift_labels(torch.from_numpy(np.array(image).astype(np.int64)))
        wrong = labels[(labels >= self.classes) & (labels != IGNORED)]
        if wrong.numel():
            raise DamagedImageError(
                f"{path} has label {int(wrong[0]) + 1}; it may be 0 to {self.classes} (classes), or 255"
            )
        return labels


def _files(folder: Path) -> dict[str, Path]:
    """The images in a folder, by their names without suffix."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; root may have images/ and annotations/ with the same parts")
    files = [path for path in sorted(folder.iterdir()) if is_image(path)]
    if not files:
        raise ValueError(f"{folder} has no images; it may have one or more")
    named: dict[str, Path] = {}
    for path in files:
        if path.stem in named:
            raise ValueError(f"{path} and {named[path.stem].name} have one name; each may be there once")
        named[path.stem] = path
    return named
