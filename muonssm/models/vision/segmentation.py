"""`Segmenter`: transformers' UperNet on a MambaVision network.

images      `[B, 3, H, W]`, normalized
labels      `[B, H, W]` classes, 255 at pixels that the loss ignores
logits      `[B, classes, H, W]`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import VisionConfig
from .network import MambaVision
from .transformers_model import MambaVisionBackboneConfig

IGNORED = 255
LEAST_SHARE = 1e-4  # rarer classes count as if they had this share of the pixels


class Segmenter(nn.Module):
    """Predict a class per pixel; with `balance` 0 the loss is UperNet's.

    Args:
        config: configuration of the network.
        classes: number of classes.
        hidden: channels of the decoder.
        shares: share of the pixels per class. The classifier's bias starts at their logarithm: where most pixels are of
            one class, training would otherwise spend its first epochs learning that.
        balance: a class has the weight share^-balance in the loss; 0 weights all pixels equally.
    """

    _no_split_modules: ClassVar[list[str]] = MambaVision._no_split_modules
    weight: Tensor  # weight per class in the loss

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
            raise ValueError(f"shares must have one number per class, {classes}, got {len(shares)}")
        known = torch.full((classes,), 1 / classes) if shares is None else torch.tensor(shares).clamp(min=LEAST_SHARE)
        self.register_buffer("weight", known**-balance, persistent=False)
        start = (known * self.weight).log()
        for head in (self.upernet.decode_head, self.upernet.auxiliary_head):
            head.classifier.bias.data.copy_(start - start.mean())

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the logits, and with `labels` the loss, which includes that of the auxiliary head."""
        maps = self.upernet.backbone(images).feature_maps
        logits = self._upsample(self.upernet.decode_head(maps), images)
        if labels is None:
            return {"logits": logits}
        auxiliary = self._upsample(self.upernet.auxiliary_head(maps), images)
        loss = self._loss(logits, labels) + self.upernet.config.auxiliary_loss_weight * self._loss(auxiliary, labels)
        return {"loss": loss, "logits": logits}

    def _upsample(self, logits: Tensor, images: Tensor) -> Tensor:
        return F.interpolate(logits, images.shape[2:], mode="bilinear", align_corners=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, self.weight, ignore_index=IGNORED)
