"""`Scorer`: the only path from a model's outputs to scores, in training, evaluation and comparison.

A scorer sees one batch after the other. With several processes each scores its share of the batches; `collected` and
`replace` join the shares before `result` is called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

IGNORED = -100  # label that no loss and no score counts


class Scorer(ABC):
    """Accumulates a model's outputs over batches."""

    @abstractmethod
    def add(self, batch: dict[str, Any], outputs: Any) -> None:
        """Add one batch, as given to the model, and the model's outputs."""

    @abstractmethod
    def collected(self) -> Any:
        """What `add` has collected so far, picklable."""

    @abstractmethod
    def replace(self, shares: Sequence[Any]) -> None:
        """Replace what was collected by the `collected()` of all processes, in their order."""

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """All scores of what was collected: a value per metric, `loss` where there is one, and further results."""


class PredictionScorer(Scorer):
    """Keeps one output and the labels of every item, and scores them together at the end.

    Args:
        score: scores of all predictions and labels, as arrays.
        key: which of the model's outputs are the predictions.
    """

    def __init__(self, score: Callable[[np.ndarray, np.ndarray], dict[str, Any]], key: str = "logits") -> None:
        self.score, self.key = score, key
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, batch: dict[str, Any], outputs: Any) -> None:
        predictions = outputs[self.key].detach()
        wide = predictions.float() if predictions.is_floating_point() else predictions
        self.pairs.append((wide.cpu().numpy(), batch["labels"].cpu().numpy()))

    def collected(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return self.pairs

    def replace(self, shares: Sequence[list[tuple[np.ndarray, np.ndarray]]]) -> None:
        self.pairs = [pair for share in shares for pair in share]

    def result(self) -> dict[str, Any]:
        predictions, labels = (np.concatenate(arrays) for arrays in zip(*self.pairs, strict=True))
        return self.score(predictions, labels)


class LossScorer(Scorer):
    """The exact mean loss per label: a batch's loss is the mean over its labels, and batches differ in how many.

    Args:
        score: all scores from the mean loss.
    """

    def __init__(self, score: Callable[[float], dict[str, Any]]) -> None:
        self.score = score
        self.total = torch.zeros(2, dtype=torch.float64)  # summed loss, number of labels

    def add(self, batch: dict[str, Any], outputs: Any) -> None:
        labels = (batch["labels"] != IGNORED).sum().double().cpu()
        if labels:  # a piece of a sequence can be without, and its mean then is not a number
            self.total += torch.stack([outputs["loss"].detach().double().cpu() * labels, labels])

    def collected(self) -> torch.Tensor:
        return self.total

    def replace(self, shares: Sequence[torch.Tensor]) -> None:
        self.total = torch.stack(list(shares)).sum(0)

    def result(self) -> dict[str, Any]:
        return self.score((self.total[0] / self.total[1]).item())
