"""`Task`: what training, comparing, analyzing and reporting need to know about a job.

A task is one frozen dataclass with a field per recipe section (`model` and `muon` among them). It lives in its own
folder `muonssm/lab/NAME/` and is registered by that folder's `__init__.py`; see `registry`. Everything that is special
about a task is said here, so that no other room has to know its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn
from torch.utils.data import Dataset

from muonssm.ops import Muon

from .scorer import Scorer

if TYPE_CHECKING:
    from .experiment import Experiment

PaperScores = Mapping[str, Mapping[str, float]]  # by variant ("plain", "muon") and metric


class Metric(NamedTuple):
    """A score: its name in files, its title for people, its unit (`"%"` or empty), and its direction."""

    name: str
    title: str
    unit: str
    higher_is_better: bool

    @property
    def heading(self) -> str:
        """The title with its unit, for the head of a table."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def format(self, value: float | None) -> str:
        """The score with its unit; None is the score of a diverged run."""
        return "not a number" if value is None else f"{value:.2f}{self.unit}"


@dataclass(frozen=True)
class DataSplits:
    """Data ready to train on.

    Attributes:
        train: the training set.
        validation: the set by which weights are chosen.
        test: scored once at the end. None: nothing is chosen, so the validation set is the test set.
        metadata: everything about the data that a trained model needs later, as JSON: classes, channels, a `summary`
            for people, and `tokens_per_item` for tasks whose speed is counted in tokens.
        extra_tests: further test sets by name, such as other sequence lengths.
    """

    train: Dataset
    validation: Dataset
    test: Dataset | None
    metadata: dict[str, Any]
    extra_tests: dict[str, Dataset] = field(default_factory=dict)


@dataclass(frozen=True)
class Task(ABC):
    """Data, model, loss and scores of one kind of job.

    Attributes:
        sections: the dataclass of each recipe section.
        metrics: the scores. The first one selects checkpoints and is the headline of comparisons.
        analyses: names of the analyses that `muonssm analyze` runs by default; see `muonssm.lab.analysis`.
        peers: classifiers of other libraries that `muonssm compare --against` can run on the same data.
        eval_batch_factor: how many training batches fit into memory at once during evaluation.
        eval_draws_random: whether a validation draws one number from torch's generator, as a DataLoader does. That
            changes what training draws afterwards; each task keeps its value, so recorded results stay reproducible.
    """

    sections: ClassVar[dict[str, Any]]
    metrics: ClassVar[tuple[Metric, ...]]
    analyses: ClassVar[tuple[str, ...]] = ()
    peers: ClassVar[tuple[str, ...]] = ()
    eval_batch_factor: ClassVar[int] = 4
    eval_draws_random: ClassVar[bool] = True

    @property
    @abstractmethod
    def title(self) -> str:
        """Model and data in a few words, for the head of a page."""

    # ---- variants of the task

    @property
    def folds(self) -> int:
        """How many cross-validation folds the data has."""
        return 1

    def with_fold(self, fold: int) -> Self:
        """The same task on another fold."""
        if fold:
            raise ValueError(f"fold must be 0 for this task, got {fold}")
        return self

    def plain(self) -> Self:
        """The same task without Muon."""
        return self.with_muon(Muon.off())

    def with_muon(self, muon: Muon, momentum: str = "fixed") -> Self:
        """The same task with another memory rule, whose gamma is fixed unless `momentum` says how it is learned."""
        model = replace(self.model, momentum=momentum)  # type: ignore[attr-defined]
        return replace(self, muon=muon, model=model)  # type: ignore[call-arg]

    def with_double_state(self) -> Self:
        """The same task with a memory of twice as many numbers, as control of the momentum's own state."""
        raise ValueError("a doubled state must be left out for this task, whose recipes do not set its size")

    def shrink(self, metadata: Mapping[str, Any], training: Any) -> tuple[Self, Any]:
        """The task and its training settings at a size that can be trained dozens of times; unchanged by default."""
        return self, training

    # ---- training

    @abstractmethod
    def load_data(self) -> DataSplits:
        """Load the data."""

    @abstractmethod
    def build_model(self, metadata: dict[str, Any]) -> nn.Module:
        """Build the network for this data; weights come from torch's default generator."""

    def rebuild_model(self, metadata: dict[str, Any], run: Path) -> nn.Module:
        """Build the network of a finished run, before its weights are loaded."""
        return self.build_model(metadata)

    @abstractmethod
    def collate(self, items: list[Any], training: bool) -> dict[str, Tensor]:
        """Make a batch of keyword arguments for the model."""

    def can_split(self, model: nn.Module) -> bool:
        """Whether processes can share the sequences of this model (`training.context`); `piece` then cuts a batch."""
        return False

    def piece(self, batch: dict[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
        """The piece `index` of the sequences of a collated batch, which `count` processes share."""
        raise ValueError(f"training.context must be 1 for this task, got {count}")

    @abstractmethod
    def scorer(self, split: Dataset) -> Scorer:
        """Create the scorer of a split. There is no other path to scores."""

    def files_to_copy(self, metadata: dict[str, Any]) -> list[Path]:
        """Files that belong beside the weights of a run, such as a tokenizer."""
        return []

    def sample_outputs(self, run: Path) -> Iterator[str]:
        """Texts that `muonssm train` prints after the scores, such as generated samples."""
        return iter(())

    # ---- comparing, analyzing, reporting

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        """The paper's scores for this data and model; empty where it has none."""
        return {}

    def score_peer(self, name: str, data: DataSplits, seed: int) -> dict[str, Any]:
        """Train the peer `name` (one of `peers`) on the same data; return its test scores."""
        raise ValueError(f"--against must be left out for this task, got {name!r}")

    @classmethod
    def run_stages(cls, study: Path, output: str | None, options: Mapping[str, Any]) -> Iterator[str]:
        """Run a study in stages, a .toml file with the key `stages`; yield what to print.

        `options` are those of `muonssm study` that were given: `set`, `resume`, `seeds`, `variants` and `backbones`.
        """
        raise ValueError(f"STUDY must have a task with stages, got {str(study)!r}")

    def report_sections(self, experiment: Experiment) -> list[Any]:
        """Sections of the report (`muonssm.lab.report.page.Section`) that only this task has."""
        return []

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        """Evaluations that this experiment lacks, each with the command that produces it."""
        return []
