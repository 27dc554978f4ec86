"""Activity recognition as a task: classify windows; accuracy and macro precision, recall and F1, in percent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_number, is_number
from muonssm.lab.core.config import TrainingConfig
from muonssm.lab.core.paper import read_table, scores_by_variant
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.scorer import PredictionScorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores, Task
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig
from muonssm.ops import Muon

from .augment import Augmentation
from .config import ActivityConfig
from .dataset import load_activity
from .peers import PEERS, predict_by_peer
from .windows import WindowSet

METRICS = ("accuracy", "precision", "recall", "f1")
PAPER_TABLE = Path(__file__).with_name("paper.toml")
SMALL_RECIPE = "watch-small"


@dataclass(frozen=True)
class ActivityTask(Task):
    """The sections of an activity recipe."""

    sections: ClassVar[dict[str, Any]] = {
        "data": ActivityConfig,
        "model": ActivityModelConfig,
        "muon": Muon,
        "augment": Augmentation,
    }
    metrics: ClassVar[tuple[Metric, ...]] = tuple(Metric(n, n.replace("f1", "F1"), "%", True) for n in METRICS)
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
    peers: ClassVar[tuple[str, ...]] = tuple(PEERS)

    data: ActivityConfig
    model: ActivityModelConfig
    muon: Muon
    augment: Augmentation

    @property
    def title(self) -> str:
        return f"{self.model.backbone} on {self.data.source}"

    # ---- variants of the task

    @property
    def folds(self) -> int:
        return self.data.folds

    def with_fold(self, fold: int) -> ActivityTask:
        """The same task with another group of subjects as the test set."""
        if fold and self.data.split not in ("subject", "kfold"):
            raise ValueError(
                f"--folds must be 1 for data.split {self.data.split!r}, whose test set is fixed, got fold {fold}"
            )
        return replace(self, data=replace(self.data, fold=fold))

    def with_double_state(self) -> ActivityTask:
        """The same task with `d_state` doubled.

        A memory of Mamba, Mamba-2 and LongHorn has keys of twice the size; their projections grow with them. The other
        backbones have half as many heads with keys and values of twice the size: their projections stay as they are.
        """
        return replace(self, model=replace(self.model, d_state=2 * self.model.d_state))

    def shrink(self, metadata: Mapping[str, Any], training: TrainingConfig) -> tuple[ActivityTask, TrainingConfig]:
        """The task at the size of the recipe `watch-small`, with that recipe's training settings.

        Width and state size become at most those of `watch-small`. Longer windows get its length, and the sampling
        rate is divided by the same factor, so that a window lasts as long as before. Recordings without a common rate
        are not resampled.
        """
        small = Recipe.load(SMALL_RECIPE)
        sizes: ActivityTask = small.task  # type: ignore[assignment]
        d_model, d_state = (min(getattr(self.model, n), getattr(sizes.model, n)) for n in ("d_model", "d_state"))
        data = self.data
        if data.length > sizes.data.length:
            rate, factor = metadata["rate"], data.length // sizes.data.length
            data = replace(data, length=sizes.data.length, rate=None if rate is None else rate / factor)
        model = replace(self.model, d_model=d_model, d_state=d_state)
        return replace(self, data=data, model=model), small.training

    # ---- training

    def load_data(self) -> DataSplits:
        """Load the windows of all splits."""
        data = load_activity(self.data)
        metadata = {
            "classes": list(data.classes),
            "channels": list(data.channels),
            "mean": data.mean.tolist(),
            "std": data.std.tolist(),
            "rate": data.rate,
            "summary": data.summary(),
        }
        train, validation, test = (WindowDataset(windows) for windows in (data.train, data.validation, data.test))
        return DataSplits(train, validation, test, metadata)

    def build_model(self, metadata: dict[str, Any]) -> ActivityClassifier:
        """Build the network for this data; weights come from torch's default generator."""
        return ActivityClassifier(self.model, self.muon, len(metadata["channels"]), len(metadata["classes"]))

    def rebuild_model(self, metadata: dict[str, Any], run: Path) -> ActivityClassifier:
        """Build the network of a finished run; raise if its metadata cannot be used to classify."""
        check_metadata(run / "metadata.json", metadata)
        return self.build_model(metadata)

    def collate(self, items: list[tuple[Tensor, Tensor]], training: bool) -> dict[str, Tensor]:
        """Stack windows and labels; augment the windows for training."""
        x, labels = (torch.stack(tensors) for tensors in zip(*items, strict=True))
        return {"x": self.augment(x) if training else x, "labels": labels}

    def scorer(self, split: Dataset) -> PredictionScorer:
        """Score the logits of all windows together."""
        return PredictionScorer(score_logits)

    # ---- comparing

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        """The paper's table "Comparison of different architectures"."""
        rows = read_table(PAPER_TABLE)["architectures"]
        return scores_by_variant(rows, source=self.data.source, backbone=self.model.backbone)

    def score_peer(self, name: str, data: DataSplits, seed: int) -> dict[str, Any]:
        """Train a classifier of aeon on the training windows; return its scores on the test windows."""
        train, test = (split.windows for split in (data.train, data.test))  # type: ignore[union-attr]
        logits = np.eye(len(data.metadata["classes"]))[predict_by_peer(name, train, test, seed)]
        scores = score_logits(logits, test.y.numpy())
        return {key: value for key, value in scores.items() if key != "loss"}  # a peer has classes, not logits


def score_logits(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Compute the paper's metrics in percent, the loss, and the confusion matrix (rows: true class).

    Macro averages are over the classes that occur among labels or predictions.
    """
    from sklearn.metrics import accuracy_score, confusion_matrix, precision_recall_fscore_support

    predictions, classes = logits.argmax(axis=1), list(range(logits.shape[1]))
    present = sorted(set(labels.tolist()) | set(predictions.tolist()))
    macro = precision_recall_fscore_support(labels, predictions, labels=present, average="macro", zero_division=0)
    values = (accuracy_score(labels, predictions), *macro[:3])
    loss = torch.nn.functional.cross_entropy(torch.as_tensor(logits), torch.as_tensor(labels)).item()
    scores = {name: 100 * float(value) for name, value in zip(METRICS, values, strict=True)}
    return {**scores, "loss": loss, "confusion": confusion_matrix(labels, predictions, labels=classes).tolist()}


def check_metadata(path: Path, metadata: Mapping[str, Any]) -> None:
    """Raise unless names are different, and there is a finite mean and a deviation above 0 for each channel."""
    for name in ("classes", "channels"):
        values = metadata.get(name)
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(f"{path} must have a list of names as {name}, got {values!r:.200}")
        if len(set(values)) < len(values):
            raise ValueError(f"{path} must have different names as {name}, got {values!r:.200}")
    channels, rate = len(metadata["channels"]), metadata.get("rate")
    for name in ("mean", "std"):
        values = metadata.get(name)
        if not isinstance(values, list) or len(values) != channels or not all(map(is_number, values)):
            raise ValueError(f"{path} must have {channels} numbers as {name}, one per channel, got {values!r:.200}")
        for value in values:
            check_number(f"{name} in {path}", value, 0 if name == "std" else -math.inf, open_low=name == "std")
    if rate is not None:
        check_number(f"rate in {path}", rate, 0, open_low=True)


class WindowDataset(Dataset):
    """A `WindowSet` as a torch data set."""

    def __init__(self, windows: WindowSet) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.windows.x[index], self.windows.y[index]
