"""The network of the memory tests: blocks of the language model, with logits at labeled positions only.

input_ids       `[B, L]`
labels          `[B, L]`, the token to predict at each position, -100 where there is none
predictions     `[B, L]`, the predicted token ids, -100 where there is no label
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .language import MuonSSMConfig, MuonSSMModel

IGNORED = -100  # label that no loss counts, as in the data


class RecallModel(nn.Module):
    """`MuonSSMModel` with its embedding as the head.

    The vocabulary is large and few positions have labels, so logits are computed at these alone.
    """

    _no_split_modules: ClassVar[list[str]] = MuonSSMModel._no_split_modules

    def __init__(self, config: MuonSSMConfig) -> None:
        super().__init__()
        self.backbone = MuonSSMModel(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean cross-entropy as `loss`, and the token ids of the largest logits as `predictions`."""
        labeled = labels != IGNORED
        h = self.backbone(input_ids, use_cache=False).last_hidden_state[labeled]
        logits = F.linear(h, self.backbone.embed_tokens.weight)
        predictions = torch.full_like(labels, IGNORED).masked_scatter(labeled, logits.detach().argmax(dim=-1))
        return {"loss": F.cross_entropy(logits.float(), labels[labeled]), "predictions": predictions}
