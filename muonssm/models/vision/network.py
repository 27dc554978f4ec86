"""MambaVision: two stages of convolutions, two of mixers and attention in windows, and a linear head.

    h       = stem(x)
    h       = blocks(h) in each stage,   h = downsample(h) between stages
    logits  = head(mean(BN(h)))

    x           `[B, in_channels, H, W]`, of any height and width
    stages      `[B, dims[i], ceil(H / strides[i]), ceil(W / strides[i])]`
    logits      `[B, num_classes]`

Parameters have the names and shapes of MambaVision's release; `released_weights.py` loads its checkpoints.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from .blocks import Stage
from .config import STAGES, VisionConfig

NO_DECAY = ("A_log", "D", "dt_bias", "dt_proj.bias")


class Stem(nn.Module):
    """Two strided 3x3 convolutions."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        (first, second), dim = config.stem_strides, config.dims[0]
        self.conv_down = nn.Sequential(
            nn.Conv2d(config.in_channels, config.stem, 3, first, padding=1, bias=False),
            nn.BatchNorm2d(config.stem, eps=1e-4),
            nn.ReLU(),
            nn.Conv2d(config.stem, dim, 3, second, padding=1, bias=False),
            nn.BatchNorm2d(dim, eps=1e-4),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_down(x)


class MambaVision(nn.Module):
    """The network; `forward` returns logits, `forward_features` the maps of the four stages."""

    _no_split_modules: ClassVar[list[str]] = ["ConvBlock", "TokenBlock"]  # what FSDP wraps, as in transformers

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        if not isinstance(config, VisionConfig):
            raise TypeError(f"config must be a VisionConfig, got {type(config).__name__}")
        self.sizes = config
        self.num_features = config.dims[-1]
        self.patch_embed = Stem(config)
        shares = torch.linspace(0, config.drop_path, sum(config.depths), device="cpu").split(list(config.depths))
        self.levels = nn.ModuleList(Stage(config, i, shares[i].tolist()) for i in range(STAGES))
        self.norm = nn.BatchNorm2d(self.num_features)
        self.head = self.make_head(config.num_classes)
        self.apply(_initialize)

    def make_head(self, num_classes: int) -> nn.Module:
        """Make a new classifier; `nn.Identity` for 0 classes."""
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        return head.apply(_initialize)

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits `[B, num_classes]`, or the pooled features `[B, dims[-1]]` without a head."""
        return self.head(self.norm(self.stages(x)[-1]).mean(dim=(2, 3)))

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """Compute the maps of the four stages, before downsampling, for detection and segmentation."""
        return self.stages(x)

    def stages(self, x: Tensor) -> list[Tensor]:
        """Compute the maps of the four stages; timm gives the name `forward_features` another meaning."""
        self._check(x)
        h, maps = self.patch_embed(x), []
        for level in self.levels:
            h = level(h)
            maps.append(h)
            if level.downsample is not None:
                h = level.downsample(h)  # type: ignore[operator]
        return maps

    def no_weight_decay(self) -> set[str]:
        """Name the parameters without weight decay (timm calls this method)."""
        return {name for name, _ in self.named_parameters() if name.endswith(tuple(f".{end}" for end in NO_DECAY))}

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor [B, channels, height, width], got {type(x).__name__}")
        channels = self.sizes.in_channels
        if x.ndim != 4 or x.shape[1] != channels or 0 in x.shape:
            raise ValueError(f"x must have shape [B, {channels}, height, width], all > 0, got {list(x.shape)}")


def _initialize(module: nn.Module) -> None:
    """Draw linear layers from N(0, 0.02) with biases of 0, as the release does, also for Mamba's step sizes.

    Convolutions and norms keep torch's initial values, other parameters of `muonssm.layers` keep theirs.
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
