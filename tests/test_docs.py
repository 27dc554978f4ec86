"""README, CONTRIBUTING and docs/ tell the truth: code runs, names resolve, links and files exist, commands parse."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from muonssm.cli import build_parser
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.registry import recipe_files
from muonssm.lab.core.torchvision_cpu import prepare_torchvision

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUTS = {  # what running a page's code prints, beside running at all
    "docs/index.md": "torch.Size([2, 100, 64]) torch.Size([2, 1, 64])",
    "docs/guide/mixers.md": "torch.Size([3, 3, 128])",
    "docs/guide/language.md": "172,679,272",
    "docs/guide/vision.md": "31,794,248",
}
FOLDERS = ("muonssm", "tests", "csrc", "benchmarks", "examples", "docs")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def code_spans(page: Path) -> list[str]:
    """Text between single backticks, outside of fenced blocks."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# ---- code


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=name_of)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    prepare_torchvision()
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in python_blocks(page):
            exec(compile(block, name_of(page), "exec"), namespace)
    assert OUTPUTS.get(name_of(page), "") in printed.getvalue()


def test_pages_that_must_have_code_have_it():
    with_code = {name_of(page) for page in PAGES if python_blocks(page)}
    assert with_code >= {*OUTPUTS, "README.md", "docs/guide/analysis.md", "docs/guide/recall.md"}


def test_first_example_of_the_readme_is_short():
    lines = [line for line in python_blocks(ROOT / "README.md")[0].splitlines() if line.strip()]
    assert len(lines) <= 11


# ---- names


def resolve(name: str) -> object:
    """Import the object behind a dotted name; where a module and a function share a name, whichever leads on."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part)
        return value
    raise ImportError(name)


@each_page
def test_dotted_names_resolve(page):
    prepare_torchvision()
    directives = re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)
    spans = [span for span in code_spans(page) if re.fullmatch(r"muonssm(\.\w+)+", span)]
    for name in (*spans, *directives):
        assert resolve(name) is not None, name


def test_names_were_found():
    notation = code_spans(ROOT / "docs/design/notation.md")
    assert sum(span.startswith("muonssm.") for span in notation) >= 15
    with pytest.raises((ImportError, AttributeError)):
        resolve("muonssm.ops.no_such_name")


# ---- links and files


def slug(heading: str) -> str:
    """The anchor of a heading, as both GitHub and Python-Markdown make it for plain headings."""
    text = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
    return re.sub(r"\s+", "-", text)


def anchors(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)}


def links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@each_page
def test_relative_links_exist(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target == ROOT / "docs" / "contributing.md":  # the site publishes CONTRIBUTING.md under this name
            target = ROOT / "CONTRIBUTING.md"
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{name_of(page)} links to {link}"


@each_page
def test_files_named_in_the_text_exist(page):
    pattern = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*")
    for span in code_spans(page):
        words = (word for word in span.split() if pattern.fullmatch(word))
        for word in words:
            if not re.search(r"[A-Z]{4,}|mydata", word):  # placeholders, as in muonssm/lab/TASK/recipes/
                assert (ROOT / word).exists(), f"{name_of(page)} names {word}"


def test_the_tests_of_the_table_of_faults_exist():
    """Every row of docs/reliability.md ends with its tests."""
    rows = re.findall(r"^\| (?!tried|---).*\|$", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE)
    assert len(rows) > 40
    for row in rows:
        names = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert names, row
        for file, test in names:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), f"{file}::{test}"


def test_file_tree_names_real_files():
    text = (ROOT / "docs/design/architecture.md").read_text()
    tree = text[text.index("## File tree") : text.index("## Direction of imports")]
    existing = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    files = set(re.findall(r"\b[\w-]+\.(?:py|css|toml)\b", tree)) - {"setup.py"}
    assert len(files) > 50
    assert files <= existing, files - existing
    for folder in (ROOT / "muonssm").rglob("*"):
        if folder.is_dir() and (folder / "__init__.py").exists() and folder.name != "kernels":
            assert f"{folder.name}/" in tree, f"the file tree does not name {folder}"


# ---- commands


class Command(NamedTuple):
    """A line of a page that starts a program."""

    page: str
    words: list[str]


def lines_of_code(page: Path) -> Iterator[str]:
    """Indented lines and those of shell blocks, with continued lines joined; then code spans."""
    text = page.read_text()
    blocks = re.findall(r"```(?:bash|sh|console|text)?\n(.*?)```", text, re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks += ["\n".join(re.findall(r"^    (.*)$", prose, re.MULTILINE))]
    for block in blocks:
        yield from re.sub(r"\\\n\s*", "", block).splitlines()
    yield from code_spans(page)


def commands(page: Path) -> Iterator[Command]:
    for line in lines_of_code(page):
        for part in re.split(r"\s[|&]+\s", line):
            with contextlib.suppress(ValueError):  # a quotation mark in a line that is no command
                words = shlex.split(part, comments=True)
                yield Command(name_of(page), [word for word in words if word != "..."])


ALL = [command for page in PAGES for command in commands(page)]


def arguments_of(command: Command) -> list[str] | None:
    """What follows `muonssm`, or None for another program."""
    words = command.words
    while words and (re.fullmatch(r"[A-Z_]+=.*", words[0]) or words[0] in ("$",)):
        words = words[1:]
    if words[:1] == ["muonssm"] or words[:1] == [".venv/bin/muonssm"]:
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1 : words.index("-m") + 2] == ["muonssm"]:
        return words[words.index("-m") + 2 :]
    return None


@pytest.fixture(scope="module")
def parser() -> ArgumentParser:
    return build_parser()


def test_every_muonssm_command_parses(parser, capsys):
    checked = set()
    subparsers = next(action for action in parser._actions if action.dest == "command")
    for command in ALL:
        arguments = arguments_of(command)
        if not arguments or arguments[0].isupper():
            continue
        assert arguments[0] in (*subparsers.choices, "--version", "--help"), command
        if len(arguments) > 1:  # `muonssm compare` alone is the command's name
            check_arguments(parser, command, arguments)
        checked.add(arguments[0])
    assert checked >= {"info", "train", "compare", "eval", "prepare", "generate", "needle", "predict", "stream"}
    assert checked >= {"analyze", "report", "bench", "explain", "corrupt"}


def check_arguments(parser: ArgumentParser, command: Command, arguments: list[str]) -> None:
    """Parse a command line; for recipes, also build the recipe with its changes."""
    try:
        parsed = parser.parse_args([argument.replace("BACKBONE", "mamba") for argument in arguments])
    except SystemExit as error:
        raise AssertionError(f"{command.page}: muonssm {shlex.join(arguments)} does not parse") from error
    if parsed.command in ("train", "compare") and not parsed.recipe.isupper() and not parsed.recipe.endswith(".toml"):
        assert parsed.recipe in recipe_files(), command
        changes = [change for change in parsed.set if not change.isupper() and "SECTION.KEY" not in change.upper()]
        Recipe.load(parsed.recipe, changes)


def test_make_targets_and_scripts_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set()
    for command in ALL:
        words = command.words
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in targets, command
            named.add(words[1])
        if words[:1] in (["python"], ["python3"]) and words[1:] and words[1].endswith(".py"):
            assert (ROOT / words[1]).exists(), command
    assert named >= {"demo", "test", "test-fast", "lint", "docs"}


# ---- prose


@each_page
def test_prose(page):
    text = page.read_text()
    for phrase in ("it may be", "it may have", "at hand"):
        assert phrase not in text, f"{name_of(page)} says {phrase!r}"
