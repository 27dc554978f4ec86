"""Augmentation for small sensor data sets: random rotation, noise, scale and time warp, drawn anew for every batch.

x   `[B, L, C]`, standardized windows; every three consecutive channels are the axes of one sensor
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.checks import check_number

UPPER_BOUNDS = {"rotation": 180.0, "jitter": 100.0, "scaling": 100.0, "offset": 100.0}
UPPER_BOUND_OF_FRACTIONS = 0.95


@dataclass(frozen=True)
class Augmentation:
    """Strength of each augmentation; 0 turns it off.

    Attributes:
        rotation: largest angle in degrees by which the sensors of a window are rotated about a random axis.
        jitter: standard deviation of noise added to every sample.
        scaling: standard deviation of a factor per channel, around 1.
        offset: standard deviation of a constant added to each channel, as if the sensor were worn differently.
        warp: largest relative change of speed within a window.
        shift: largest fraction of a window by which it is shifted in time; the ends repeat their last sample.
        mask: largest fraction of a window that is set to zero.
    """

    rotation: float = 0.0
    jitter: float = 0.0
    scaling: float = 0.0
    offset: float = 0.0
    warp: float = 0.0
    shift: float = 0.0
    mask: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            high = UPPER_BOUNDS.get(field.name, UPPER_BOUND_OF_FRACTIONS)
            check_number(field.name, getattr(self, field.name), 0, high)

    def __call__(self, x: Tensor) -> Tensor:
        """Augment windows with torch's default generator, whose state a checkpoint keeps."""
        if self.rotation:
            if x.shape[2] % 3:
                raise ValueError(
                    f"rotation must be 0 for {x.shape[2]} channels, which are not sensors with three axes, "
                    f"got {self.rotation:g}"
                )
            x = rotate(x, math.radians(self.rotation))
        if self.warp or self.shift:
            x = warp_time(x, self.warp, self.shift)
        if self.scaling:
            x = x * (1 + self.scaling * torch.randn(x.shape[0], 1, x.shape[2]))
        if self.offset:
            x = x + self.offset * torch.randn(x.shape[0], 1, x.shape[2])
        if self.jitter:
            x = x + self.jitter * torch.randn_like(x)
        return mask_interval(x, self.mask) if self.mask else x


def rotate(x: Tensor, max_angle: float) -> Tensor:
    """Rotate all sensors of a window by one random rotation, up to `max_angle` radians (Rodrigues' formula)."""
    axis = F.normalize(torch.randn(x.shape[0], 3), dim=1)
    angle = (max_angle * (2 * torch.rand(x.shape[0]) - 1))[:, None, None]
    zero = torch.zeros(x.shape[0])
    a, b, c = axis.T
    K = torch.stack([zero, -c, b, c, zero, -a, -b, a, zero], dim=1).view(-1, 3, 3)
    R = torch.eye(3) + angle.sin() * K + (1 - angle.cos()) * (K @ K)
    return torch.einsum("bij,blsj->blsi", R, x.unflatten(2, (-1, 3))).flatten(2)


def warp_time(x: Tensor, max_speed_change: float, max_shift: float) -> Tensor:
    """Change the speed of a window smoothly and shift it in time; interpolate linearly and repeat the end samples."""
    B, L, _ = x.shape
    knots = 1 + max_speed_change * (2 * torch.rand(B, 1, 6) - 1)
    speed = F.interpolate(knots, size=L, mode="linear", align_corners=True)[:, 0]
    time = speed.cumsum(1)
    duration = L - 1 if max_speed_change == 0 else speed[:, 1:].mean(1, keepdim=True) * (L - 1)
    time = (time - time[:, :1]) * (L - 1) / duration
    time = (time + max_shift * L * (2 * torch.rand(B, 1) - 1)).clamp(0, L - 1)
    low = time.floor().long().clamp(max=L - 2)
    fraction = (time - low)[..., None]
    index = low[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, index) * (1 - fraction) + x.gather(1, index + 1) * fraction


def mask_interval(x: Tensor, max_fraction: float) -> Tensor:
    """Set one random interval of a window, up to `max_fraction` of it, to zero, the mean."""
    B, L, _ = x.shape
    length = (max_fraction * L * torch.rand(B, 1)).long()
    start = (torch.rand(B, 1) * (L - length)).long()
    position = torch.arange(L)
    return x.masked_fill(((position >= start) & (position < start + length))[..., None], 0.0)
