"""Recipes: complete run configurations, one TOML file each, and what `--set` changes in them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from .config import TrainingConfig
from .registry import recipe_files, task_class
from .task import Task


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, and how."""

    name: str
    kind: str
    task: Task
    training: TrainingConfig

    @classmethod
    def load(cls, name: str, changes: Sequence[str] = ()) -> Recipe:
        """A recipe of the library by its name, or any TOML file, with changes like `training.epochs=5`."""
        path = Path(name) if name.endswith(".toml") else recipe_files().get(name)
        if path is None or not path.is_file():
            known = ", ".join(sorted(recipe_files()))
            raise ValueError(f"RECIPE must be one of {known}, or a .toml file, got {name!r}")
        try:
            content = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
        sections = (*task_class(content.get("task")).sections, "training")
        for change in changes:
            _apply(content, change, sections)
        return cls.from_dict({"name": path.stem, **content})

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`; sections and keys that are left out have their defaults."""
        content = dict(content)
        name, kind = content.pop("name", "recipe"), content.pop("task", None)
        task = task_class(kind)
        unknown = [key for key in content if key not in (*task.sections, "training")]
        if unknown:
            may = ", ".join((*task.sections, "training"))
            raise ValueError(f"the recipe has {unknown[0]!r}; it may have the sections {may}")
        built = {section: _build(section, part, content.get(section, {})) for section, part in task.sections.items()}
        return cls(name, kind, task(**built), _build("training", TrainingConfig, content.get("training", {})))

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {"name": self.name, "task": self.kind, **asdict(self.task), "training": asdict(self.training)}

    def variant(self, plain: bool, seed: int, fold: int) -> Recipe:
        """One run of a comparison."""
        task = (self.task.plain() if plain else self.task).on_fold(fold)
        return replace(self, task=task, training=replace(self.training, seed=seed))


def changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with changes like `training.epochs=5`."""
    content = recipe.to_dict()
    for change in changes:
        _apply(content, change, (*type(recipe.task).sections, "training"))
    return Recipe.from_dict(content)


def _build(section: str, kind: Any, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{section} is {values!r}; it may be a section with keys")
    known = [field.name for field in fields(kind)]
    for key in values:
        if key not in known:
            raise ValueError(f"{section} has {key!r}; it may have {', '.join(known)}")
    given = {key: None if value == "none" else value for key, value in values.items()}
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"in {section}: {error}") from error


def _apply(content: dict[str, Any], change: str, sections: Sequence[str]) -> None:
    """Puts `section.key=value` into the content; the value is TOML, or else a string."""
    path, equals, text = change.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise ValueError(f"--set is {change!r}; it may be section.key=value, like training.epochs=5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = {"True": True, "False": False}.get(text.strip(), text.strip())
    if section not in sections:
        raise ValueError(f"--set has the section {section!r}; it may be one of {', '.join(sections)}")
    values = content.setdefault(section, {})
    if isinstance(values, dict):  # what else it may be is said where the section is built
        values[key] = value
