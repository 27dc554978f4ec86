"""The recall model: loss at labeled positions, predicted token ids, and the blocks that FSDP wraps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from muonssm.models.language import MuonSSMConfig
from muonssm.models.recall import IGNORED, RecallModel


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return RecallModel(MuonSSMConfig(vocab_size=50, hidden_size=32, intermediate_size=0, num_hidden_layers=2)).eval()


def test_predictions_are_token_ids_at_labeled_positions(model):
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(50, (2, 2, 20), generator=generator)
    labels = labels.masked_fill(torch.arange(20) % 3 != 0, IGNORED)
    with torch.no_grad():
        outputs = model(ids, labels)
        h = model.backbone(ids, use_cache=False).last_hidden_state
    logits = h @ model.backbone.embed_tokens.weight.T
    assert set(outputs) == {"loss", "predictions"}
    assert torch.equal(outputs["predictions"], logits.argmax(-1).masked_fill(labels == IGNORED, IGNORED))
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(outputs["loss"], expected)


def test_fsdp_wraps_the_blocks(model):
    wrapped = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert wrapped == list(model.backbone.layers)
