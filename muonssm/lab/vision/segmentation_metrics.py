"""Mean intersection over union of labelled pixels, from counts: no predictions are kept.

counts   int64 `[K, K]`: pixels of class i (row) that were predicted as class j (column)

    IoU_i = counts[i, i] / (sum of row i + sum of column i - counts[i, i])

summed over all images first. Pixels labelled 255 do not count, whatever is predicted there. A class that is neither in
the labels nor predicted has no IoU and is left out of the mean; one that is predicted, and never there, has 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muonssm.checks import is_int

IGNORED = 255


class PixelCounts:
    """Adds up predictions image by image; `score` is of all so far."""

    def __init__(self, classes: int, ignored: int = IGNORED) -> None:
        if not is_int(classes, 1):
            raise ValueError(f"classes is {classes!r}; it may be an integer >= 1")
        if 0 <= ignored < classes:
            raise ValueError(f"ignored is {ignored} with classes {classes}; it may be no class's number")
        self.classes, self.ignored = classes, ignored
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def add(self, predicted: Tensor, labels: Tensor) -> None:
        """Predicted classes and labels of the same shape, of one image or of several."""
        if predicted.shape != labels.shape:
            raise ValueError(
                f"predicted is {tuple(predicted.shape)} and labels {tuple(labels.shape)}; they may be alike"
            )
        valid = labels != self.ignored
        for name, values in (("predicted", predicted[valid]), ("labels", labels[valid])):
            wrong = values[(values < 0) | (values >= self.classes)]
            if wrong.numel():
                raise ValueError(f"{name} has {int(wrong[0])}; with classes {self.classes} it may be below that")
        pairs = labels[valid].long() * self.classes + predicted[valid].long()
        counts = torch.bincount(pairs.cpu(), minlength=self.classes**2)
        self.counts += counts.reshape(self.classes, self.classes)

    def iou(self) -> Tensor:
        """float64 `[K]`, in [0, 1]; not a number for a class that is nowhere."""
        both = self.counts.diagonal().double()
        return both / (self.counts.sum(0) + self.counts.sum(1) - both)

    def score(self) -> dict[str, Any]:
        """In per cent: the mean IoU, the share of pixels that are right, and each class's IoU (None if nowhere)."""
        if not self.counts.sum():
            raise ValueError("labels has no label: all pixels are ignored, or none was added")
        iou = 100 * self.iou()
        right = 100 * self.counts.diagonal().sum() / self.counts.sum()
        each = [None if value != value else value for value in iou.tolist()]
        return {"miou": float(iou.nanmean()), "pixel_accuracy": float(right), "iou": each}
