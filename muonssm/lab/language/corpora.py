"""Sources of documents: Python's own library, local files, data sets of the hub.

    source = open_source("stdlib")
    for row in source.rows():               # a Document, or a Lost that says what is left out and why
        ...

A source gives the same rows in the same order each time. `place()` says where it stands, as JSON, and `rows(place)`
goes on from there without reading what came before (within the file it stands in, as far as needed).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from .instructions import FIELDS, prompt

KINDS = ("text", "instructions")
ALIASES = {"fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-10BT", "alpaca": "tatsu-lab/alpaca"}
TEXTS, TABLES = (".txt", ".md", ".py"), (".jsonl", ".parquet", ".json")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
MAY_BE = (
    "'stdlib', 'fineweb-edu', 'alpaca', a file, a folder, or a data set of the hub as owner/name or owner/name:config"
)
# Of Python's library: what is installed beside it, what tests it, and what describes the machine that built it.
APART = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
BUILD = ("config-", "_sysconfigdata", "_sysconfig_vars")
EMPTY = "is empty"

Place = Any  # JSON: where a source stands


class Document(NamedTuple):
    """One text; or one response, with the prompt before it."""

    name: str
    text: str
    prompt: str | None = None


class Lost(NamedTuple):
    """What cannot be used, and why."""

    name: str
    reason: str


Row = Document | Lost
Table = Mapping[str, Any]  # one row of a table: a value for each column


class Source(Protocol):
    """Where documents come from.

    Attributes:
        metadata: what is known of it, as JSON; another source, or the same one after a change, has others.
        lost: files that are not read at all.
        total: how many rows there are, where that is known.
    """

    metadata: dict[str, Any]
    lost: list[Lost]
    total: int | None

    def rows(self, place: Place = None) -> Iterator[Row]:
        """All rows, or those from `place` on."""

    def place(self) -> Place:
        """Where the row after the last one given is."""


def open_source(
    name: str, kind: str = "text", field: str = "text", cut: int | None = None, revision: str | None = None
) -> Source:
    """The source of that name; see `PrepareConfig` for the arguments."""
    if name == "stdlib":
        return stdlib(cut)
    if name not in ALIASES and Path(name).exists():
        return local(Path(name), kind, field, cut)
    hub = ALIASES.get(name, name)
    if not HUB_NAME.fullmatch(hub):
        raise ValueError(f"source is {name!r}, which is no file and no folder; it may be {MAY_BE}")
    return Hub(hub, revision, to_row(kind, field), (field,) if kind == "text" else (FIELDS[0], FIELDS[2]))


# files


class Files:
    """Files in order; `read` gives the rows of one."""

    def __init__(self, root: Path, files: Sequence[Path], read: Callable[[Path], Iterator[Row]], known: bool) -> None:
        self.root, self.files, self.read = root, files, read
        self.lost: list[Lost] = []
        self.total = len(files) if known else None
        sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]
        listing = hashlib.sha256("\n".join(f"{name} {size}" for name, size in sizes).encode(errors="surrogateescape"))
        self.metadata: dict[str, Any] = {
            "files": len(files),
            "bytes": sum(size for _, size in sizes),
            "listing": listing.hexdigest(),
        }
        self._place = [0, 0]

    def rows(self, place: Place = None) -> Iterator[Row]:
        first, done = place or (0, 0)
        for number in range(first, len(self.files)):
            start = done if number == first else 0
            for row, item in enumerate(islice(self.read(self.files[number]), start, None), start + 1):
                self._place = [number, row]
                yield item
        self._place = [len(self.files), 0]

    def place(self) -> Place:
        return list(self._place)


def stdlib(cut: int | None = None) -> Files:
    """The text of Python's own library: a file is a document. It differs from version to version of Python."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in APART and not name.startswith(BUILD)]
        files += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(BUILD)]
    if not files:
        raise ValueError(f"source is 'stdlib', and this Python has no text of its library below {root}")
    source = Files(root, _in_order(root, files), lambda path: read_text(root, path, cut), known=cut is None)
    source.metadata["python"] = platform.python_version()
    return source


def local(path: Path, kind: str, field: str, cut: int | None) -> Files:
    """A file, or all files of a folder that have a suffix we read."""
    root = path if path.is_dir() else path.parent
    found = [path] if path.is_file() else [file for file in root.rglob("*") if not file.is_dir()]
    # Settings of all sorts have the suffix .json: such a file is text only where it is asked for by name.
    suffixes = TABLES if kind == "instructions" else (*TEXTS, *TABLES[: 3 if path.is_file() else 2])
    files, lost = [], []
    for file in _in_order(root, found):
        name = file.relative_to(root)
        if path.is_dir() and any(part.startswith(".") for part in name.parts):
            lost.append(Lost(str(name), "is hidden"))
        elif not file.is_file():
            lost.append(Lost(str(name), "is no file, or a link to none"))
        elif file.suffix.lower() not in suffixes:
            lost.append(Lost(str(name), f"is no {', '.join(suffixes)} file"))
        else:
            files.append(file)
    if not files:
        raise ValueError(f"source is {str(path)!r}, which has no {', '.join(suffixes)} file for kind {kind!r}")

    def read(file: Path) -> Iterator[Row]:
        if file.suffix.lower() in TEXTS:
            return read_text(root, file, cut)
        return read_table(root, file, to_row(kind, field), (field,) if kind == "text" else FIELDS)

    source = Files(root, files, read, known=cut is None and all(file.suffix.lower() in TEXTS for file in files))
    source.lost = lost
    return source


def _in_order(root: Path, files: Sequence[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_text(root: Path, path: Path, cut: int | None) -> Iterator[Row]:
    """A text file as one document, or as several of at most `cut` characters that end where lines do."""
    name = path.relative_to(root).as_posix()
    try:
        # A Python file may name its encoding; tokenize knows how.
        with tokenize.open(path) if path.suffix.lower() == ".py" else open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except (UnicodeDecodeError, SyntaxError):
        yield Lost(name, "is not in the encoding it should have (UTF-8, or what a Python file says)")
        return
    except OSError as error:
        yield Lost(name, f"cannot be read: {error.strerror or error}")
        return
    for number, piece in enumerate(pieces(text, cut)):
        yield checked(Document(name if number == 0 else f"{name}#{number}", piece))


def pieces(text: str, cut: int | None) -> Iterator[str]:
    """Parts of at most `cut` characters that make up `text`; they end where lines do, where one is short enough."""
    start = 0
    while cut is not None and len(text) - start > cut:
        stop = text.rfind("\n", start, start + cut) + 1 or start + cut
        yield text[start:stop]
        start = stop
    if start == 0 or start < len(text):
        yield text[start:]


def read_table(root: Path, path: Path, convert: Callable[[str, Table], Row], columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a .jsonl, .json or .parquet file."""
    name = path.relative_to(root).as_posix()
    read = {".jsonl": _jsonl, ".json": _json}.get(path.suffix.lower())
    try:
        for number, row in read(path) if read else _parquet(path, columns):
            place = f"{name}:{number}"
            yield convert(place, row) if isinstance(row, Mapping) else Lost(place, str(row))
    except OSError as error:
        yield Lost(name, f"cannot be read: {error.strerror or error}")


def _jsonl(path: Path) -> Iterator[tuple[int, Table | str]]:
    """Line numbers with objects, or with what is wrong."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError):
                    row = None
                yield number, row if isinstance(row, dict) else "is no JSON object"


def _json(path: Path) -> Iterator[tuple[int, Table | str]]:
    """The objects of a list."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, list):
        yield 0, "is no JSON list of objects"
        return
    for number, row in enumerate(content):
        yield number, row if isinstance(row, dict) else "is no JSON object"


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Table | str]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            wanted = [column for column in columns if column in file.schema_arrow.names]
            if set(columns) - set(wanted) - {"input"}:
                raise ValueError(_no_column(str(path), columns, file.schema_arrow.names))
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (ArrowException, UnicodeDecodeError):
        yield number, "is no whole Parquet file: nothing is read from here on"


def _no_column(name: str, columns: Sequence[str], there: Sequence[str]) -> str:
    missing = next(column for column in columns if column not in there)
    hint = "; kind may be 'instructions'" if missing not in FIELDS and {"instruction", "output"} <= set(there) else ""
    return f"{name} has no field {missing!r}; it has {', '.join(there) or 'none'}{hint}"


# rows of a table


def to_row(kind: str, field: str) -> Callable[[str, Table], Row]:
    """How a row of a table becomes a document."""

    def text(name: str, row: Table) -> Row:
        value = row.get(field)
        if isinstance(value, str):
            return checked(Document(name, value))
        hint = " (kind may be 'instructions')" if {"instruction", "output"} <= set(row) else ""
        return Lost(name, EMPTY if value is None and field in row else f"has no text in the field {field!r}{hint}")

    def instructions(name: str, row: Table) -> Row:
        instruction, context, output = (row.get(key) for key in FIELDS)
        if not isinstance(instruction, str) or not isinstance(output, str) or not isinstance(context, str | None):
            return Lost(name, f"has no text in the fields {', '.join(FIELDS)}")
        if not instruction.strip():
            return Lost(name, EMPTY)
        return checked(Document(name, output, prompt(instruction, context or "")))

    return instructions if kind == "instructions" else text


def checked(document: Document) -> Row:
    """A document that can be used: not blank (a response may be), and Unicode that UTF-8 can say."""
    if document.prompt is None and not document.text.strip():
        return Lost(document.name, EMPTY)
    try:
        document.text.encode()
        (document.prompt or "").encode()
    except UnicodeEncodeError:
        return Lost(document.name, "has half of a surrogate pair, which is no Unicode text")
    return document


# the hub


class Hub:
    """The training part of a data set of the hub, streamed."""

    def __init__(
        self, name: str, revision: str | None, convert: Callable[[str, Table], Row], columns: Sequence[str]
    ) -> None:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ImportError(f"source {name!r} needs datasets: pip install 'muonssm[language]' ({error})") from error
        path, _, config = name.partition(":")
        try:
            self.stream = load_dataset(path, config or None, revision=revision, split="train", streaming=True)
        except Exception as error:  # the library lets through whatever its own libraries raise
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"source is {name!r}, which is no file here, and as a data set of the hub cannot be opened: {reason}"
            ) from error
        there = list(self.stream.features or columns)
        if set(columns) - set(there):
            raise ValueError(_no_column(f"source {name!r}", columns, there))
        self.convert = convert
        self.lost: list[Lost] = []
        self.total: int | None = None
        self.metadata: dict[str, Any] = {"revision": revision, "files": self.stream.num_shards, "fields": there}
        self._start, self._number = self.stream.state_dict(), 0

    def rows(self, place: Place = None) -> Iterator[Row]:
        self.stream.load_state_dict((place or {"stream": self._start})["stream"])
        self._number = (place or {"number": 0})["number"]
        for row in self.stream:
            self._number += 1
            yield self.convert(f"row {self._number - 1}", row)

    def place(self) -> Place:
        return {"number": self._number, "stream": self.stream.state_dict()}
