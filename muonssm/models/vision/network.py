"""MambaVision: two stages of convolutions, two of mixers and attention in windows, and a linear head.

    h = stem(x);   in each stage h = blocks(h), between stages h = downsample(h);   logits = head(mean(BN(h)))

    x           `[B, in_channels, H, W]`, of any height and width
    stages      `[B, dims[i], ceil(H / strides[i]), ceil(W / strides[i])]`
    logits      `[B, num_classes]`

Names and shapes of all parameters are those of the release of MambaVision; see `published` for its weights.
"""

from __future__ import annotations

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
    """The network; `forward` gives logits, `forward_features` the maps of the four stages."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        if not isinstance(config, VisionConfig):
            raise TypeError(f"config is of type {type(config).__name__}; it may be a VisionConfig")
        self.sizes = config
        self.num_features = config.dims[-1]
        self.patch_embed = Stem(config)
        shares = torch.linspace(0, config.drop_path, sum(config.depths), device="cpu").split(list(config.depths))
        self.levels = nn.ModuleList(Stage(config, i, shares[i].tolist()) for i in range(STAGES))
        self.norm = nn.BatchNorm2d(self.num_features)
        self.head = self.make_head(config.num_classes)
        self.apply(_initialise)

    def make_head(self, num_classes: int) -> nn.Module:
        """A new classifier; for no classes, none."""
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        return head.apply(_initialise)

    def forward(self, x: Tensor) -> Tensor:
        """The logits `[B, num_classes]`, or what the head would see `[B, dims[-1]]` where there is none."""
        return self.head(self.norm(self.stages(x)[-1]).mean(dim=(2, 3)))

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """The maps of the four stages, before their downsampling; for detection and segmentation."""
        return self.stages(x)

    def stages(self, x: Tensor) -> list[Tensor]:
        """What `forward_features` gives; that name has another meaning in timm."""
        self._check(x)
        h, maps = self.patch_embed(x), []
        for level in self.levels:
            h = level(h)
            maps.append(h)
            if level.downsample is not None:
                h = level.downsample(h)  # type: ignore[operator]
        return maps

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that weight decay should leave alone (timm asks by this name)."""
        return {name for name, _ in self.named_parameters() if name.endswith(tuple(f".{end}" for end in NO_DECAY))}

    def _check(self, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(f"x is of type {type(x).__name__}; it may be a tensor [B, channels, height, width]")
        channels = self.sizes.in_channels
        if x.ndim != 4 or x.shape[1] != channels or 0 in x.shape:
            raise ValueError(
                f"x has shape {list(x.shape)}; it may be [B, channels, height, width], channels = {channels}, all > 0"
            )


def _initialise(module: nn.Module) -> None:
    """Linear layers N(0, 0.02), their biases 0, as in the release: Mamba's step sizes too.

    Convolutions and norms start as in torch, and what a layer of `muonssm.layers` has beside linear ones as there.
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
