"""Which tasks and recipes exist: every folder of `muonssm/lab` with `TASKS` in its `__init__.py` is a task room.

    TASKS = {"name in a recipe": "module.ClassName"}     relative to the folder
    EXTRA = "activity"                                   the pip extra that the module needs

Recipes are the .toml files in the room's `recipes/`, studies those in its `studies/`. A new task needs nothing outside
its own folder.
"""

from __future__ import annotations

import functools
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from muonssm import lab

if TYPE_CHECKING:
    from .task import Task


class Registered(NamedTuple):
    """Where a task's class is, and the extra that importing it needs."""

    module: str
    class_name: str
    extra: str


@functools.cache
def task_registry() -> dict[str, Registered]:
    """All tasks by the name that recipes use."""
    found = {}
    for room in _rooms():
        for name, path in room.TASKS.items():
            module, class_name = path.rsplit(".", 1)
            found[name] = Registered(f"{room.__name__}.{module}", class_name, room.EXTRA)
    return found


@functools.cache
def recipe_files() -> dict[str, Path]:
    """The library's recipes by name."""
    return _toml_files("recipes")


@functools.cache
def study_files() -> dict[str, Path]:
    """The library's studies by name."""
    return _toml_files("studies")


def task_class(name: Any) -> type[Task]:
    """The class of a task; importing it may need an extra, which the error names."""
    tasks = task_registry()
    if not isinstance(name, str) or name not in tasks:
        raise ValueError(f"task must be one of {', '.join(tasks)}, got {name!r}")
    module, class_name, extra = tasks[name]
    try:
        return getattr(import_module(module), class_name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"task {name!r} needs the extra `{extra}` (pip install 'muonssm[{extra}]'): {error}"
        ) from error


def _toml_files(kind: str) -> dict[str, Path]:
    folders = [Path(path) / kind for room in _rooms() for path in room.__path__]
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.toml"))}


def _rooms() -> list[Any]:
    modules = [import_module(f"{lab.__name__}.{found.name}") for found in pkgutil.iter_modules(lab.__path__)]
    return [module for module in modules if hasattr(module, "TASKS")]
