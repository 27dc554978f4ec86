"""Recipes: complete run configurations, one TOML file each, and the changes that `--set` makes to them."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from muonssm.checks import is_int, is_number

from .config import TrainingConfig
from .registry import recipe_files, task_class
from .task import Task
from .untrusted import check_regular_file
from .variants import variant_task

NAME = re.compile(r"[\w-][\w.-]{0,99}")
FILE_LIMIT = 1 << 20  # bytes
PLAIN_TYPES: dict[Any, tuple[str, Any]] = {
    str: ("text", lambda value: isinstance(value, str)),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("an integer", is_int),
    float: ("a number", is_number),
}


def check_name(argument: str, name: Any) -> str:
    """A name that can be that of a folder and does not lead out of it."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        wanted = "letters, digits, dots, dashes and underscores, not beginning with a dot, 100 at most"
        raise ValueError(f"{argument} must be made of {wanted}, got {name!r:.150}")
    return name


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
        content = {"name": path.stem, **read_toml(path)}
        with _naming(path if name.endswith(".toml") else None):
            sections = (*task_class(content.get("task")).sections, "training")
        for change in changes:
            _apply(content, change, sections)
        with _naming(path if name.endswith(".toml") else None):
            return cls.from_dict(content)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Recipe:
        """The inverse of `to_dict`; missing sections and keys get their defaults."""
        if not isinstance(content, dict):
            raise ValueError(f"a recipe must be made of sections, got {content!r:.100}")
        content = dict(content)
        name, task_name = check_name("name", content.pop("name", "recipe")), content.pop("task", None)
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
        """The recipe of one run of a comparison; `name` is in `VARIANTS`."""
        task = variant_task(self.task, name).with_fold(fold)
        return replace(self, task=task, training=replace(self.training, seed=seed))


def changed(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """The recipe with changes like `training.epochs=5`."""
    content = recipe.to_dict()
    for change in changes:
        _apply(content, change, (*type(recipe.task).sections, "training"))
    return Recipe.from_dict(content)


@contextmanager
def _naming(path: Path | None) -> Iterator[None]:
    """Name the file in an error of a recipe."""
    try:
        yield
    except ValueError as error:
        if path is None:
            raise
        raise ValueError(f"{path}: {error}") from error


def read_toml(path: Path, argument: str = "RECIPE") -> dict[str, Any]:
    """Read a TOML file, which `argument` names on the command line."""
    size = check_regular_file(path).st_size
    if size > FILE_LIMIT:
        raise ValueError(f"{argument} must have at most {FILE_LIMIT} bytes, got {str(path)!r} with {size}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also text that is not UTF-8
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _build(section: str, section_class: Any, values: Any) -> Any:
    if not isinstance(values, dict):
        raise ValueError(f"{section} must be a section with keys, got {values!r}")
    known = [field.name for field in fields(section_class)]
    for key in values:
        if key not in known:
            raise ValueError(f"a key of {section} must be one of {', '.join(known)}, got {key!r}")
    given = {key: None if value == "none" else value for key, value in values.items()}
    for key, value in given.items():
        if not _is_plain(value):
            raise ValueError(f"{section}.{key} must be text, a number, true, false or a list, got {value!r}")
    try:
        built = section_class(**given)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        named = str(error).split(" ", 1)[0] in known
        if not named:
            _check_types(section, section_class, given)  # names the field, if its type is the reason
        raise ValueError(f"{section}.{error}" if named else f"{section}: {error}") from error
    _check_types(section, section_class, given)
    return built


def _is_plain(value: Any) -> bool:
    """Whether JSON has the value; dates, which TOML has, are none."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, (str, bool, int, float))


def _check_types(section: str, section_class: Any, given: dict[str, Any]) -> None:
    """Refuse what a section let pass: a number where its field is text, and so on."""
    hints = typing.get_type_hints(section_class)
    for key, value in given.items():
        hint = hints[key]
        options = typing.get_args(hint) if type(hint) is types.UnionType else (hint,)
        checks = [PLAIN_TYPES.get(option) for option in options if option not in (type(None), Path)]
        if None in checks or (value is None and type(None) in options):
            continue  # a type of its own, which the section has checked
        if not any(check[1](value) for check in checks if check):
            wanted = " or ".join(check[0] for check in checks if check)
            raise ValueError(f"{section}.{key} must be {wanted}, got {value!r}")


def _apply(content: dict[str, Any], change: str, sections: Sequence[str]) -> None:
    """Put `section.key=value` into the content; the value is TOML, or else a string."""
    path, equals, text = change.partition("=")
    section, dot, key = path.strip().partition(".")
    if not (equals and dot and key):
        raise ValueError(f"--set must be SECTION.KEY=VALUE, like training.epochs=5, got {change!r}")
    value = parse_value(text.strip())
    if section not in sections:
        raise ValueError(f"the section of --set must be one of {', '.join(sections)}, got {section!r}")
    values = content.setdefault(section, {})
    if isinstance(values, dict):  # anything else is refused where the section is built
        values[key] = value


def parse_value(text: str) -> Any:
    """The text as one TOML value, or else as a string; a comment or a second line is never dropped."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return {"True": True, "False": False}.get(text, text)
    if len(parsed) > 1 or not _is_plain(parsed["value"]):
        return text
    try:
        tomllib.loads(f"value = {text} ]")  # only a comment can swallow the bracket
    except (ValueError, RecursionError):
        return parsed["value"]
    return text
