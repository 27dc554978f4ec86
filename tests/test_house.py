"""The shape of the project: imports point one way, docs name real things, the README's example runs as printed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("ops", "layers", "models", "data", "tasks", "training", "cli")
MAY_IMPORT = {
    "ops": set(),
    "layers": {"ops"},
    "models": {"ops", "layers"},
    "data": set(),
    "tasks": {"ops", "layers", "models", "data"},
    "training": {"ops", "layers", "models", "data", "tasks"},
    "bench": {"info", "ops", "layers", "models", "data", "tasks", "training"},
    "analysis": {"ops", "layers", "models", "data", "tasks", "training", "bench"},
    "info": {"ops"},
    "files": set(),
    "numbers": set(),
    "elf": set(),
    "torchvision_cpu": {"elf"},
    "cli": {"cli_analysis", "bench", "analysis", "training", "tasks", "data", "info"},
    "cli_analysis": {"analysis", "data"},
}
FOR_ALL = {"version", "files", "numbers", "torchvision_cpu"}
OWN = "muonssm"


def imports(path: Path) -> set[str]:
    """Absolute names of what a file imports, wherever the statement stands."""
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


def is_triton(path: Path) -> bool:
    """Whether the file may import Triton: it is called so, or lies in a folder that is."""
    return any(part.startswith("triton") for part in path.relative_to(ROOT / OWN).with_suffix("").parts)


SOURCES = sorted((ROOT / OWN).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    room = path.relative_to(ROOT / OWN).with_suffix("").parts[0]
    if room.startswith("__") or room == "version":
        return  # the package's own front door
    allowed = MAY_IMPORT[room] | {room} | FOR_ALL
    for name in imports(path):
        top, *rest = name.split(".")
        if top == OWN and rest:
            assert rest[0] in allowed, f"{room} may not import {name}"
        elif room == "ops":
            kernels = {"triton"} if is_triton(path) else set()
            assert top in sys.stdlib_module_names | {"torch"} | kernels, f"ops imports torch only, not {name}"


def test_the_package_imports_with_torch_alone():
    """`import muonssm` must not need, or load, anything from an extra."""
    code = (
        "import sys, torch; before = set(sys.modules); import muonssm; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'muonssm', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_notation_names_exist():
    text = (ROOT / "docs" / "notation.md").read_text()
    names = re.findall(r"`(muonssm\.[\w.]+)`", text)
    assert len(names) >= 15
    for name in names:
        assert resolve(name) is not None, name


def resolve(name: str) -> object:
    """The object behind a dotted name; where a module and a function share a name, whichever leads on."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def test_readme_first_example_runs_as_printed():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 11
    namespace: dict = {}
    exec(code, namespace)
    y, more, plain = (namespace[name] for name in ("y", "more", "plain"))
    assert y.shape == more.shape == plain.shape == (2, 1000, 4, 32)
    assert not y.isclose(plain).all()
    assert not y.isclose(more).all()


def test_readme_tree_explains_every_file():
    text = (ROOT / "README.md").read_text()
    tree = text[text.index("## Files") : text.index("Dependencies point one way")]
    for path in SOURCES:
        if path.stem.startswith("__"):
            continue
        assert path.name in tree, f"README's file tree does not mention {path.relative_to(ROOT)}"


def test_files_and_functions_stay_short():
    for path in SOURCES:
        text = path.read_text()
        assert text.count("\n") < 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                    continue  # a kernel has no other way to its tensors than one argument each
                given = [a for a in arguments if a.arg not in ("self", "cls")]  # what a caller writes
                assert len(given) <= 10, f"{path}: {node.name}"
