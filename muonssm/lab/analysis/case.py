"""What is analysed: a finished run, or all runs of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from muonssm.lab.core.compare import KINDS
from muonssm.lab.core.experiment import Subject
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.task import DataSplits, Task

Key = tuple[str, int, int]  # kind, seed, fold
Value = TypeVar("Value")


@dataclass(frozen=True)
class Trained:
    """One trained model: `"plain"`, `"muon"` or a variant's name, with its seed, fold and folder."""

    kind: str
    seed: int
    fold: int
    folder: RunFolder

    def model(self) -> nn.Module:
        """With the weights that were kept."""
        return self.folder.load_model()[2]


@dataclass(frozen=True)
class Case:
    """What `muonssm analyze` is about: the folder, the recipe, and the trained models, plain before Muon.

    `prepared` has the data of each fold that was asked for.
    """

    path: Path
    recipe: Recipe
    subjects: tuple[Trained, ...]
    prepared: dict[int, DataSplits] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, run: str | Path) -> Case:
        """A finished run, or a comparison that is over."""
        subject = Subject.read(run)
        trials = [trial for kind in KINDS for trial in subject.trials if trial["kind"] == kind]
        models = [Trained(trial["kind"], trial["seed"], trial["fold"], subject.folder(trial)) for trial in trials]
        return cls(subject.path, Recipe.from_dict(subject.recipe), tuple(models))

    @property
    def place(self) -> Path:
        """Where results are written."""
        return self.path / "analysis"

    @property
    def kinds(self) -> list[str]:
        """Which of plain and Muon there are."""
        return list(dict.fromkeys(subject.kind for subject in self.subjects))

    def first(self, kind: str) -> Trained:
        """The first model of a kind."""
        return next(subject for subject in self.subjects if subject.kind == kind)

    def metadata(self) -> dict[str, Any]:
        """Of the data."""
        return self.subjects[0].folder.read("metadata.json")

    def batch(self, count: int, fold: int = 0) -> dict[str, Any]:
        """So many items of the validation part, evenly apart."""
        task = self.recipe.task.with_fold(fold)
        if fold not in self.prepared:
            self.prepared[fold] = task.load_data()
        return batch_of(task, self.prepared[fold].validation, count)


def batch_of(task: Task, part: Any, count: int) -> dict[str, Any]:
    """So many items of a part, evenly apart, as the model takes them."""
    count = min(count, len(part))
    return task.collate([part[i * len(part) // count] for i in range(count)], training=False)


def by_kind(found: Mapping[Key, Value], kinds: Sequence[str]) -> list[dict[tuple[int, int], Value]]:
    """For each kind its values by seed and fold, so that they can be paired."""
    return [{(seed, fold): value for (kind, seed, fold), value in found.items() if kind == its} for its in kinds]


def named(found: Mapping[Key, Any]) -> dict[str, Any]:
    """NamedTuples by the names of their runs, to be written."""
    return {f"{kind}-seed{seed}-fold{fold}": one._asdict() for (kind, seed, fold), one in found.items()}
