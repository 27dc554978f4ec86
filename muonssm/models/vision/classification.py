"""The network with its loss, as trainers call it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .config import VisionConfig
from .network import MambaVision


class VisionClassifier(nn.Module):
    """Images to classes.

    images      `[B, channels, H, W]`
    labels      `[B]` classes, or `[B, classes]` shares of them (mixup)
    logits      `[B, classes]`
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.network = MambaVision(config)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.network(images)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
