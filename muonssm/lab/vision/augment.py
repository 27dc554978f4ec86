"""What is done to images before a classifier sees them: small changes in training, one size always.

Large photographs go through timm's pipeline, image by image (`ImageViews`); small images of one size stay as they are,
and are turned, moved and scaled a little, a batch at a time (`ImageAugmentation.bend`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import is_int, is_number
from muonssm.lab.core.torchvision_cpu import prepare_torchvision

from .image_files import to_pil
from .images import ImageSet

SHARES = ("erasing", "smoothing", "flip", "jitter", "shift", "zoom")


@dataclass(frozen=True)
class ImageAugmentation:
    """How images are shown. All changes but size and crop are for training alone.

    Attributes:
        size: side that images are brought to, by timm's pipeline; 0 leaves them as they are (all of one size then).
        crop: share of the shorter side that is looked at when scoring.
        least: smallest share of an image's area in the random crop of training.
        interpolation: of resizing: `"bicubic"`, `"bilinear"` or `"random"`.
        flip: chance to be mirrored, left to right.
        jitter: of brightness, contrast and colour, where there is no RandAugment.
        randaugment: in timm's spelling, like `"rand-m9-mstd0.5-inc1"`; empty for none.
        erasing: chance that a rectangle is replaced by noise.
        mixup, cutmix: alpha of both, by timm; 0 for none.
        smoothing: part of the label that goes to all classes alike, with mixup or cutmix.
        rotation: degrees, to either side.
        shift, zoom: shares of the side, to either side.
    """

    size: int = 0
    crop: float = 1.0
    least: float = 0.08
    interpolation: str = "bicubic"
    flip: float = 0.0
    jitter: float = 0.0
    randaugment: str = ""
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0
    rotation: float = 0.0
    shift: float = 0.0
    zoom: float = 0.0

    def __post_init__(self) -> None:
        if not is_int(self.size, 0):
            raise ValueError(f"size is {self.size!r}; it may be an integer > 0, or 0 for images as they are")
        for name in ("crop", "least"):
            if not is_number(getattr(self, name)) or not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be in (0, 1]")
        for name in SHARES:
            if not is_number(getattr(self, name)) or not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be in [0, 1]")
        for name, most in (("mixup", math.inf), ("cutmix", math.inf), ("rotation", 180)):
            if not is_number(getattr(self, name)) or not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be in [0, {most}]")
        if self.interpolation not in ("bicubic", "bilinear", "random"):
            raise ValueError(f"interpolation is {self.interpolation!r}; it may be 'bicubic', 'bilinear' or 'random'")
        if self.smoothing and not (self.mixup or self.cutmix):
            raise ValueError(f"smoothing is {self.smoothing} without mixup; it may be 0 (see training.label_smoothing)")
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        if not self.size:
            for name in ("jitter", "randaugment", "erasing", "flip"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is {getattr(self, name)!r} with size 0; without a size it may be 0 or empty"
                    )
        if not isinstance(self.randaugment, str):
            raise ValueError(f"randaugment is {self.randaugment!r}; it may be a text such as 'rand-m9-mstd0.5-inc1'")

    def pipeline(self, metadata: dict[str, Any], training: bool) -> Any:
        """timm's transform of a PIL image to a normalised tensor; None where images stay as they are."""
        if not self.size:
            return None
        prepare_torchvision()
        from timm.data import create_transform

        return create_transform(
            (metadata["channels"], self.size, self.size),
            is_training=training,
            scale=(self.least, 1.0),
            hflip=self.flip,
            color_jitter=self.jitter,
            auto_augment=self.randaugment or None,
            interpolation=self.interpolation if training or self.interpolation != "random" else "bicubic",
            mean=tuple(metadata["mean"]),
            std=tuple(metadata["std"]),
            re_prob=self.erasing,
            re_mode="pixel",
            crop_pct=self.crop,
        )

    def mixing(self, classes: int) -> Any:
        """timm's Mixup of a batch; None for none."""
        if not (self.mixup or self.cutmix):
            return None
        prepare_torchvision()
        from timm.data import Mixup

        return Mixup(self.mixup, self.cutmix, label_smoothing=self.smoothing, num_classes=classes)

    def bend(self, images: Tensor) -> Tensor:
        """Turns, scales and moves each image `[B, C, H, W]` a little; from outside comes what is at the edge."""
        if not (self.rotation or self.shift or self.zoom):
            return images
        angle, factor, down, across = torch.rand(4, len(images)) * 2 - 1
        angle, factor = angle * math.radians(self.rotation), 1 + factor * self.zoom
        cos, sin = angle.cos() * factor, angle.sin() * factor
        # Coordinates go from -1 to 1, so that a shift by a share of the side is twice that.
        rows = [torch.stack([cos, -sin, 2 * self.shift * across], 1), torch.stack([sin, cos, 2 * self.shift * down], 1)]
        grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


class ImageView:
    """An image, uint8 `[C, H, W]`, made ready for a network: float `[C, H', W']`, normalised."""

    def __init__(self, augmentation: ImageAugmentation, metadata: dict[str, Any], training: bool) -> None:
        self.transform = augmentation.pipeline(metadata, training)
        self.mean, self.std = (torch.tensor(metadata[name])[:, None, None] for name in ("mean", "std"))

    def __call__(self, image: Tensor) -> Tensor:
        if self.transform is None:
            return (image.float() / 255 - self.mean) / self.std
        return self.transform(to_pil(image))


def view_of(augmentation: ImageAugmentation, metadata: dict[str, Any]) -> ImageView:
    """How images are made ready when a trained network is to look at them."""
    return ImageView(augmentation, metadata, training=False)


class ImageViews(Dataset):
    """Images ready for a network, and their labels."""

    def __init__(self, images: ImageSet, view: ImageView) -> None:
        self.images, self.view = images, view

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return self.view(image), label
