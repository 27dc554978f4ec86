"""Data in COCO's format: an annotation file and a folder of images, as torchvision's Mask R-CNN takes them.

    data = CocoImages("instances_train2017.json", "train2017", CocoView(short=(480, 800), flip=0.5))
    image, target = data[0]

image    float32 `[3, H, W]` in [0, 1]
target   boxes float32 `[n, 4]` (left, top, right, bottom), labels int64 `[n]` (from 1; 0 is torchvision's background),
         masks uint8 `[n, H, W]`, area float32 `[n]`, iscrowd int64 `[n]`, image_id int64 `[]`

Targets leave out crowds and boxes without area. `score_detections` reads the annotation file itself, with the crowds.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_int, check_number
from muonssm.lab.core.untrusted import check_regular_file, read_json

from .coco_checks import check_annotations
from .image_files import DamagedImageError, missing_package, read_image

SHORT = tuple(range(480, 801, 32))
LONGEST = 1333
MAX_BYTES = 4 << 30  # of an annotation file; COCO's have up to 0.5 GB, LVIS's 1.2 GB
Target = dict[str, Tensor]


@dataclass(frozen=True)
class CocoView:
    """Random resize and flip.

    Attributes:
        short: length of the shorter side after resizing; one of several is drawn each time. None keeps the size.
        longest: largest length of the longer side after resizing; it takes precedence over `short`.
        flip: probability of a horizontal flip.
    """

    short: tuple[int, ...] | None = SHORT
    longest: int = LONGEST
    flip: float = 0.0

    def __post_init__(self) -> None:
        if self.short is not None:
            sides = (self.short,) if isinstance(self.short, int) else tuple(self.short)
            if not sides:
                raise ValueError(f"short must be None or one or more integers, got {self.short!r}")
            for side in sides:
                check_int("short", side, 1)
            object.__setattr__(self, "short", sides)
        check_int("longest", self.longest, max(self.short or (1,)))
        check_number("flip", self.flip, 0, 1)

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Transform image and target; random numbers come from torch's default generator, so that runs can resume."""
        if self.flip and torch.rand(()) < self.flip:
            image, target = flip(image, target)
        if self.short is not None:
            side = self.short[int(torch.randint(len(self.short), ()))] if len(self.short) > 1 else self.short[0]
            image, target = resize(image, target, resized_shape(image.shape[-2:], side, self.longest))
        return image, target


def resized_shape(size: tuple[int, int] | torch.Size, short: int, longest: int) -> tuple[int, int]:
    """Height and width with the shorter side `short`, or less if the longer side would exceed `longest`."""
    factor = min(short / min(size), longest / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def resize(image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    """Resize image (bilinear, antialiased), boxes, masks (nearest) and areas to another height and width."""
    before = image.shape[-2:]
    if tuple(before) == tuple(size):
        return image, target
    down, across = size[0] / before[0], size[1] / before[1]
    image = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0].clamp(0, 1)
    masks = target["masks"]
    if len(masks):
        masks = F.interpolate(masks[None].float(), size, mode="nearest-exact")[0].to(masks.dtype)
    else:
        masks = masks.new_zeros(0, *size)
    boxes = target["boxes"] * torch.tensor([across, down, across, down])
    return image, {**target, "boxes": boxes, "masks": masks, "area": target["area"] * (down * across)}


def flip(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Flip image, boxes and masks horizontally."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[-1]
    boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
    return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}


@contextlib.contextmanager
def hide_output() -> Iterator[None]:
    """Hide what pycocotools prints."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def index_annotations(annotations: dict[str, Any]) -> Any:
    """Create pycocotools' COCO object of annotations in memory."""
    try:
        from pycocotools.coco import COCO
    except ImportError as error:
        raise missing_package("pycocotools", "COCO data") from error
    with hide_output():
        coco = COCO()
        coco.dataset = annotations
        coco.createIndex()
    return coco


def read_annotations(path: Path) -> dict[str, Any]:
    """Read an annotation file and check that it is complete and consistent."""
    try:
        content = read_json(path, MAX_BYTES, f"{__name__}.MAX_BYTES")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} must be an annotation file in COCO's format, got no file") from None
    check_annotations(path, content)
    return content


class CocoImages(Dataset):
    """Images with boxes, labels and masks.

    Attributes:
        classes: names of the categories, sorted by id; label l is `classes[l - 1]`.
        category_ids: ids of the categories; label l is `category_ids[l - 1]`.
        image_ids: ids of the images, in the order of this data set.
        annotations: the content of the file, as `score_detections` takes it.
        crowds, empty_boxes: how many annotations were left out as crowds, or for boxes without area.
    """

    def __init__(
        self, annotations: str | Path, images: str | Path, view: CocoView | None = None, drop_empty: bool = False
    ) -> None:
        """`drop_empty` leaves out images without objects; without a view, images are returned unchanged."""
        self.path, self.folder, self.view = Path(annotations), Path(images), view
        self.annotations = read_annotations(self.path)
        categories = sorted(self.annotations["categories"], key=lambda category: category["id"])
        self.classes = tuple(str(category["name"]) for category in categories)
        self.category_ids = tuple(int(category["id"]) for category in categories)
        self._coco = index_annotations(self.annotations)
        self.crowds = self.empty_boxes = 0
        self._usable = self._select()
        self.image_ids = sorted(self._coco.imgs)
        if drop_empty:
            self.image_ids = [image for image in self.image_ids if self._usable[image]]
        self._check()

    def _select(self) -> dict[int, list[dict[str, Any]]]:
        """The usable annotations of each image; counts the others."""
        usable: dict[int, list[dict[str, Any]]] = {image: [] for image in self._coco.imgs}
        for item in self.annotations["annotations"]:
            left, top, right, bottom = self._box(item)
            if item.get("iscrowd", 0):
                self.crowds += 1
            elif right <= left or bottom <= top:
                self.empty_boxes += 1
            elif not item.get("segmentation"):
                raise ValueError(f"{self.path} must have a segmentation in annotation {item['id']}, got none")
            else:
                usable[item["image_id"]].append(item)
        return usable

    def _box(self, item: dict[str, Any]) -> tuple[float, float, float, float]:
        """Left, top, right and bottom, clipped to the image."""
        image = self._coco.imgs[item["image_id"]]
        left, top, width, height = item["bbox"]
        right, bottom = min(left + width, image["width"]), min(top + height, image["height"])
        return max(0.0, left), max(0.0, top), right, bottom

    def _check(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"images must be a folder, got {str(self.folder)!r}")
        if not self.image_ids:
            raise ValueError(f"{self.path} must have usable annotations, got none")
        for image in self.image_ids:
            file = self.folder / self._coco.imgs[image]["file_name"]
            try:
                check_regular_file(file)
            except FileNotFoundError:
                wanted = f"as image {image} of {self.path}"
                raise FileNotFoundError(f"{file} must exist, {wanted}, got no file") from None

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        image_id = self.image_ids[index]
        record = self._coco.imgs[image_id]
        path = self.folder / record["file_name"]
        image = read_image(path).float() / 255
        if image.shape[1:] != (record["height"], record["width"]):
            wanted = f"{record['height']} x {record['width']} (height x width), as {self.path} says"
            raise DamagedImageError(f"{path} must be {wanted}, got {image.shape[1]} x {image.shape[2]}")
        target = self.target(image_id)
        return self.view(image, target) if self.view else (image, target)

    def target(self, image_id: int) -> Target:
        """The target of an image at its original size."""
        items, record = self._usable[image_id], self._coco.imgs[image_id]
        shape = (len(items), record["height"], record["width"])
        masks = np.stack([self._coco.annToMask(item) for item in items]) if items else np.zeros(shape, np.uint8)
        labels = [self.category_ids.index(item["category_id"]) + 1 for item in items]
        return {
            "boxes": torch.tensor([self._box(item) for item in items], dtype=torch.float32).reshape(-1, 4),
            "labels": torch.tensor(labels, dtype=torch.int64),
            "masks": torch.from_numpy(masks),
            "area": torch.tensor([item.get("area", 0.0) for item in items], dtype=torch.float32),
            "iscrowd": torch.zeros(len(items), dtype=torch.int64),
            "image_id": torch.tensor(image_id),
        }
