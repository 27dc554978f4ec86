"""Blocks of MambaVision, and the stages that stack them.

    ConvBlock       x + BN(conv(gelu(BN(conv(x)))))             x `[B, C, H, W]`
    TokenBlock      u + mixer(LN(u)), then u + MLP(LN(u))       u `[B windows, L, C]`, L positions of a window

In training every residual branch is dropped for a random share of the samples (`DropPath`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from .config import WINDOWED, VisionConfig
from .mixer import vision_mixer


class DropPath(nn.Module):
    """In training, zero a random share of the rows and scale up the others to keep the mean."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.share == 0:
            return x
        kept = x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(1 - self.share)
        return x * kept.div_(1 - self.share)

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"{self.share:.3f}"


class ConvBlock(nn.Module):
    """Two 3x3 convolutions with a residual connection."""

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
    """Self-attention among the positions of a window, without position encoding."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, u: Tensor) -> Tensor:
        q, k, v = self.qkv(u).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers per position, with gelu between them."""

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width)
        self.fc2 = nn.Linear(width, dim)

    def forward(self, u: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(u)))


class TokenBlock(nn.Module):
    """A mixer or attention, then an MLP, with residual connections."""

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
    """Partition a map of `size` into windows of `height` x `width`, and reverse the partition."""

    height: int
    width: int
    size: tuple[int, int]

    @classmethod
    def over(cls, x: Tensor, side: int, fit: bool) -> Window:
        """Choose windows of `side` for x `[B, C, H, W]`; `fit` limits them to the size of the map."""
        H, W = x.shape[-2:]
        return cls(min(side, H) if fit else side, min(side, W) if fit else side, (H, W))

    @property
    def counts(self) -> tuple[int, int]:
        """Number of windows down and across."""
        H, W = self.size
        return -(-H // self.height), -(-W // self.width)

    def partition(self, x: Tensor) -> Tensor:
        """Cut `[B, C, H, W]`, padded with zeros right and below, into `[B windows, positions, C]`."""
        (H, W), (down, across) = self.size, self.counts
        if (down * self.height, across * self.width) != (H, W):
            x = F.pad(x, (0, across * self.width - W, 0, down * self.height - H))
        x = x.unflatten(2, (down, self.height)).unflatten(4, (across, self.width))
        return x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(0, 2)

    def reverse(self, u: Tensor) -> Tensor:
        """Undo `partition`, and remove the padding."""
        (H, W), (down, across) = self.size, self.counts
        x = u.unflatten(1, (self.height, self.width)).unflatten(0, (-1, down, across))
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)[:, :, :H, :W]


class Downsample(nn.Module):
    """Halve height and width, and change to the channels of the next stage."""

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.reduction = nn.Sequential(nn.Conv2d(dim, out, 3, stride=2, padding=1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(x)


class Stage(nn.Module):
    """Blocks on one map. `MambaVision` calls `downsample` (None in the last stage) on the way to the next stage."""

    def __init__(self, config: VisionConfig, index: int, drop_path: Sequence[float]) -> None:
        super().__init__()
        dim = config.dims[index]
        self.side = config.windows[WINDOWED.index(index)] if index in WINDOWED else None
        self.fit = config.fit_windows
        self.blocks = nn.ModuleList(_make_block(config, index, i, share) for i, share in enumerate(drop_path))
        self.downsample = Downsample(dim, config.dims[index + 1]) if index + 1 < len(config.dims) else None

    def forward(self, x: Tensor) -> Tensor:
        """Compute a map `[B, C, H, W]` of the same shape."""
        window = None if self.side is None else Window.over(x, self.side, self.fit)
        h = x if window is None else window.partition(x)
        for block in self.blocks:
            h = block(h)
        return h if window is None else window.reverse(h)


def _make_block(config: VisionConfig, stage: int, index: int, drop_path: float) -> nn.Module:
    dim = config.dims[stage]
    if stage not in WINDOWED:
        return ConvBlock(dim, drop_path)
    if index < config.mixers(stage):
        return TokenBlock(dim, vision_mixer(dim, config), config.mlp_ratio, drop_path)
    return TokenBlock(dim, Attention(dim, config.heads[WINDOWED.index(stage)]), config.mlp_ratio, drop_path)
