"""The shape of the project: imports point one way, tasks stay in their folders, errors have one form."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from muonssm.lab.core.registry import task_registry

ROOT = Path(__file__).parent.parent
OWN = "muonssm"
SOURCES = sorted((ROOT / OWN).rglob("*.py"))
LIBRARY = ("ops", "layers", "models", "distributed")
TASK_ROOMS = ("lab.activity", "lab.language", "lab.recall", "lab.vision")
MAY_IMPORT = {
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers"},
    "distributed": {"ops"},
    "lab.core": {"ops", "layers", "models", "distributed"},
    "lab.report": {"ops", "layers", "models", "lab.core"},
    "lab.analysis": {"ops", "layers", "models", "lab.core", "lab.report", "lab.bench"},
    "lab.bench": {"ops", "layers", "models", "lab.core", "lab.report", *TASK_ROOMS},
    **{room: {"ops", "layers", "models", "lab.core", "lab.report", "lab.analysis"} for room in TASK_ROOMS},
    "cli": {"lab.core"},
}
FOR_ALL = {"version", "checks"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(name: str) -> str:
    """The room of a module inside the package: `ops.memory.native` is in `ops`, `lab.core.task` in `lab.core`."""
    first, *rest = name.split(".")
    return f"lab.{rest[0]}" if first == "lab" and rest else first


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever the statement stands."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def uses_triton(path: Path) -> bool:
    """Whether the file is one of Triton's: named after it, or in a folder of kernels."""
    parts = path.relative_to(ROOT / OWN).with_suffix("").parts
    return "kernels" in parts or any(part.startswith("triton") for part in parts)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_one_way(path):
    room = room_of(".".join(path.relative_to(ROOT / OWN).with_suffix("").parts))
    if room not in MAY_IMPORT:
        return  # the package's front door and the modules that everybody may import
    allowed = MAY_IMPORT[room] | FOR_ALL | {room}
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == OWN and rest not in ("", "lab"):
            assert room_of(rest) in allowed, f"{room} must not import {name}"
        elif room == "ops":
            kernels = {"triton"} if uses_triton(path) else set()
            assert top in sys.stdlib_module_names | {"torch", OWN} | kernels, f"ops imports torch only, not {name}"


def test_every_room_is_checked():
    rooms = {room_of(".".join(path.relative_to(ROOT / OWN).with_suffix("").parts)) for path in SOURCES}
    assert {room for room in rooms if not room.startswith("__")} - set(MAY_IMPORT) == FOR_ALL | {"lab.__init__"}


def test_the_library_does_not_import_the_lab():
    for path in SOURCES:
        if path.relative_to(ROOT / OWN).parts[0] in LIBRARY:
            assert not any(name.startswith("muonssm.lab") for name in imports(path)), path


def test_import_muonssm_loads_torch_alone():
    code = (
        "import sys, torch; before = set(sys.modules); import muonssm; new = set(sys.modules) - before; "
        "print(sorted({m.split('.')[0] for m in new} - set(sys.stdlib_module_names) - {'muonssm', 'torch'}), "
        "[m for m in new if m.startswith('muonssm.lab')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def strings(path: Path) -> list[str]:
    """String constants of a file that are not docstrings."""
    tree = ast.parse(path.read_text())
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
    return [node.value for node in constants if isinstance(node.value, str)]


def test_a_tasks_name_stays_in_its_folder():
    """Extras have the names of tasks, and a model's module has the name of what it is for: neither is a task's name."""
    tasks = task_registry()
    extras = {"activity", "language", "vision"}
    for path in SOURCES:
        room = room_of(".".join(path.relative_to(ROOT / OWN).with_suffix("").parts))
        if room in (*TASK_ROOMS, "lab.bench", "cli", *LIBRARY):
            continue
        allowed = extras if path.name == "commands.py" else set()
        assert not (set(strings(path)) & set(tasks)) - allowed, relative(path)
        classes = {entry.class_name for entry in tasks.values()}
        assert not any(name in path.read_text() for name in classes), relative(path)


def test_errors_say_what_must_be():
    """Errors read "X must be ..., got ...". The old form left the reader to guess."""
    for path in [*SOURCES, ROOT / "setup.py", *(ROOT / "csrc").iterdir()]:
        found = re.search(r"\bit may (be|have)\b|; may be\b", path.read_text()) if path.is_file() else None
        assert found is None, f"{relative(path)}: {found and found.group()}"


def test_the_readme_is_a_landing_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
