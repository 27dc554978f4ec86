"""Tests of memory as a task: multi-query associative recall, selective copying, induction heads, passkey."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from muonssm.lab.core.scorer import PredictionScorer
from muonssm.lab.core.task import DataSplits, Metric, Task
from muonssm.models.language import MuonSSMConfig, check_mixer
from muonssm.models.recall import RecallModel
from muonssm.ops import Muon

from .dataset import RecallConfig, make_recall, score


@dataclass(frozen=True)
class RecallModelConfig:
    """Sizes of the network; those of the field's comparisons are two layers without SwiGLU.

    Attributes:
        backbone: a name in `muonssm.layers.BACKBONES`.
        hidden_size, num_hidden_layers, intermediate_size: as in `MuonSSMConfig`.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
        mixer: further arguments of the mixer.
    """

    backbone: str = "gated_deltanet"
    hidden_size: int = 64
    num_hidden_layers: int = 2
    intermediate_size: int = 0
    momentum: str = "fixed"
    mixer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_mixer(self.build(16, Muon()))

    def build(self, vocab_size: int, muon: Muon) -> MuonSSMConfig:
        """The same for transformers."""
        return MuonSSMConfig(vocab_size=vocab_size, muon=muon, **asdict(self))


@dataclass(frozen=True)
class RecallTask(Task):
    """The sections of a recall recipe."""

    sections: ClassVar[dict[str, Any]] = {"data": RecallConfig, "model": RecallModelConfig, "muon": Muon}
    analyses: ClassVar[tuple[str, ...]] = (
        "spectrum",
        "rank",
        "gradients",
        "memory",
        "truncation",
        "convergence",
        "scaling",
    )
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "accuracy", "%", True),
        Metric("exact", "sequences all right", "%", True),
    )

    data: RecallConfig
    model: RecallModelConfig
    muon: Muon

    @property
    def title(self) -> str:
        return f"{self.model.backbone} on {self.data.kind}, length {self.data.length}"

    def load_data(self) -> DataSplits:
        train, validation = (self._part(part) for part in ("train", "validation"))
        first, *others = self.data.test_lengths or (self.data.length,)
        test = self._part("test", first)
        tests: dict[str, Dataset] = {f"length {length}": self._part("test", length) for length in others}
        sizes = f"{len(train)} sequences of {self.data.length} to train on, {len(validation)} to choose by"
        summary = f"{self.data.kind}: {sizes}; made from seed {self.data.seed}"
        metadata = {"vocab_size": self.data.vocabulary, "summary": summary, "tokens_per_item": self.data.length}
        return DataSplits(train, validation, test, metadata, tests)

    def _part(self, part: str, length: int | None = None) -> TensorDataset:
        return TensorDataset(*make_recall(self.data, part, length))

    def build_model(self, metadata: dict[str, Any]) -> RecallModel:
        return RecallModel(self.model.build(metadata["vocab_size"], self.muon))

    def collate(self, items: list[Any], training: bool) -> dict[str, Tensor]:
        inputs, labels = (torch.stack(parts) for parts in zip(*items, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def scorer(self, split: Dataset) -> PredictionScorer:
        return PredictionScorer(lambda predictions, labels: dict(score(predictions, labels)), key="predictions")
