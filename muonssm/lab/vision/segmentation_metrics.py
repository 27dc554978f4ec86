"""Mean intersection over union of labeled pixels, from counts: no predictions are kept.

counts   int64 `[K, K]`: pixels of class i (row) that were predicted as class j (column)

    IoU_i = counts[i, i] / (sum of row i + sum of column i - counts[i, i])

Counts are summed over all images first. Pixels labeled 255 do not count. A class that is neither in the labels nor
predicted has no IoU and is left out of the mean; one that is predicted but never in the labels has an IoU of 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonssm.checks import check_int

from .ade20k import IGNORED


class PixelCounts:
    """Count predictions by class, image by image."""

    def __init__(self, classes: int, ignored: int = IGNORED) -> None:
        check_int("classes", classes, 1)
        if 0 <= ignored < classes:
            raise ValueError(f"ignored must not be one of {classes} classes, got {ignored}")
        self.classes, self.ignored = classes, ignored
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Add predicted classes and labels of the same shape, of one image or several."""
        if predicted.shape != labels.shape:
            raise ValueError(
                f"predicted must have the shape of labels, {tuple(labels.shape)}, got {tuple(predicted.shape)}"
            )
        valid = labels != self.ignored
        for name, values in (("predicted", predicted[valid]), ("labels", labels[valid])):
            wrong = values[(values < 0) | (values >= self.classes)]
            if wrong.numel():
                raise ValueError(f"{name} must be in 0 to {self.classes - 1}, got {int(wrong[0])}")
        pairs = labels[valid].long() * self.classes + predicted[valid].long()
        counts = torch.bincount(pairs.cpu(), minlength=self.classes**2)
        self.counts += counts.reshape(self.classes, self.classes)

    def iou(self) -> Tensor:
        """IoU of each class, float64 `[K]` in [0, 1]; nan for a class that is neither labeled nor predicted."""
        both = self.counts.diagonal().double()
        return both / (self.counts.sum(0) + self.counts.sum(1) - both)

    def score(self) -> dict[str, Any]:
        """Mean IoU, pixel accuracy, and the IoU of each class (None if it has none), in percent."""
        if not self.counts.sum():
            raise ValueError("labels must have a pixel that is not ignored, got none")
        iou = 100 * self.iou()
        correct = 100 * self.counts.diagonal().sum() / self.counts.sum()
        by_class = [None if value != value else value for value in iou.tolist()]
        return {"miou": float(iou.nanmean()), "pixel_accuracy": float(correct), "iou": by_class}
