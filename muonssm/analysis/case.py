"""What is analysed: a finished run, or all runs of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..tasks.task import Prepared
from ..training.compare import KINDS
from ..training.folder import RunFolder
from ..training.recipe import Recipe


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
    prepared: dict[int, Prepared] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, run: str | Path) -> Case:
        """A finished run, or a comparison that is over."""
        folder = RunFolder(run)
        if (folder.path / "comparison.json").is_file():
            result = folder.read("comparison.json")
            trials = [trial for kind in KINDS for trial in result["trials"] if trial["kind"] == kind]
            subjects = [Trained(t["kind"], t["seed"], t["fold"], RunFolder(folder.path / t["folder"])) for t in trials]
            return cls(folder.path, Recipe.from_dict(result["settings"]["recipe"]), tuple(subjects))
        if not folder.is_over:
            raise ValueError(f"RUN is {str(run)!r}; it may be the folder of a finished run, or of a comparison")
        recipe = Recipe.from_dict(folder.read("recipe.json"))
        kind = "plain" if recipe.task == recipe.task.plain() else "muon"
        return cls(folder.path, recipe, (Trained(kind, 0, 0, folder),))

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

    def facts(self) -> dict[str, Any]:
        """Of the data."""
        return self.subjects[0].folder.read("facts.json")

    def batch(self, count: int, fold: int = 0) -> dict[str, Any]:
        """So many items of the validation part, evenly apart."""
        task = self.recipe.task.on_fold(fold) if fold else self.recipe.task
        if fold not in self.prepared:
            self.prepared[fold] = task.prepare()
        part: Any = self.prepared[fold].validation
        count = min(count, len(part))
        return task.collate([part[i * len(part) // count] for i in range(count)], training=False)
