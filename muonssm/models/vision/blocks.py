"""Blocks of MambaVision and the stages they stack to.

    ConvBlock       x + BN(conv(gelu(BN(conv(x)))))                     x `[B, C, H, W]`
    TokenBlock      u + mixer(LN(u)), then u + MLP(LN(u))               u `[B windows, L, C]`, L positions of a window

Every residual branch is left out for some rows in training (`DropPath`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .config import WINDOWED, VisionConfig
from .mixer import vision_mixer


class DropPath(nn.Module):
    """In training zero for a share of the rows, and the others scaled up so that the mean stays."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return x
        kept = x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(1 - self.share)
        return x * kept.div_(1 - self.share)

    def extra_repr(self) -> str:
        """What `print(model)` says."""
        return f"{self.share:.3f}"


class ConvBlock(nn.Module):
    """Two 3x3 convolutions."""

    def __init__(self, dim: int, drop_path: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(dim, eps=1e-5)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(dim, eps=1e-5)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.norm1(self.conv1(x)), approximate="tanh")
        return x + self.drop_path(self.norm2(self.conv2(h)))


class Attention(nn.Module):
    """Self-attention among the positions of a window, without encoding where they are."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, u: Tensor) -> Tensor:
        q, k, v = self.qkv(u).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Position by position."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width)
        self.fc2 = nn.Linear(width, dim)

    def forward(self, u: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(u)))


class TokenBlock(nn.Module):
    """A mixer or attention, and an MLP."""

    def __init__(self, dim: int, mixer: nn.Module, mlp_ratio: int, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.mixer = mixer
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, mlp_ratio * dim)
        self.drop_path = DropPath(drop_path)

    def forward(self, u: Tensor) -> Tensor:
        u = u + self.drop_path(self.mixer(self.norm1(u)))
        return u + self.drop_path(self.mlp(self.norm2(u)))


class Window(NamedTuple):
    """Height and width of windows over a map of `size`, and how the map becomes windows and back."""

    height: int
    width: int
    size: tuple[int, int]

    @classmethod
    def over(cls, x: Tensor, side: int, fit: bool) -> Window:
        """Windows of `side` over x `[B, C, H, W]`; with `fit` no wider than the map."""
        H, W = x.shape[-2:]
        return cls(min(side, H) if fit else side, min(side, W) if fit else side, (H, W))

    @property
    def counts(self) -> tuple[int, int]:
        """How many windows there are down and across."""
        H, W = self.size
        return -(-H // self.height), -(-W // self.width)

    def partition(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]`, zeros added right and below, to `[B windows, positions, C]`."""
        (H, W), (down, across) = self.size, self.counts
        if (down * self.height, across * self.width) != (H, W):
            x = F.pad(x, (0, across * self.width - W, 0, down * self.height - H))
        x = x.unflatten(2, (down, self.height)).unflatten(4, (across, self.width))
        return x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)

    def reverse(self, u: Tensor) -> Tensor:
        """Back again, without what was added."""
        (H, W), (down, across) = self.size, self.counts
        x = u.unflatten(1, (self.height, self.width)).unflatten(0, (-1, down, across))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)[:, :, :H, :W]


class Downsample(nn.Module):
    """Half as high and wide, with the channels of the next stage."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.reduction = nn.Sequential(nn.Conv2d(dim, out, 3, stride=2, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(x)


class Stage(nn.Module):
    """Blocks on one map; `downsample`, None at the end, is for whoever goes on to the next stage."""

    def __init__(self, config: VisionConfig, index: int, drop_path: Sequence[float]) -> None:
        super().__init__()
        dim = config.dims[index]
        self.side = config.windows[WINDOWED.index(index)] if index in WINDOWED else None
        self.fit = config.fit_windows
        self.blocks = nn.ModuleList(_block(config, index, number, share) for number, share in enumerate(drop_path))
        self.downsample = Downsample(dim, config.dims[index + 1]) if index + 1 < len(config.dims) else None

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]` to the same."""
        window = None if self.side is None else Window.over(x, self.side, self.fit)
        h = x if window is None else window.partition(x)
        for block in self.blocks:
            h = block(h)
        return h if window is None else window.reverse(h)


def _block(config: VisionConfig, stage: int, number: int, drop_path: float) -> nn.Module:
    dim = config.dims[stage]
    if stage not in WINDOWED:
        return ConvBlock(dim, drop_path)
    if number < config.mixers(stage):
        return TokenBlock(dim, vision_mixer(dim, config), config.mlp_ratio, drop_path)
    return TokenBlock(dim, Attention(dim, config.heads[WINDOWED.index(stage)]), config.mlp_ratio, drop_path)
