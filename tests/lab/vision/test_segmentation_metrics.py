"""Mean IoU, against values computed by hand and by scikit-learn, with ignored pixels and absent classes."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import jaccard_score

from muonssm.lab.vision.segmentation_metrics import PixelCounts


def test_mean_iou_computed_by_hand():
    """Class 0: 1 of 3 (two pixels are predicted as others). Class 1: 2 of 3. Class 2 is predicted but never labeled: 0
    of 1. Class 3 is predicted at an ignored pixel only, and left out: the mean is (1/3 + 2/3 + 0) / 3."""
    counts = PixelCounts(4)
    counts.add(torch.tensor([[0, 1, 2], [1, 1, 3]]), torch.tensor([[0, 0, 0], [1, 1, 255]]))
    score = counts.score()
    assert score["miou"] == pytest.approx(100 / 3)
    assert score["pixel_accuracy"] == pytest.approx(60.0)
    assert score["iou"] == [pytest.approx(100 / 3), pytest.approx(200 / 3), 0.0, None]


def test_counts_are_summed_before_the_ratio():
    """Two images: 1 of 2 and 9 of 10 pixels; the mean of ratios would be 70."""
    counts = PixelCounts(2)
    counts.add(torch.tensor([0, 1]), torch.tensor([0, 0]))
    counts.add(torch.tensor([0] * 9 + [1]), torch.tensor([0] * 10))
    assert counts.score()["iou"] == [pytest.approx(100 * 10 / 12), 0.0]


def test_the_same_as_scikit_learn():
    torch.manual_seed(0)
    labels, predicted = torch.randint(0, 6, (8, 16, 16)), torch.randint(0, 5, (8, 16, 16))
    labels[labels == 5] = 255
    counts = PixelCounts(7)  # two classes are neither labeled nor predicted
    for one, other in zip(predicted, labels, strict=True):
        counts.add(one, other)
    known = labels != 255
    expected = 100 * jaccard_score(labels[known], predicted[known], average=None)
    assert counts.score()["iou"] == [*map(pytest.approx, expected), None, None]
    assert counts.score()["miou"] == pytest.approx(expected.mean())


def test_invalid_arguments_raise():
    counts = PixelCounts(3)
    with pytest.raises(ValueError, match="labels must have a pixel"):
        counts.score()
    with pytest.raises(ValueError, match=r"predicted must have the shape of labels"):
        counts.add(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="labels must be in 0 to 2, got 3"):
        counts.add(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="predicted must be in 0 to 2, got -1"):
        counts.add(torch.tensor([-1, 0]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="classes must be an integer >= 1, got 0"):
        PixelCounts(0)
    with pytest.raises(ValueError, match="ignored must not be one of 300 classes, got 255"):
        PixelCounts(300)
