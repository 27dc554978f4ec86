"""What small sensor sets are trained with: windows turned, shaken, scaled and warped, new in every epoch.

x   `[B, L, C]`, standardised windows; channels come in threes, one for each axis of a sensor
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.checks import is_number


@dataclass(frozen=True)
class Augmentation:
    """How much of each; 0 is none of it.

    Attributes:
        rotation: largest angle, in degrees, by which a window's sensors are turned about a random axis.
        jitter: deviation of noise added to every sample.
        scaling: deviation of a factor for each channel, around 1.
        offset: deviation of a constant added to each channel, for a sensor worn otherwise.
        warp: largest relative change of speed along a window.
        shift: largest part of a window by which it is moved in time, ends filled with their last sample.
        mask: largest part of a window that is set to zero.
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
            value = getattr(self, field.name)
            high = {"rotation": 180.0, "jitter": 100.0, "scaling": 100.0, "offset": 100.0}.get(field.name, 0.95)
            if not is_number(value) or not 0 <= value <= high:
                raise ValueError(f"{field.name} is {value!r}; it may be in [0, {high:g}]")

    def __call__(self, x: Tensor) -> Tensor:
        """The windows, changed by numbers from torch's default generator (so that a resumed run draws the same)."""
        if self.rotation:
            if x.shape[2] % 3:
                axes = f"with {x.shape[2]} channels, no sensors of three axes"
                raise ValueError(f"rotation is {self.rotation:g}; {axes}, it may be 0")
            x = rotate(x, math.radians(self.rotation))
        if self.warp or self.shift:
            x = warp(x, self.warp, self.shift)
        if self.scaling:
            x = x * (1 + self.scaling * torch.randn(x.shape[0], 1, x.shape[2]))
        if self.offset:
            x = x + self.offset * torch.randn(x.shape[0], 1, x.shape[2])
        if self.jitter:
            x = x + self.jitter * torch.randn_like(x)
        return blank(x, self.mask) if self.mask else x


def rotate(x: Tensor, largest: float) -> Tensor:
    """Every window's sensors by one rotation each window, up to `largest` radians about a random axis (Rodrigues)."""
    axis = F.normalize(torch.randn(x.shape[0], 3), dim=1)
    angle = (largest * (2 * torch.rand(x.shape[0]) - 1))[:, None, None]
    zero = torch.zeros(x.shape[0])
    a, b, c = axis.T
    K = torch.stack([zero, -c, b, c, zero, -a, -b, a, zero], dim=1).view(-1, 3, 3)
    R = torch.eye(3) + angle.sin() * K + (1 - angle.cos()) * (K @ K)
    return torch.einsum("bij,blsj->blsi", R, x.unflatten(2, (-1, 3))).flatten(2)


def warp(x: Tensor, speed: float, shift: float) -> Tensor:
    """Every window at a smoothly changing speed, and moved; linear in between, held at the ends."""
    B, L, _ = x.shape
    knots = 1 + speed * (2 * torch.rand(B, 1, 6) - 1)
    rate = F.interpolate(knots, size=L, mode="linear", align_corners=True)[:, 0]
    time = rate.cumsum(1)
    time = (time - time[:, :1]) * (L - 1) / (L - 1 if speed == 0 else rate[:, 1:].mean(1, keepdim=True) * (L - 1))
    time = (time + shift * L * (2 * torch.rand(B, 1) - 1)).clamp(0, L - 1)
    low = time.floor().long().clamp(max=L - 2)
    part = (time - low)[..., None]
    index = low[..., None].expand(-1, -1, x.shape[2])
    return x.gather(1, index) * (1 - part) + x.gather(1, index + 1) * part


def blank(x: Tensor, largest: float) -> Tensor:
    """One stretch of every window, up to a part of `largest`, as zeros (the mean)."""
    B, L, _ = x.shape
    length = (largest * L * torch.rand(B, 1)).long()
    start = (torch.rand(B, 1) * (L - length)).long()
    step = torch.arange(L)
    return x.masked_fill(((step >= start) & (step < start + length))[..., None], 0.0)
