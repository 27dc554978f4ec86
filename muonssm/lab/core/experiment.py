"""`Experiment`: a finished run or a finished comparison, read from its folder. Reports and analyses start from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from .compare import ComparedRun, Comparison, read_comparison
from .recipe import Recipe
from .run_folder import RunFolder
from .task import DataSplits, Metric, Task
from .variants import display_name


class Location(NamedTuple):
    """A folder that can hold evaluation results, and its name on the page."""

    name: str
    folder: RunFolder


@dataclass(frozen=True)
class Experiment:
    """A run or a comparison.

    Attributes:
        path: its folder.
        comparison: the content of comparison.json; for a single run the same with one run whose folder is `.`.
        is_single_run: whether it is a single run.
        data: splits by fold, loaded on first use.
    """

    path: Path
    comparison: Comparison
    is_single_run: bool
    data: dict[int, DataSplits] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def read(cls, path: str | Path) -> Experiment:
        """Read the folder of a finished run or comparison."""
        folder = RunFolder(path)
        if (folder.path / "comparison.json").is_file():
            return cls(folder.path, read_comparison(folder), False).checked()
        if folder.is_finished and (folder.path / "recipe.json").is_file():
            return cls(folder.path, _single_run(folder), True).checked()
        raise ValueError(
            f"RUN must be the folder of a finished run or comparison, got {str(path)!r}: {_reason(folder.path)}"
        )

    def checked(self) -> Experiment:
        """Itself; raise ValueError, naming the file, if its recipe is damaged or it has nothing but a peer."""
        path = self.path / "comparison.json"
        try:
            headline, *_ = self.recipe.task.metrics
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged: recipe: {error}") from error
        if headline.name != self.metrics[0].name or not self.trained_runs:
            wanted = f"runs of the task {self.recipe.task_name}, with {headline.name} as the first metric"
            raise ValueError(f"{path} is damaged: it must have {wanted}")
        return self

    @functools.cached_property
    def recipe(self) -> Recipe:
        """The recipe of which the runs are variants."""
        return Recipe.from_dict(self.comparison.recipe)

    @property
    def task(self) -> Task:
        return self.recipe.task

    @property
    def metrics(self) -> Sequence[Metric]:
        return self.comparison.metrics

    @property
    def variants(self) -> list[str]:
        """All variants, peers of other libraries included."""
        return self.comparison.variants

    @property
    def trained_variants(self) -> list[str]:
        """The variants that this library trained, plain first."""
        return self.comparison.trained_variants

    @property
    def compared_variants(self) -> list[str]:
        """The trained variants that have a difference from plain."""
        return [variant for variant in self.trained_variants if variant in self.comparison.compared]

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        """All runs, peers included."""
        return self.comparison.runs

    @property
    def trained_runs(self) -> list[ComparedRun]:
        """The runs that this library trained, variant by variant, plain first."""
        return [run for variant in self.trained_variants for run in self.runs if run.variant == variant]

    @property
    def title(self) -> str:
        """Model, data and variants."""
        if not self.is_single_run:
            return f"{self.comparison.title}, {self._contest}"
        return f"{self.comparison.title}, {'with Muon' if self.variants == ['muon'] else 'plain'}"

    @property
    def _contest(self) -> str:
        """Which variants are compared."""
        *others, last = (display_name(variant) for variant in self.compared_variants or self.trained_variants)
        listed = f"{', '.join(others)} and {last}" if others else last
        return f"plain against {listed}" if self.compared_variants else listed

    @property
    def analysis_folder(self) -> Path:
        """Where `muonssm analyze` writes."""
        return self.path / "analysis"

    def folder(self, run: ComparedRun) -> RunFolder:
        """The folder of one of its runs."""
        return RunFolder(self.path / run.folder)

    def load_model(self, run: ComparedRun) -> nn.Module:
        """The model of one of its runs, with the weights that were kept."""
        return self.folder(run).load_model()[2]

    def first_run(self, variant: str) -> ComparedRun:
        """The first run of a variant."""
        return self.comparison.runs_of(variant)[0]

    def metadata(self) -> dict[str, Any]:
        """The metadata of the data."""
        return self.folder(self.trained_runs[0]).read("metadata.json")

    def validation_batch(self, count: int, fold: int = 0) -> dict[str, Any]:
        """A batch of `count` validation items, evenly spaced."""
        task = self.task.with_fold(fold)
        if fold not in self.data:
            self.data[fold] = task.load_data()
        return spaced_batch(task, self.data[fold].validation, count)

    def locations(self) -> list[Location]:
        """Where evaluation results can be: the experiment's own folder, and those of its runs."""
        if self.is_single_run:
            return [Location(self.variants[0], RunFolder(self.path))]
        runs = [Location(_name(run, self.trained_runs), self.folder(run)) for run in self.trained_runs]
        return [Location("comparison", RunFolder(self.path)), *runs]

    def read_all(self, name: str, check: Callable[[Any], None]) -> dict[str, Any]:
        """The content of the JSON file `name` at every location that has it, by the location's name.

        `check` raises ValueError for a content that is wrong; the error then names the file.
        """
        found = [location for location in self.locations() if (location.folder.path / name).is_file()]
        return {location.name: location.folder.read(name, check) for location in found}

    def has_any(self, name: str) -> bool:
        """Whether some location has the file `name`."""
        return any((location.folder.path / name).is_file() for location in self.locations())


def spaced_batch(task: Task, split: Any, count: int) -> dict[str, Any]:
    """A batch of `count` items of a split, evenly spaced."""
    count = min(count, len(split))
    return task.collate([split[i * len(split) // count] for i in range(count)], training=False)


def _single_run(folder: RunFolder) -> Comparison:
    recipe = folder.read_recipe()
    metrics = folder.read_metrics(recipe.task.metrics)
    variant = "plain" if recipe.task == recipe.task.plain() else "muon"
    fold = getattr(getattr(recipe.task, "data", None), "fold", 0)
    extra, reason = metrics.get("extra_tests", {}), metrics.get("diverged")
    run = ComparedRun(variant, recipe.training.seed, fold, ".", metrics["test"], extra, reason)
    paper = recipe.task.paper_scores(folder.read("metadata.json"))
    return Comparison(recipe.task.title, recipe.task.metrics, recipe.to_dict(), 1, 1, None, (run,), paper)


def _name(run: ComparedRun, runs: Sequence[ComparedRun]) -> str:
    """The variant, with seed and fold where it has several runs."""
    several = sum(other.variant == run.variant for other in runs) > 1
    return f"{run.variant}, seed {run.seed}, fold {run.fold}" if several else run.variant


def _reason(path: Path) -> str:
    if not path.is_dir():
        return "there is no such folder"
    if (path / "comparison-settings.json").is_file():
        return "the comparison is not finished; --resume continues it"
    if (path / "recipe.json").is_file():
        return "the run is not finished; --resume continues it"
    return "it has neither metrics.json nor comparison.json"
