"""UperNet on MambaVision: initial predictions and the loss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from muonssm.models.vision import vision_config
from muonssm.models.vision.segmentation import IGNORED, Segmenter
from muonssm.ops import Muon


def segmenter(shares=None, balance=0.0):
    torch.manual_seed(0)
    return Segmenter(vision_config("micro", "mamba", Muon(), 0, 3), 3, 16, shares, balance)


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(1)
    labels = torch.randint(3, (2, 64, 64))
    labels[:, :10] = IGNORED
    return {"images": torch.randn(2, 3, 64, 64), "labels": labels}


def test_the_loss_equals_that_of_upernet(batch):
    model = segmenter().eval()
    with torch.no_grad():
        expected = model.upernet(pixel_values=batch["images"], labels=batch["labels"])
        outputs = model(**batch)
    torch.testing.assert_close(outputs["loss"], expected.loss)
    torch.testing.assert_close(outputs["logits"], expected.logits)


def test_initial_predictions_are_the_shares_of_the_classes():
    shares = torch.tensor([0.9, 0.08, 0.02])
    for balance in (0.0, 0.5):
        model = segmenter(shares.tolist(), balance)
        expected = shares ** (1 - balance) / (shares ** (1 - balance)).sum()
        for head in (model.upernet.decode_head, model.upernet.auxiliary_head):
            torch.testing.assert_close(head.classifier.bias.softmax(0), expected)
    with pytest.raises(ValueError, match=r"shares must .*3, got 2"):
        segmenter([0.5, 0.5])


def test_balanced_loss_weights_classes_by_their_shares(batch):
    shares = [0.9, 0.08, 0.02]
    model = segmenter(shares, 0.5).eval()
    with torch.no_grad():
        actual, logits = model(**batch)["loss"], model(**batch)["logits"]
        auxiliary = model.upernet.auxiliary_head(model.upernet.backbone(batch["images"]).feature_maps)
    weight = torch.tensor(shares) ** -0.5

    def loss(logits):
        pixels = F.cross_entropy(logits, batch["labels"], ignore_index=IGNORED, reduction="none")
        weights = weight[batch["labels"].clamp(max=2)] * (batch["labels"] != IGNORED)
        return (pixels * weights).sum() / weights.sum()

    expected = loss(logits) + 0.4 * loss(F.interpolate(auxiliary, (64, 64), mode="bilinear", align_corners=False))
    torch.testing.assert_close(actual, expected)


def test_fsdp_wraps_the_blocks():
    model = segmenter()
    wrapped = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    network = model.upernet.backbone.features.network
    assert wrapped == [block for level in network.levels for block in level.blocks]
