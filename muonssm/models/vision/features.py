"""The maps of a network's stages, for detection and segmentation: each through a norm of its own, and no classifier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from .config import STAGES, VisionConfig
from .network import MambaVision


class VisionFeatures(nn.Module):
    """Images to the normalised maps of some stages.

    Args:
        config: of the network; its classes do not matter here.
        stages: which, from 0 to 3, in this order.

    Attributes:
        network: a `MambaVision` without head and last norm; `load_published(features.network, ..., head="keep")`.
        channels, strides: of the maps.
    """

    def __init__(self, config: VisionConfig, stages: Sequence[int] = range(STAGES)) -> None:
        super().__init__()
        self.stages = tuple(stages)
        if not self.stages or any(stage not in range(STAGES) for stage in self.stages):
            raise ValueError(f"stages is {self.stages}; it may have stages from 0 to {STAGES - 1}, at least one")
        self.network = MambaVision(replace(config, num_classes=0))
        # Gone with the head: a parameter without a gradient troubles trainers.
        self.network.norm = nn.Identity()  # type: ignore[assignment]
        self.channels = tuple(config.dims[stage] for stage in self.stages)
        self.strides = tuple(config.strides[stage] for stage in self.stages)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for channels in self.channels)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x `[B, in_channels, H, W]` to maps `[B, channels[i], ceil(H / strides[i]), ceil(W / strides[i])]`."""
        maps = self.network.forward_features(x)
        chosen = zip(self.stages, self.norms, strict=True)
        return [norm(maps[stage].permute(0, 2, 3, 1)).permute(0, 3, 1, 2) for stage, norm in chosen]
