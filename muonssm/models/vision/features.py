"""`VisionFeatures`: the normalized maps of a network's stages, for detection and segmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor, nn

from .config import STAGES, VisionConfig
from .network import MambaVision


class VisionFeatures(nn.Module):
    """Compute the maps of some stages of a `MambaVision`, each through its own norm.

    Args:
        config: configuration of the network; `num_classes` is ignored.
        stages: indices of the stages, from 0 to 3.

    Attributes:
        network: a `MambaVision` without head and last norm; `load_published(features.network, ..., head="keep")`.
        channels, strides: channels and strides of the maps.
    """

    _no_split_modules: ClassVar[list[str]] = MambaVision._no_split_modules

    def __init__(self, config: VisionConfig, stages: Sequence[int] = range(STAGES)) -> None:
        super().__init__()
        self.stages = tuple(stages)
        if not self.stages or any(stage not in range(STAGES) for stage in self.stages):
            raise ValueError(f"stages must be integers from 0 to {STAGES - 1}, at least one, got {self.stages}")
        self.network = MambaVision(replace(config, num_classes=0))
        # Without the head the last norm has no gradient, which DDP rejects.
        self.network.norm = nn.Identity()  # type: ignore[assignment]
        self.channels = tuple(config.dims[stage] for stage in self.stages)
        self.strides = tuple(config.strides[stage] for stage in self.stages)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for channels in self.channels)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute maps `[B, channels[i], ceil(H / strides[i]), ceil(W / strides[i])]` of x `[B, in_channels, H, W]`."""
        maps = self.network.forward_features(x)
        chosen = zip(self.stages, self.norms, strict=True)
        return [norm(maps[stage].permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for stage, norm in chosen]
