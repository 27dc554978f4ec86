"""Mean IoU worked out by hand, with ignored and absent classes, and against scikit-learn."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import jaccard_score

from muonssm.lab.vision.segmentation_metrics import PixelCounts


def test_mean_iou_worked_out_by_hand():
    """Class 0: 1 of 3 (two pixels were taken for others). Class 1: 2 of 3. Class 2 is predicted, never there: 0 of
    1. Class 3 is predicted at an ignored pixel alone, so it is nowhere, and left out: mean (1/3 + 2/3 + 0) / 3."""
    counts = PixelCounts(4)
    counts.add(torch.tensor([[0, 1, 2], [1, 1, 3]]), torch.tensor([[0, 0, 0], [1, 1, 255]]))
    score = counts.score()
    assert score["miou"] == pytest.approx(100 / 3)
    assert score["pixel_accuracy"] == pytest.approx(60.0)
    assert score["iou"] == [pytest.approx(100 / 3), pytest.approx(200 / 3), 0.0, None]


def test_sums_come_before_the_ratio():
    """Two images: 1 of 2 and 9 of 10 pixels; the mean of ratios would be 70."""
    counts = PixelCounts(2)
    counts.add(torch.tensor([0, 1]), torch.tensor([0, 0]))
    counts.add(torch.tensor([0] * 9 + [1]), torch.tensor([0] * 10))
    assert counts.score()["iou"] == [pytest.approx(100 * 10 / 12), 0.0]


def test_the_same_as_scikit_learn():
    torch.manual_seed(0)
    labels, predicted = torch.randint(0, 6, (8, 16, 16)), torch.randint(0, 5, (8, 16, 16))
    labels[labels == 5] = 255
    counts = PixelCounts(7)  # two classes are nowhere
    for one, other in zip(predicted, labels, strict=True):
        counts.add(one, other)
    known = labels != 255
    expected = 100 * jaccard_score(labels[known], predicted[known], average=None)
    assert counts.score()["iou"] == [*map(pytest.approx, expected), None, None]
    assert counts.score()["miou"] == pytest.approx(expected.mean())


def test_what_cannot_be_is_refused():
    counts = PixelCounts(3)
    with pytest.raises(ValueError, match="labels has no label"):
        counts.score()
    with pytest.raises(ValueError, match=r"predicted is \(2,\) and labels \(3,\)"):
        counts.add(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="labels has 3; with classes 3 it may be below that"):
        counts.add(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="predicted has -1"):
        counts.add(torch.tensor([-1, 0]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="classes is 0; it may be an integer >= 1"):
        PixelCounts(0)
    with pytest.raises(ValueError, match="ignored is 255 with classes 300"):
        PixelCounts(300)
