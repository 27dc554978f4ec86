"""`Task`: what training needs to know of a job: its data, its model, its loss and its scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, Self

from torch import Tensor, nn
from torch.utils.data import Dataset

from muonssm.ops import Muon


class Metric(NamedTuple):
    """A score: its name in files, how it is shown, its unit (`"%"` or nothing), and whether more of it is better."""

    name: str
    title: str
    unit: str
    higher: bool

    def show(self, value: float | None) -> str:
        """The score with its unit; nothing is known of a run that diverged."""
        return "not a number" if value is None else f"{value:.2f}{self.unit}"


class Scorer(Protocol):
    """Adds up what a model says, batch by batch."""

    def add(self, batch: dict[str, Any], outputs: Any) -> None:
        """One batch as the model took it, and what it gave."""

    def result(self) -> dict[str, Any]:
        """All scores so far."""


@dataclass(frozen=True)
class Prepared:
    """Data ready to train on, and what has to be known of it later, as JSON.

    Attributes:
        train, validation: the parts to learn from and to choose by.
        test: scored once at the end; None where nothing is chosen, so that the validation part is the test.
        facts: as JSON; `tokens_per_item` among them where speed is counted in tokens.
        more: further test parts by name, such as other lengths.
    """

    train: Dataset
    validation: Dataset
    test: Dataset | None
    facts: dict[str, Any]
    more: dict[str, Dataset] = field(default_factory=dict)


@dataclass(frozen=True)
class Task(ABC):
    """The sections of a recipe but for `training`; a field each, `model` and `muon` among them.

    Attributes:
        sections: what the sections are.
        metrics: the scores; the first chooses among epochs and is what comparisons speak of.
        by_loss: whether the scores follow from the loss alone, so that no predictions are kept.
        folds: in how many ways the data can be split.
    """

    sections: ClassVar[dict[str, Any]]
    metrics: ClassVar[tuple[Metric, ...]]
    by_loss: ClassVar[bool] = False

    @property
    def folds(self) -> int:
        return 1

    @property
    @abstractmethod
    def title(self) -> str:
        """What is trained on what, in a few words."""

    def plain(self) -> Self:
        """The same without Muon."""
        return self.with_muon(Muon.off())

    def with_muon(self, muon: Muon) -> Self:
        """The same with another `Muon`, whose gamma is then fixed."""
        model = replace(self.model, momentum="fixed")  # type: ignore[attr-defined]
        return replace(self, muon=muon, model=model)  # type: ignore[call-arg]

    @abstractmethod
    def prepare(self) -> Prepared:
        """Loads the data."""

    @abstractmethod
    def build_model(self, facts: dict[str, Any]) -> nn.Module:
        """The network for data of these facts, with weights from torch's default generator."""

    def rebuild_model(self, facts: dict[str, Any], run: Path) -> nn.Module:
        """The network of a finished run, whose weights are still to be loaded."""
        return self.build_model(facts)

    @abstractmethod
    def collate(self, items: list[Any], training: bool) -> dict[str, Tensor]:
        """A batch as the model takes it."""

    def on_fold(self, fold: int) -> Self:
        """The same on another split of the data."""
        if fold:
            raise ValueError(f"fold is {fold}; of this task it may be 0")
        return self

    def scorer(self, part: Dataset) -> Scorer | None:
        """What counts the scores of a part batch by batch, where predictions are too large to be kept; or None."""
        return None

    def score(self, predictions: Any, labels: Any) -> dict[str, Any]:
        """All scores of the models' `logits`, unless the task goes by its loss or has a scorer."""
        raise NotImplementedError

    def score_loss(self, loss: float) -> dict[str, Any]:
        """All scores, of a task that goes by its loss."""
        raise NotImplementedError

    def companions(self, facts: dict[str, Any]) -> list[Path]:
        """Files that belong beside the weights of a run."""
        return []

    def show(self, run: Path) -> Iterator[str]:
        """What a finished run has to show besides its scores."""
        return iter(())
