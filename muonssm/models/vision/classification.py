"""MambaVision with its loss, as trainers call it."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .config import VisionConfig
from .network import MambaVision


class VisionClassifier(nn.Module):
    """Classify images.

    images      `[B, channels, H, W]`
    labels      `[B]` classes, or `[B, classes]` class probabilities (mixup)
    logits      `[B, classes]`
    """

    _no_split_modules: ClassVar[list[str]] = MambaVision._no_split_modules

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.network = MambaVision(config)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits, and with `labels` their cross-entropy as `loss`."""
        logits = self.network(images)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
