"""Preprocessing and augmentation of images for a classifier.

Photographs go through timm's pipeline, image by image (`ImageView`). Small images of one size stay unchanged, and are
rotated, shifted, zoomed, cropped and flipped batch by batch (`ImageAugmentation.transform`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_choice, check_int, check_number

from .image_files import to_pil
from .images import ImageSet

FRACTIONS = ("erasing", "smoothing", "flip", "jitter", "shift", "zoom")


@dataclass(frozen=True)
class ImageAugmentation:
    """Preprocessing and augmentation; everything but `size` and `crop` applies to training only.

    Attributes:
        size: side that timm's pipeline resizes images to; 0 keeps images unchanged (all must have one size).
        crop: fraction of the shorter side in the center crop of evaluation.
        min_area: smallest fraction of an image's area in the random crop of training.
        interpolation: for resizing: `"bicubic"`, `"bilinear"` or `"random"`.
        flip: probability of a horizontal flip.
        pad: with size 0, crop images at random after reflecting their border by this many pixels; 0 for none.
        jitter: strength of brightness, contrast and color jitter; not used with RandAugment.
        randaugment: timm's configuration string, like `"rand-m9-mstd0.5-inc1"`; empty for none.
        erasing: probability that a rectangle is replaced by noise.
        mixup, cutmix: alpha of timm's Mixup; 0 for none.
        smoothing: label smoothing with mixup or cutmix.
        rotation: largest rotation in degrees, in both directions.
        shift, zoom: largest fractions of the side, in both directions.
    """

    size: int = 0
    crop: float = 1.0
    min_area: float = 0.08
    interpolation: str = "bicubic"
    flip: float = 0.0
    pad: int = 0
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
        for name in ("size", "pad"):
            check_int(name, getattr(self, name), 0)
        for name in ("crop", "min_area"):
            check_number(name, getattr(self, name), 0, 1, open_low=True)
        for name in FRACTIONS:
            check_number(name, getattr(self, name), 0, 1)
        for name, high in (("mixup", math.inf), ("cutmix", math.inf), ("rotation", 180)):
            check_number(name, getattr(self, name), 0, high)
        check_choice("interpolation", self.interpolation, ("bicubic", "bilinear", "random"))
        if not isinstance(self.randaugment, str):
            raise TypeError(f"randaugment must be a string like 'rand-m9-mstd0.5-inc1', got {self.randaugment!r}")
        if self.smoothing and not (self.mixup or self.cutmix):
            hint = "use training.label_smoothing"
            raise ValueError(f"smoothing must be 0 without mixup or cutmix, got {self.smoothing}; {hint}")
        if self.pad and self.size:
            raise ValueError(f"pad must be 0 with size {self.size}, got {self.pad}; min_area crops at random")
        for name in ("jitter", "randaugment", "erasing"):
            if getattr(self, name) and not self.size:
                raise ValueError(f"{name} must be 0 or empty with size 0, got {getattr(self, name)!r}")

    def pipeline(self, metadata: dict[str, Any], training: bool) -> Any:
        """Create timm's transform of a PIL image to a normalized tensor; None if images stay unchanged."""
        if not self.size:
            return None
        from timm.data import create_transform

        return create_transform(
            (metadata["channels"], self.size, self.size),
            is_training=training,
            scale=(self.min_area, 1.0),
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

    def create_mixup(self, classes: int) -> Any:
        """Create timm's Mixup for batches; None if neither mixup nor cutmix is set."""
        if not (self.mixup or self.cutmix):
            return None
        from timm.data import Mixup

        return Mixup(self.mixup, self.cutmix, label_smoothing=self.smoothing, num_classes=classes)

    def transform(self, images: Tensor) -> Tensor:
        """Rotate, zoom and shift each image `[B, C, H, W]` at random, then crop and flip it."""
        if self.rotation or self.shift or self.zoom:
            images = self._warp(images)
        if self.size or not (self.pad or self.flip):
            return images  # timm has flipped photographs
        return crop_and_flip(images, self.pad, self.flip)

    def _warp(self, images: Tensor) -> Tensor:
        """Rotate, zoom and shift; the border is repeated outside."""
        angle, factor, down, across = torch.rand(4, len(images)) * 2 - 1
        angle, factor = angle * math.radians(self.rotation), 1 + factor * self.zoom
        cos, sin = angle.cos() * factor, angle.sin() * factor
        # Coordinates go from -1 to 1: a shift by a fraction of the side is twice that fraction.
        x_row = torch.stack([cos, -sin, 2 * self.shift * across], 1)
        y_row = torch.stack([sin, cos, 2 * self.shift * down], 1)
        grid = F.affine_grid(torch.stack([x_row, y_row], 1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def crop_and_flip(images: Tensor, pad: int, flip: float) -> Tensor:
    """Reflect the border of images `[B, C, H, W]` by `pad`, cut each to its size at random, and flip a share `flip`."""
    B, _, H, W = images.shape
    if pad >= min(H, W):
        raise ValueError(f"pad must be less than the sides of the images, {H} x {W}, got {pad}")
    top, left = torch.randint(2 * pad + 1, (2, B, 1))
    rows, columns = top + torch.arange(H), torch.arange(W).repeat(B, 1)
    columns = left + torch.where(torch.rand(B, 1) < flip, columns.flip(1), columns)
    padded = F.pad(images, (pad,) * 4, mode="reflect") if pad else images
    # Indexing with batch, rows and columns moves the channels to the end.
    picked = padded[torch.arange(B)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


class ImageView:
    """Preprocess an image uint8 `[C, H, W]` for a network: float `[C, H', W']`, normalized."""

    def __init__(self, augmentation: ImageAugmentation, metadata: dict[str, Any], training: bool) -> None:
        self.pipeline = augmentation.pipeline(metadata, training)
        self.mean, self.std = (torch.tensor(metadata[name])[:, None, None] for name in ("mean", "std"))

    def __call__(self, image: Tensor) -> Tensor:
        if self.pipeline is None:
            return (image.float() / 255 - self.mean) / self.std
        return self.pipeline(to_pil(image))


class ViewedImages(Dataset):
    """Preprocessed images with their labels."""

    def __init__(self, images: ImageSet, view: ImageView) -> None:
        self.images, self.view = images, view

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[index]
        return self.view(image), label
