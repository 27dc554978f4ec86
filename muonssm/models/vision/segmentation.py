"""transformers' UperNet on a MambaVision network.

images      `[B, 3, H, W]`, normalised
labels      `[B, H, W]` classes, 255 where nothing is to be learned
logits      `[B, classes, H, W]`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import VisionConfig
from .transformers_model import MambaVisionBackboneConfig

IGNORED = 255
LEAST = 1e-4  # share that a class is taken to have at least


class Segmenter(nn.Module):
    """A class for each pixel; the loss is UperNet's where `balance` is 0.

    Args:
        config: of the network.
        classes: how many.
        hidden: channels of the decoder.
        shares: of the pixels, a class each. What is said of a pixel then starts from them: where most pixels are of one
            class, training would else spend its first epochs learning that, and little else for long after.
        balance: a class counts share^-balance in the loss; 0 counts every pixel alike.
    """

    weight: Tensor  # of a class in the loss

    def __init__(
        self,
        config: VisionConfig,
        classes: int,
        hidden: int = 512,
        shares: Sequence[float] | None = None,
        balance: float = 0.0,
    ) -> None:
        super().__init__()
        from transformers import UperNetConfig, UperNetForSemanticSegmentation

        settings: dict[str, Any] = {
            "backbone_config": MambaVisionBackboneConfig.of(config),
            "hidden_size": hidden,
            "num_labels": classes,
            "auxiliary_in_channels": config.dims[2],
            "auxiliary_channels": max(1, hidden // 2),
            "loss_ignore_index": IGNORED,
        }
        self.upernet = UperNetForSemanticSegmentation(UperNetConfig(**settings))
        if shares is not None and len(shares) != classes:
            raise ValueError(f"shares has {len(shares)} numbers; it may have {classes}, one a class")
        known = torch.full((classes,), 1 / classes) if shares is None else torch.tensor(shares).clamp(min=LEAST)
        self.register_buffer("weight", known**-balance, persistent=False)
        start = (known * self.weight).log()
        for head in (self.upernet.decode_head, self.upernet.auxiliary_head):
            head.classifier.bias.data.copy_(start - start.mean())

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """With labels the loss, that of the auxiliary head added to it."""
        maps = self.upernet.backbone(images).feature_maps
        logits = self._enlarged(self.upernet.decode_head(maps), images)
        if labels is None:
            return {"logits": logits}
        side = self._enlarged(self.upernet.auxiliary_head(maps), images)
        loss = self._loss(logits, labels) + self.upernet.config.auxiliary_loss_weight * self._loss(side, labels)
        return {"loss": loss, "logits": logits}

    def _enlarged(self, logits: Tensor, images: Tensor) -> Tensor:
        return F.interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, self.weight, ignore_index=IGNORED)
