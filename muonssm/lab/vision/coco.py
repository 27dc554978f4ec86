"""Data in COCO's format: an annotation file and a folder of images, as torchvision's Mask R-CNN takes them.

    data = CocoImages("instances_train2017.json", "train2017", CocoView(short=(480, 800), flip=0.5))
    image, target = data[0]

image    float32 `[3, H, W]` in [0, 1]
target   boxes float32 `[n, 4]` (left, top, right, bottom), labels int64 `[n]` (from 1 on; 0 is nothing to torchvision),
         masks uint8 `[n, H, W]`, area float32 `[n]`, iscrowd int64 `[n]`, image_id int64 `[]`

Annotations of crowds and boxes without an area are no objects to learn from and left out; `score_detections` reads the
annotation file itself, in which crowds are still there.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import is_int, is_number

from .image_files import DamagedImageError, need, read_image

SHORT = tuple(range(480, 801, 32))
LONGEST = 1333
KEYS = {"images": ("id", "file_name", "height", "width"), "annotations": ("id", "image_id", "category_id", "bbox")}
Target = dict[str, Tensor]


@dataclass(frozen=True)
class CocoView:
    """How images are shown.

    Attributes:
        short: what the shorter side is brought to; one of several is drawn each time. None: sizes stay as they are.
        longest: what the longer side may then be at most; the image is made smaller should it be more.
        flip: chance to be mirrored, left to right.
    """

    short: tuple[int, ...] | None = SHORT
    longest: int = LONGEST
    flip: float = 0.0

    def __post_init__(self) -> None:
        if self.short is not None:
            sides = (self.short,) if isinstance(self.short, int) else tuple(self.short)
            if not sides or not all(is_int(side, 1) for side in sides):
                raise ValueError(f"short is {self.short!r}; it may be None or one or more integers > 0")
            object.__setattr__(self, "short", sides)
        if not is_int(self.longest, max(self.short or (1,))):
            raise ValueError(
                f"longest is {self.longest!r}; it may be an integer >= {max(self.short or (1,))}, as short"
            )
        if not is_number(self.flip) or not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip!r}; it may be in [0, 1]")

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Image and target, changed by numbers from torch's default generator so that a resumed run draws the same."""
        if self.flip and torch.rand(()) < self.flip:
            image, target = mirror(image, target)
        if self.short is not None:
            side = self.short[int(torch.randint(len(self.short), ()))] if len(self.short) > 1 else self.short[0]
            image, target = resize(image, target, fitting(image.shape[-2:], side, self.longest))
        return image, target


def fitting(size: tuple[int, int] | torch.Size, short: int, longest: int) -> tuple[int, int]:
    """Height and width with the shorter side `short`, or less where the longer one would be more than `longest`."""
    factor = min(short / min(size), longest / max(size))
    return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))


def resize(image: Tensor, target: Target, size: tuple[int, int]) -> tuple[Tensor, Target]:
    """Image (bilinear, with a low-pass filter), boxes, masks (nearest) and areas at another height and width."""
    before = image.shape[-2:]
    if tuple(before) == tuple(size):
        return image, target
    down, across = size[0] / before[0], size[1] / before[1]
    image = F.interpolate(image[None], size, mode="bilinear", align_corners=False, antialias=True)[0].clamp(0, 1)
    masks = target["masks"]
    masks = (
        F.interpolate(masks[None].float(), size, mode="nearest-exact")[0].to(masks.dtype)
        if len(masks)
        else (masks.new_zeros(0, *size))
    )
    boxes = target["boxes"] * torch.tensor([across, down, across, down])
    return image, {**target, "boxes": boxes, "masks": masks, "area": target["area"] * (down * across)}


def mirror(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Image, boxes and masks, left to right."""
    left, top, right, bottom = target["boxes"].unbind(1)
    width = image.shape[-1]
    boxes = torch.stack([width - right, top, width - left, bottom], dim=1)
    return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """pycocotools prints what it does."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def index(dataset: dict[str, Any]) -> Any:
    """pycocotools' object for annotations that are in memory."""
    try:
        from pycocotools.coco import COCO
    except ImportError as error:
        raise need("pycocotools", "COCO data") from error
    with quiet():
        coco = COCO()
        coco.dataset = dataset
        coco.createIndex()
    return coco


def read_annotations(path: Path) -> dict[str, Any]:
    """The content of an annotation file, if it is whole and its parts fit together."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing; it may be an annotation file in COCO's format") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    for part in (*KEYS, "categories"):
        if not isinstance(content, dict) or not isinstance(content.get(part), list):
            raise ValueError(f"{path} has no list of {part}; it may be an annotation file in COCO's format")
        keys = KEYS.get(part, ("id", "name"))
        for number, item in enumerate(content[part]):
            missing = [key for key in keys if key not in item]
            if missing:
                raise ValueError(f"{path} has no {missing[0]!r} in number {number} of {part}")
    _check_references(path, content)
    return content


def _check_references(path: Path, content: dict[str, Any]) -> None:
    if not content["images"] or not content["categories"]:
        raise ValueError(f"{path} has no {'categories' if content['images'] else 'images'}; it may have one or more")
    for part in ("images", "annotations", "categories"):
        ((number, count),) = Counter(item["id"] for item in content[part]).most_common(1) or [(None, 1)]
        if count > 1:
            raise ValueError(f"{path} has id {number} {count} times in {part}; each may be there once")
    known = {part: {item["id"] for item in content[part]} for part in ("images", "categories")}
    for item in content["annotations"]:
        for key, part in (("image_id", "images"), ("category_id", "categories")):
            if item[key] not in known[part]:
                raise ValueError(f"{path} has annotation {item['id']} with {key} {item[key]}, which is not in {part}")


class CocoImages(Dataset):
    """Images with boxes, labels and masks.

    Attributes:
        classes: names of the categories, in the order of their ids; label l is `classes[l - 1]`.
        category_ids: the ids of the file, for label l at `l - 1`.
        image_ids: the ids of the images, in the order of this data set.
        annotations: the content of the file, as `score_detections` takes it.
        crowds, degenerate: annotations left out, counted.
    """

    def __init__(
        self, annotations: str | Path, images: str | Path, view: CocoView | None = None, drop_empty: bool = False
    ) -> None:
        """`drop_empty` leaves out images with nothing to learn from; view None shows images as they are."""
        self.path, self.folder, self.view = Path(annotations), Path(images), view
        self.annotations = read_annotations(self.path)
        categories = sorted(self.annotations["categories"], key=lambda category: category["id"])
        self.classes = tuple(str(category["name"]) for category in categories)
        self.category_ids = tuple(int(category["id"]) for category in categories)
        self._coco = index(self.annotations)
        self.crowds = self.degenerate = 0
        self._usable = self._choose()
        self.image_ids = sorted(self._coco.imgs)
        if drop_empty:
            self.image_ids = [image for image in self.image_ids if self._usable[image]]
        self._check()

    def _choose(self) -> dict[int, list[dict[str, Any]]]:
        """The annotations to learn from, for each image."""
        chosen: dict[int, list[dict[str, Any]]] = {image: [] for image in self._coco.imgs}
        for item in self.annotations["annotations"]:
            _, _, right, bottom = box = self._box(item)
            if item.get("iscrowd", 0):
                self.crowds += 1
            elif right <= box[0] or bottom <= box[1]:
                self.degenerate += 1
            elif not item.get("segmentation"):
                raise ValueError(f"{self.path} has annotation {item['id']} without a segmentation; it may have one")
            else:
                chosen[item["image_id"]].append(item)
        return chosen

    def _box(self, item: dict[str, Any]) -> tuple[float, float, float, float]:
        """Left, top, right, bottom, as far as they are in the image."""
        image = self._coco.imgs[item["image_id"]]
        left, top, width, height = item["bbox"]
        ends = (left + width, image["width"]), (top + height, image["height"])
        return max(0.0, left), max(0.0, top), min(*ends[0]), min(*ends[1])

    def _check(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"images is {str(self.folder)!r}, which is no folder; it may be that of the images")
        if not self.image_ids:
            raise ValueError(f"{self.path} has no annotations to learn from")
        for image in self.image_ids:
            file = self.folder / self._coco.imgs[image]["file_name"]
            if not file.is_file():
                raise FileNotFoundError(f"{file} is missing, and {self.path} has it as image {image}")

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, number: int) -> tuple[Tensor, Target]:
        image_id = self.image_ids[number]
        record = self._coco.imgs[image_id]
        path = self.folder / record["file_name"]
        image = read_image(path).float() / 255
        if image.shape[1:] != (record["height"], record["width"]):
            raise DamagedImageError(
                f"{path} is {image.shape[1]} x {image.shape[2]}, and {self.path} says it is "
                f"{record['height']} x {record['width']} (height x width)"
            )
        target = self.target(image_id)
        return self.view(image, target) if self.view else (image, target)

    def target(self, image_id: int) -> Target:
        """What is on an image, at its own size."""
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
