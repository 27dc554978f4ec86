"""Recipes: complete run configurations, one TOML file each, and the changes that `--set` makes to them."""

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
    """A task and how to train it.

    Attributes:
        name: of the file.
        task_name: the task's name in the registry.
        task: data, model and memory rule.
        training: optimizer and budget.
    """

    name: str
    task_name: str
    task: Task
    training: TrainingConfig

    @classmethod
    def load(cls, name: str, changes: Sequence[str] = ()) -> Recipe:
        """Load a recipe of the library by name, or any TOML file, with changes like `training.epochs=5`."""
        path = Path(name) if name.endswith(".toml") else recipe_files().get(name)
        if path is None or not path.is_file():
            known = ", ".join(sorted(recipe_files()))
            raise ValueError(f"RECIPE must be a .toml file or one of {known}, got {name!r}")
        try:
            content = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        sections = (*task_class(content.get("task")).sections, "training")
        for change in changes:
            _apply(content, change, sections)
        return cls.from_dict({"name": path.stem, **content})

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`; missing sections and keys get their defaults."""
        content = dict(content)
        name, task_name = content.pop("name", "recipe"), content.pop("task", None)
        task = task_class(task_name)
        sections = (*task.sections, "training")
        for section in content:
            if section not in sections:
                raise ValueError(f"a section of the recipe must be one of {', '.join(sections)}, got {section!r}")
        built = {section: _build(section, cls_, content.get(section, {})) for section, cls_ in task.sections.items()}
        return cls(name, task_name, task(**built), _build("training", TrainingConfig, content.get("training", {})))

    def to_dict(self) -> dict[str, Any]:
        """All settings, as JSON."""
        return {"name": self.name, "task": self.task_name, **asdict(self.task), "training": asdict(self.training)}

    def variant(self, name: str, seed: int, fold: int) -> Recipe:
        """The recipe of one run of a comparison: `"plain"`, or `"muon"` for the recipe's own memory rule."""
        task = (self.task.plain() if name == "plain" else self.task).with_fold(fold)
        return replace(self, task=task, training=replace(self.training, seed=seed))


def changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with changes like `training.epochs=5`."""
    content = recipe.to_dict()
    for change in changes:
        _apply(content, change, (*type(recipe.task).sections, "training"))
    return Recipe.from_dict(content)


def _build(section: str, section_class: Any, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{section} must be a section with keys, got {values!r}")
    known = [field.name for field in fields(section_class)]
    for key in values:
        if key not in known:
            raise ValueError(f"a key of {section} must be one of {', '.join(known)}, got {key!r}")
    given = {key: None if value == "none" else value for key, value in values.items()}
    try:
        return section_class(**given)
    except (TypeError, ValueError) as error:
        named = str(error).split(" ", 1)[0] in known
        raise ValueError(f"{section}.{error}" if named else f"{section}: {error}") from error


def _apply(content: dict[str, Any], change: str, sections: Sequence[str]) -> None:
    """Put `section.key=value` into the content; the value is TOML, or else a string."""
    path, equals, text = change.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise ValueError(f"--set must be SECTION.KEY=VALUE, like training.epochs=5, got {change!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = {"True": True, "False": False}.get(text.strip(), text.strip())
    if section not in sections:
        raise ValueError(f"the section of --set must be one of {', '.join(sections)}, got {section!r}")
    values = content.setdefault(section, {})
    if isinstance(values, dict):  # anything else is refused where the section is built
        values[key] = value
