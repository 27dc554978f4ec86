"""transformers' UperNet on a MambaVision network.

images      `[B, 3, H, W]`, normalised
labels      `[B, H, W]` classes, 255 where nothing is to be learned
logits      `[B, classes, H, W]`
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .config import VisionConfig
from .in_transformers import MambaVisionBackboneConfig

IGNORED = 255


class Segmenter(nn.Module):
    """A class for each pixel.

    Args:
        config: of the network.
        classes: how many.
        hidden: channels of the decoder.
    """

    def __init__(self, config: VisionConfig, classes: int, hidden: int = 512) -> None:
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

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """With labels the loss, that of the auxiliary head added to it."""
        out = self.upernet(pixel_values=images, labels=labels)
        return {"logits": out.logits} if labels is None else {"loss": out.loss, "logits": out.logits}
