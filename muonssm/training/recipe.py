"""Recipes: complete run configurations, one TOML file each, and what `--set` changes in them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..data.activity import ActivityConfig
from ..models.activity import ActivityModelConfig
from ..ops import Muon
from ..tasks.activity import ActivityTask
from ..tasks.augment import Augmentation
from .config import TrainingConfig

PLACE = Path(__file__).parent.parent / "recipes"
SECTIONS: dict[str, Any] = {
    "data": ActivityConfig,
    "model": ActivityModelConfig,
    "muon": Muon,
    "augment": Augmentation,
    "training": TrainingConfig,
}


@dataclass(frozen=True)
class Recipe:
    """What is trained, on what, and how."""

    name: str
    task: ActivityTask
    training: TrainingConfig

    @classmethod
    def load(cls, name: str, changes: Sequence[str] = ()) -> Recipe:
        """A recipe of the library by its name, or any TOML file, with changes like `training.epochs=5`."""
        path = Path(name) if name.endswith(".toml") else PLACE / f"{name}.toml"
        if not path.is_file():
            known = ", ".join(sorted(file.stem for file in PLACE.glob("*.toml")))
            raise ValueError(f"RECIPE is {name!r}; it may be one of {known}, or a .toml file")
        try:
            content = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path} is not TOML: {error}") from error
        for change in changes:
            _apply(content, change)
        return cls.from_dict({"name": path.stem, **content})

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`; sections and keys that are left out have their defaults."""
        content = dict(content)
        name = content.pop("name", "recipe")
        unknown = [key for key in content if key not in SECTIONS]
        if unknown:
            raise ValueError(f"the recipe has {unknown[0]!r}; it may have the sections {', '.join(SECTIONS)}")
        built = {section: _build(section, content.get(section, {})) for section in SECTIONS}
        training = built.pop("training")
        return cls(name, ActivityTask(**built), training)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON."""
        return {"name": self.name, **asdict(self.task), "training": asdict(self.training)}

    def variant(self, plain: bool, seed: int, fold: int) -> Recipe:
        """One run of a comparison."""
        task = (self.task.plain() if plain else self.task).on_fold(fold)
        return replace(self, task=task, training=replace(self.training, seed=seed))


def _build(section: str, values: Any) -> Any:
    kind = SECTIONS[section]
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


def _apply(content: dict[str, Any], change: str) -> None:
    """Puts `section.key=value` into the content; the value is TOML, or else a string."""
    path, equals, text = change.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise ValueError(f"--set is {change!r}; it may be section.key=value, like training.epochs=5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = {"True": True, "False": False}.get(text.strip(), text.strip())
    if section not in SECTIONS:
        raise ValueError(f"--set has the section {section!r}; it may be one of {', '.join(SECTIONS)}")
    values = content.setdefault(section, {})
    if isinstance(values, dict):  # what else it may be is said where the section is built
        values[key] = value
