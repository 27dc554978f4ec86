"""What a page is about: a finished run or a comparison, read from its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .compare import KINDS, Trial, metrics_of, summary
from .recipe import Recipe
from .run_folder import RunFolder, as_json
from .task import Metric


class Place(NamedTuple):
    """A folder that may have results of its own, and what it is called on the page."""

    name: str
    folder: RunFolder


@dataclass(frozen=True)
class Subject:
    """A run or a comparison.

    Attributes:
        path: its folder.
        result: as comparison.json has it; of a single run the same, with one trial whose folder is `.`.
        alone: whether it is a single run.
    """

    path: Path
    result: dict[str, Any]
    alone: bool

    @classmethod
    def read(cls, path: str | Path) -> Subject:
        """Raises where the folder is neither."""
        folder = RunFolder(path)
        if (folder.path / "comparison.json").is_file():
            return cls(folder.path, folder.read("comparison.json"), False)
        if folder.is_over and (folder.path / "recipe.json").is_file():
            return cls(folder.path, _of_run(folder), True)
        raise ValueError(
            f"RUN is {str(path)!r}, {_reason(folder.path)}; it may be the folder of a finished run, or of a comparison"
        )

    @property
    def recipe(self) -> dict[str, Any]:
        return self.result["settings"]["recipe"]

    @property
    def task(self) -> str:
        return self.recipe.get("task", "activity")

    @property
    def metrics(self) -> list[Metric]:
        return metrics_of(self.result)

    @property
    def kinds(self) -> list[str]:
        return list(self.result["kinds"])

    @property
    def trials(self) -> list[dict[str, Any]]:
        return self.result["trials"]

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The trials that are runs of ours."""
        return [trial for trial in self.trials if trial["kind"] in KINDS]

    @property
    def paper(self) -> dict[str, dict[str, float]]:
        """The paper's figures for the same data and model, by kind and score."""
        if self.result["paper"] or self.task not in ("vision", "detection", "segmentation"):
            return self.result["paper"]
        from .published_vision import published_vision

        return published_vision(self.recipe, self.folder(self.trained[0]).read("facts.json")["classes"])

    @property
    def title(self) -> str:
        if not self.alone:
            return f"{self.result['title']}, plain against Muon"
        return f"{self.result['title']}, {'with Muon' if self.kinds == ['muon'] else 'plain'}"

    def folder(self, trial: dict[str, Any]) -> RunFolder:
        """Of one of its runs."""
        return RunFolder(self.path / trial["folder"])

    def places(self) -> list[Place]:
        """Where results of evaluations may be: its own folder, and those of its runs."""
        if self.alone:
            return [Place(self.kinds[0], RunFolder(self.path))]
        runs = [Place(_name(trial, self.trained), self.folder(trial)) for trial in self.trained]
        return [Place("comparison", RunFolder(self.path)), *runs]

    def holding(self, name: str) -> dict[str, Any]:
        """The content of a JSON file by the name of the place, of all places that have it."""
        return {place.name: read_json(place.folder.path / name) for place in self._with(name)}

    def _with(self, name: str) -> list[Place]:
        return [place for place in self.places() if (place.folder.path / name).is_file()]


def read_json(path: Path) -> Any:
    """The content of a file; what is wrong with it is said with its name."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _of_run(folder: RunFolder) -> dict[str, Any]:
    recipe = Recipe.from_dict(folder.read("recipe.json"))
    metrics = folder.read("metrics.json")
    kind = "plain" if recipe.task == recipe.task.plain() else "muon"
    scores = {**metrics["test"], **({"more": metrics["more"]} if "more" in metrics else {})}
    fold = getattr(getattr(recipe.task, "data", None), "fold", 0)
    trial = Trial(kind, recipe.training.seed, fold, ".", scores)
    settings = {"recipe": recipe.to_dict(), "seeds": 1, "folds": 1, "against": None}
    return as_json(summary(recipe, [trial]) | {"settings": settings})


def _name(trial: dict[str, Any], trials: Sequence[dict[str, Any]]) -> str:
    """The kind alone where there is one run of it."""
    several = sum(other["kind"] == trial["kind"] for other in trials) > 1
    return f"{trial['kind']}, seed {trial['seed']}, fold {trial['fold']}" if several else trial["kind"]


def _reason(path: Path) -> str:
    if not path.is_dir():
        return "which is no folder"
    if (path / "comparison-settings.json").is_file():
        return "a comparison that is not over (--resume goes on with it)"
    if (path / "recipe.json").is_file():
        return "a run that is not over (--resume goes on with it)"
    return "which has neither metrics.json nor comparison.json"
