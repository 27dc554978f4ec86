"""The memory tests as a task: associative recall, selective copying, induction heads, passkey retrieval."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from muonssm.lab.core.scorer import PredictionScorer
from muonssm.lab.core.task import DataSplits, Metric, Task
from muonssm.models.language import MuonSSMConfig, check_mixer, mixer_with_double_state
from muonssm.models.recall import RecallModel
from muonssm.ops import Muon

from .dataset import RecallConfig, make_sequences, score_predictions


@dataclass(frozen=True)
class RecallModelConfig:
    """Sizes of the network; the defaults, two layers without SwiGLU, are those of published comparisons.

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
        """The configuration of the transformers model."""
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
        Metric("exact", "exact sequences", "%", True),
    )

    data: RecallConfig
    model: RecallModelConfig
    muon: Muon

    @property
    def title(self) -> str:
        return f"{self.model.backbone} on {self.data.problem}, length {self.data.length}"

    def with_double_state(self) -> RecallTask:
        """The same task with keys of twice the size; see `mixer_with_double_state`."""
        mixer = mixer_with_double_state(self.model.build(self.data.vocabulary or 1, self.muon))
        return replace(self, model=replace(self.model, mixer=mixer))

    def load_data(self) -> DataSplits:
        """Generate the sequences of all splits and test lengths."""
        train, validation = (self._make_split(split) for split in ("train", "validation"))
        first, *others = self.data.test_lengths or (self.data.length,)
        test = self._make_split("test", first)
        extra_tests: dict[str, Dataset] = {f"length {length}": self._make_split("test", length) for length in others}
        sizes = f"{len(train)} training and {len(validation)} validation sequences of length {self.data.length}"
        metadata = {
            "vocab_size": self.data.vocabulary,
            "summary": f"{self.data.problem}: {sizes}, generated from seed {self.data.seed}",
            "tokens_per_item": self.data.length,
        }
        return DataSplits(train, validation, test, metadata, extra_tests)

    def _make_split(self, split: str, length: int | None = None) -> TensorDataset:
        return TensorDataset(*make_sequences(self.data, split, length))

    def build_model(self, metadata: dict[str, Any]) -> RecallModel:
        """Build the network for this vocabulary; weights come from torch's default generator."""
        return RecallModel(self.model.build(metadata["vocab_size"], self.muon))

    def collate(self, items: list[Any], training: bool) -> dict[str, Tensor]:
        """Stack inputs and labels."""
        inputs, labels = (torch.stack(tensors) for tensors in zip(*items, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def scorer(self, split: Dataset) -> PredictionScorer:
        """Score the predicted token ids of all sequences together."""
        return PredictionScorer(score_predictions, key="predictions")
