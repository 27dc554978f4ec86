"""Mask R-CNN on MambaVision: losses in training, detections otherwise, and the blocks that FSDP wraps."""

from __future__ import annotations

import pytest
import torch

from muonssm.models.vision import vision_config
from muonssm.models.vision.detection import Heads, MaskDetector


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    heads = Heads(pyramid=16, hidden=32, mask_layers=1, proposals=20, samples=16, detections=5, anchor=4)
    return MaskDetector(vision_config("micro", num_classes=0), 3, (64,), 96, heads)


def test_training_returns_losses_and_evaluation_detections(model):
    torch.manual_seed(1)
    images = [torch.rand(3, 64, 64)]
    target = {"boxes": torch.tensor([[5.0, 5.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
    target["masks"] = torch.ones(1, 64, 64, dtype=torch.uint8)
    losses = model.train()(images, [target])
    loss = losses.pop("loss")
    assert len(losses) == 5
    torch.testing.assert_close(loss, sum(losses.values()))
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.detector.backbone.features.parameters())
    with torch.no_grad():
        outputs = model.eval()(images)
    assert list(outputs) == ["detections"]
    (detected,) = outputs["detections"]
    assert len(detected["boxes"]) == len(detected["labels"]) == len(detected["scores"]) == len(detected["masks"]) <= 5


def test_fsdp_wraps_the_blocks(model):
    wrapped = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    network = model.detector.backbone.features.network
    assert wrapped == [block for level in network.levels for block in level.blocks]


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (1.5, TypeError)])
def test_wrong_sizes_are_named(value, error):
    with pytest.raises(error, match="hidden must"):
        Heads(hidden=value)
