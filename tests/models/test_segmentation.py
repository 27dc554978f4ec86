"""UperNet on MambaVision: where it starts, and what its loss counts."""

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


def test_the_loss_is_upernets_own(batch):
    model = segmenter().eval()
    with torch.no_grad():
        own = model.upernet(pixel_values=batch["images"], labels=batch["labels"])
        found = model(**batch)
    torch.testing.assert_close(found["loss"], own.loss)
    torch.testing.assert_close(found["logits"], own.logits)


def test_what_is_said_starts_from_the_shares():
    shares = torch.tensor([0.9, 0.08, 0.02])
    for balance in (0.0, 0.5):
        model = segmenter(shares.tolist(), balance)
        expected = shares ** (1 - balance) / (shares ** (1 - balance)).sum()
        for head in (model.upernet.decode_head, model.upernet.auxiliary_head):
            torch.testing.assert_close(head.classifier.bias.softmax(0), expected)
    with pytest.raises(ValueError, match="shares has 2 numbers; it may have 3"):
        segmenter([0.5, 0.5])


def test_balanced_classes_count_as_they_should(batch):
    shares = [0.9, 0.08, 0.02]
    model = segmenter(shares, 0.5).eval()
    with torch.no_grad():
        found, logits = model(**batch)["loss"], model(**batch)["logits"]
        side = model.upernet.auxiliary_head(model.upernet.backbone(batch["images"]).feature_maps)
    weight = torch.tensor(shares) ** -0.5

    def loss(values):
        pixels = F.cross_entropy(values, batch["labels"], ignore_index=IGNORED, reduction="none")
        each = weight[batch["labels"].clamp(max=2)] * (batch["labels"] != IGNORED)
        return (pixels * each).sum() / each.sum()

    expected = loss(logits) + 0.4 * loss(F.interpolate(side, (64, 64), mode="bilinear", align_corners=False))
    torch.testing.assert_close(found, expected)
