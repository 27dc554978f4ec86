"""Activity recognition as a task: windows in, a class out; accuracy and macro precision, recall and F1, in percent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.lab.core.scorer import PredictionScorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores, Task
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig
from muonssm.ops import Muon

from .augment import Augmentation
from .dataset import ActivityConfig, load_activity
from .paper import METRICS, published
from .windows import WindowSet


@dataclass(frozen=True)
class ActivityTask(Task):
    """The sections of an activity recipe."""

    sections: ClassVar[dict[str, Any]] = {
        "data": ActivityConfig,
        "model": ActivityModelConfig,
        "muon": Muon,
        "augment": Augmentation,
    }
    analyses: ClassVar[tuple[str, ...]] = (
        "spectrum",
        "rank",
        "gradients",
        "memory",
        "truncation",
        "ablation",
        "ns-steps",
        "capacity",
        "sensitivity",
        "convergence",
        "scaling",
    )
    peers: ClassVar[tuple[str, ...]] = ("minirocket",)
    metrics: ClassVar[tuple[Metric, ...]] = tuple(Metric(n, n.replace("f1", "F1"), "%", True) for n in METRICS)

    data: ActivityConfig
    model: ActivityModelConfig
    muon: Muon
    augment: Augmentation

    @property
    def folds(self) -> int:
        return self.data.folds

    @property
    def title(self) -> str:
        return f"{self.model.backbone} on {self.data.source}"

    def with_fold(self, fold: int) -> ActivityTask:
        """The same with another group of subjects as the test part."""
        if fold and self.data.split not in ("subject", "kfold"):
            split = self.data.split
            raise ValueError(
                f"--folds is above 1 with data.split = {split!r}, whose test part never changes; it may be 1"
            )
        return replace(self, data=replace(self.data, fold=fold))

    def load_data(self) -> DataSplits:
        """Loads the data."""
        data = load_activity(self.data)
        metadata = {
            "classes": list(data.classes),
            "channels": list(data.channels),
            "mean": data.mean.tolist(),
            "std": data.std.tolist(),
            "rate": data.rate,
            "summary": data.summary(),
        }
        return DataSplits(Windows(data.train), Windows(data.validation), Windows(data.test), metadata)

    def build_model(self, metadata: dict[str, Any]) -> ActivityClassifier:
        """The network for data of these metadata, with weights from torch's default generator."""
        return ActivityClassifier(self.model, self.muon, len(metadata["channels"]), len(metadata["classes"]))

    def collate(self, items: list[tuple[Tensor, Tensor]], training: bool) -> dict[str, Tensor]:
        """A batch as the model takes it; augmented for training."""
        x, labels = (torch.stack(parts) for parts in zip(*items, strict=True))
        return {"x": self.augment(x) if training else x, "labels": labels}

    def scorer(self, split: Dataset) -> PredictionScorer:
        """Scores from the logits of all windows."""
        return PredictionScorer(score_logits)

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        """The paper's table "Comparison of different architectures"."""
        return published(self.data.source, self.model.backbone)

    def score_peer(self, name: str, data: DataSplits, seed: int) -> dict[str, Any]:
        """aeon's MiniRocket, trained on the training windows and scored on the test windows."""
        try:
            from aeon.classification.convolution_based import MiniRocketClassifier
        except ImportError as error:
            message = f"--against {name} needs the extra `bench` (pip install 'muonssm[bench]'): {error}"
            raise ImportError(message) from error
        train, test = (split.windows for split in (data.train, data.test))  # type: ignore[union-attr]
        model = MiniRocketClassifier(random_state=seed, n_jobs=-1)
        model.fit(train.x.mT.numpy(), train.y.numpy())
        logits = np.eye(len(data.metadata["classes"]))[model.predict(test.x.mT.numpy())]
        scores = score_logits(logits, test.y.numpy())
        return {key: value for key, value in scores.items() if key != "loss"}

    def with_double_state(self) -> ActivityTask:
        """The same task with `d_state` doubled."""
        return replace(self, model=replace(self.model, d_state=2 * self.model.d_state))


def score_logits(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """The paper's metrics in percent, the loss, and the confusion matrix (rows: true class)."""
    from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

    found, classes = logits.argmax(axis=1), list(range(logits.shape[1]))
    present = sorted(set(labels.tolist()) | set(found.tolist()))
    macro = precision_recall_fscore_support(labels, found, labels=present, average="macro", zero_division=0)
    values = (accuracy_score(labels, found), *macro[:3])
    loss = torch.nn.functional.cross_entropy(torch.as_tensor(logits), torch.as_tensor(labels)).item()
    scores = {name: 100 * float(value) for name, value in zip(METRICS, values, strict=True)}
    return {**scores, "loss": loss, "confusion": confusion_matrix(labels, found, labels=classes).tolist()}


class Windows(Dataset):
    """A `WindowSet` as torch takes it."""

    def __init__(self, windows: WindowSet) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.windows.x[index], self.windows.y[index]
