"""The network of the memory tests: the language model's blocks, with logits only where something is asked.

input_ids, labels   `[B, L]`; labels are what is to be said at each position, -100 where nothing is asked
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .language import MuonSSMConfig, MuonSSMModel

IGNORED = -100  # a label that no loss counts; the same as in the data


class RecallModel(nn.Module):
    """`MuonSSMModel` with the embedding as its head. The vocabulary is large and few positions are asked for."""

    def __init__(self, config: MuonSSMConfig) -> None:
        super().__init__()
        self.backbone = MuonSSMModel(config)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The mean cross entropy, and as `predictions` the predicted tokens, `[B, L]`, -100 where nothing is asked."""
        asked = labels != IGNORED
        h = self.backbone(input_ids, use_cache=False).last_hidden_state[asked]
        logits = F.linear(h, self.backbone.embed_tokens.weight)
        found = torch.full_like(labels, IGNORED).masked_scatter(asked, logits.detach().argmax(dim=-1))
        return {"loss": F.cross_entropy(logits.float(), labels[asked]), "predictions": found}
