"""Sources of documents: Python's standard library, local files, data sets on the hub.

    source = open_source("stdlib")
    for item in source.items():             # a Document, or an Unusable with the reason
        ...

A source yields the same items in the same order each time. `position()` is JSON that says where the source stands;
`items(position)` continues from there without reading earlier files.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from muonssm.checks import is_int
from muonssm.lab.core.untrusted import UntrustedFileError, check_regular_file, open_file

from .compressed_files import COMPRESSED, inner_suffix, open_decompressed, read_decompressed
from .instructions import FIELDS, prompt
from .manifest import KINDS as KINDS
from .source_files import FolderFiles

ALIASES = {"fineweb-edu": "HuggingFaceFW/fineweb-edu:sample-10BT", "alpaca": "tatsu-lab/alpaca"}
TEXT_SUFFIXES, TABLE_SUFFIXES = (".txt", ".md", ".py"), (".jsonl", ".parquet", ".json")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
WIKIPEDIA = "enwik8-text"  # the articles of enwik8 without their markup
SOURCES = (
    "'stdlib', 'enwik8-text', 'fineweb-edu', 'alpaca', a file, a folder, or a data set on the hub (owner/name or "
    "owner/name:config)"
)
# Not part of Python's standard library: installed packages, tests, and files that describe the build machine.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
BUILD_PREFIXES = ("config-", "_sysconfigdata", "_sysconfig_vars")
EMPTY = "empty"
MAX_FILE_BYTES = 4 << 30  # of a text or .json file, which is read as a whole, and of what a file decompresses to
MAX_ROW_BYTES = 64 << 20  # of a line of a .jsonl file
HERE = "muonssm.lab.language.corpora"

Position = Any  # JSON: where a source stands


class Document(NamedTuple):
    """A text; or a response with the prompt before it."""

    name: str
    text: str
    prompt: str | None = None


class Unusable(NamedTuple):
    """A file or row that cannot be used, and the reason."""

    name: str
    reason: str


Item = Document | Unusable
TableRow = Mapping[str, Any]  # a value per column
ToItem = Callable[[str, TableRow], Item]


class Source(Protocol):
    """A source of documents.

    Attributes:
        metadata: a description as JSON; it changes when the source changes.
        left_out: files that are not read at all.
        total: the number of items, where it is known.
    """

    metadata: dict[str, Any]
    left_out: list[Unusable]
    total: int | None

    def items(self, position: Position = None) -> Iterator[Item]:
        """Yield all items, or those from `position` on."""

    def position(self) -> Position:
        """The position after the last item that was yielded."""

    def has_position(self, position: Position) -> bool:
        """Whether `items` can begin there."""


def open_source(
    name: str,
    kind: str = "text",
    field: str = "text",
    cut: int | None = None,
    revision: str | None = None,
    follow_links: bool = False,
    file: str | None = None,
    other_file: bool = False,
) -> Source:
    """Open a source by name; see `PrepareConfig` for the arguments."""
    if name == "stdlib":
        return open_stdlib(cut)
    if name == WIKIPEDIA:
        from .wikipedia import open_wikipedia

        return open_wikipedia(file, other_file)
    if name not in ALIASES and Path(name).exists():
        return open_local(Path(name), kind, field, cut, follow_links)
    hub_name = ALIASES.get(name, name)
    if not HUB_NAME.fullmatch(hub_name):
        raise ValueError(f"source must be {SOURCES}, got {name!r}, which does not exist")
    columns = (field,) if kind == "text" else (FIELDS[0], FIELDS[2])
    return HubSource(hub_name, revision, row_converter(kind, field), columns)


# ---- files


class FileSource:
    """Files in a fixed order.

    Args:
        read: yields the items of one file.
        one_per_file: whether every file is one item, so that the total is known.
    """

    def __init__(
        self, root: Path, files: Sequence[Path], read: Callable[[Path], Iterator[Item]], one_per_file: bool
    ) -> None:
        self.root, self.files, self.read = root, files, read
        self.left_out: list[Unusable] = []
        self.total = len(files) if one_per_file else None
        sizes = [(path.relative_to(root).as_posix(), path.stat().st_size) for path in files]
        listing = hashlib.sha256("\n".join(f"{name} {size}" for name, size in sizes).encode(errors="surrogateescape"))
        self.metadata: dict[str, Any] = {
            "files": len(files),
            "bytes": sum(size for _, size in sizes),
            "listing": listing.hexdigest(),
        }
        self._position = [0, 0]  # number of the file, items read from it

    def items(self, position: Position = None) -> Iterator[Item]:
        first, already_read = position or (0, 0)
        for number in range(first, len(self.files)):
            start = already_read if number == first else 0
            for count, item in enumerate(islice(self.read(self.files[number]), start, None), start + 1):
                self._position = [number, count]
                yield item
        self._position = [len(self.files), 0]

    def position(self) -> Position:
        return list(self._position)

    def has_position(self, position: Position) -> bool:
        if position is None:
            return True
        is_pair = isinstance(position, list) and len(position) == 2 and all(is_int(value, 0) for value in position)
        return is_pair and position[0] <= len(self.files)


def open_stdlib(cut: int | None = None) -> FileSource:
    """Open Python's standard library, a document per file. The text differs between Python versions."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in EXCLUDED_FOLDERS and not n.startswith(BUILD_PREFIXES)]
        files += [Path(folder, n) for n in names if n.endswith(".py") and not n.startswith(BUILD_PREFIXES)]
    if not files:
        raise ValueError(f"source must have files, got 'stdlib', and this Python has no .py files in {root}")
    source = FileSource(root, _sorted(root, files), lambda path: read_text(root, path, cut), one_per_file=cut is None)
    source.metadata["python"] = platform.python_version()
    return source


def open_local(path: Path, kind: str, field: str, cut: int | None, follow_links: bool = False) -> FileSource:
    """Open a file, or all files of a folder that have a known suffix; links lead out of it only with `follow_links`."""
    root = path if path.is_dir() else path.parent
    # Many .json files are settings, so a folder's .json files are read for instructions only.
    suffixes = (
        TABLE_SUFFIXES if kind == "instructions" else (*TEXT_SUFFIXES, *TABLE_SUFFIXES[: 2 if path.is_dir() else 3])
    )

    def unusable_name(file: Path) -> str | None:
        return None if _suffix(file) in suffixes else f"not a {', '.join(suffixes)} file"

    if path.is_dir():
        found = FolderFiles(root, unusable_name, follow_links)
        files = found.files
        left_out = [Unusable(file.relative_to(root).as_posix(), reason) for file, reason in found.left_out]
    else:
        check_regular_file(path)
        files, left_out = [path] if unusable_name(path) is None else [], []
    if not files:
        wanted = ", ".join(suffixes)
        raise ValueError(f"source must have a {wanted} file for kind {kind!r}, got {str(path)!r}, which has none")
    convert, columns = row_converter(kind, field), (field,) if kind == "text" else FIELDS

    def read(file: Path) -> Iterator[Item]:
        if _suffix(file) in TEXT_SUFFIXES:
            return read_text(root, file, cut)
        return read_table(root, file, convert, columns)

    only_text = all(_suffix(file) in TEXT_SUFFIXES for file in files)
    source = FileSource(root, files, read, one_per_file=cut is None and only_text)
    source.left_out = left_out
    return source


def _suffix(path: Path) -> str:
    """The suffix of a file, without that of gzip or xz; a Parquet file must not be compressed."""
    return path.suffix.lower() if inner_suffix(path) == ".parquet" else inner_suffix(path)


def _sorted(root: Path, files: Sequence[Path]) -> list[Path]:
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_text(root: Path, path: Path, cut: int | None) -> Iterator[Item]:
    """Read a text file as one document, or as several of at most `cut` characters."""
    name = path.relative_to(root).as_posix()
    try:
        content = read_decompressed(path, MAX_FILE_BYTES, f"{HERE}.MAX_FILE_BYTES")
        text = _decode(content, is_python=_suffix(path) == ".py")
    except UntrustedFileError as error:
        yield Unusable(name, error.reason)
        return
    except (ValueError, SyntaxError, LookupError):
        yield Unusable(name, "wrong encoding (not UTF-8, or not what the Python file declares)")
        return
    except OSError as error:
        yield Unusable(name, f"cannot be read: {error.strerror or error}")
        return
    for number, piece in enumerate(cut_text(text, cut)):
        yield check_document(Document(name if number == 0 else f"{name}#{number}", piece))


def _decode(content: bytes, is_python: bool) -> str:
    """The text of a file, with lines that end in "\\n"; a Python file can declare its encoding."""
    encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0] if is_python else "utf-8-sig"
    return io.TextIOWrapper(io.BytesIO(content), encoding).read()


def cut_text(text: str, cut: int | None) -> Iterator[str]:
    """Cut a text into pieces of at most `cut` characters, at the ends of lines where possible."""
    start = 0
    while cut is not None and len(text) - start > cut:
        stop = text.rfind("\n", start, start + cut) + 1 or start + cut
        yield text[start:stop]
        start = stop
    if start == 0 or start < len(text):
        yield text[start:]


def read_table(root: Path, path: Path, convert: ToItem, columns: Sequence[str]) -> Iterator[Item]:
    """Read the rows of a .jsonl, .json or .parquet file."""
    name = path.relative_to(root).as_posix()
    read = {".jsonl": _read_jsonl, ".json": _read_json}.get(_suffix(path))
    try:
        for number, row in read(path) if read else _read_parquet(path, columns):
            row_name = f"{name}:{number}"
            yield convert(row_name, row) if isinstance(row, Mapping) else Unusable(row_name, str(row))
    except UntrustedFileError as error:
        yield Unusable(name, error.reason)
    except OSError as error:
        yield Unusable(name, f"cannot be read: {error.strerror or error}")


def _read_jsonl(path: Path) -> Iterator[tuple[int, TableRow | str]]:
    """Yield line numbers with objects, or with the reason why there is none."""
    limit = MAX_FILE_BYTES if path.suffix.lower() in COMPRESSED else sys.maxsize
    with open_decompressed(path, limit, f"{HERE}.MAX_FILE_BYTES") as file:
        for number, line in enumerate(iter(lambda: _read_row(file), b""), start=1):
            if line is None:
                yield number, f"a line of more than {MAX_ROW_BYTES} bytes ({HERE}.MAX_ROW_BYTES)"
            elif line.strip():
                try:
                    row = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError):
                    row = None
                yield number, row if isinstance(row, dict) else "not a JSON object"


def _read_row(file: BinaryIO) -> bytes | None:
    """The next line; empty at the end of the file, None for one that is too long, which is skipped."""
    line = file.readline(MAX_ROW_BYTES + 1)
    if len(line) <= MAX_ROW_BYTES:
        return line
    while line and not line.endswith(b"\n"):
        line = file.readline(1 << 20)
    return None


def _read_json(path: Path) -> Iterator[tuple[int, TableRow | str]]:
    """Yield the objects of a list."""
    text = read_decompressed(path, MAX_FILE_BYTES, f"{HERE}.MAX_FILE_BYTES")
    try:
        content = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, list):
        yield 0, "not a JSON list of objects"
        return
    for number, row in enumerate(content):
        yield number, row if isinstance(row, dict) else "not a JSON object"


def _read_parquet(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, TableRow | str]]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number, available = 0, list(columns)
    try:
        with open_file(path, max_bytes=sys.maxsize) as content, ParquetFile(content) as file:
            available = file.schema_arrow.names
            wanted = [column for column in columns if column in available]
            for batch in file.iter_batches(batch_size=1024, columns=wanted) if _has(available, columns) else ():
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except UntrustedFileError:
        raise
    except (ArrowException, ValueError, OverflowError):  # ValueError also for text that is not UTF-8
        yield number, "not a complete Parquet file; the rest of it is not read"
    if not _has(available, columns):
        raise ValueError(_missing_column(str(path), columns, available))


def _has(available: Sequence[str], columns: Sequence[str]) -> bool:
    """Whether a table has the columns; `input` can be missing."""
    return not set(columns) - set(available) - {"input"}


def _missing_column(name: str, columns: Sequence[str], available: Sequence[str]) -> str:
    missing = next(column for column in columns if column not in available)
    is_instructions = missing not in FIELDS and {"instruction", "output"} <= set(available)
    hint = "; set kind to 'instructions' for these" if is_instructions else ""
    return f"field must be one of {', '.join(available) or 'none'} in {name}, got {missing!r}{hint}"


# ---- rows of a table


def row_converter(kind: str, field: str) -> ToItem:
    """The function that makes a document of a table row."""

    def from_text(name: str, row: TableRow) -> Item:
        value = row.get(field)
        if isinstance(value, str):
            return check_document(Document(name, value))
        hint = " (set kind to 'instructions')" if {"instruction", "output"} <= set(row) else ""
        return Unusable(name, EMPTY if value is None and field in row else f"no text in field {field!r}{hint}")

    def from_instruction(name: str, row: TableRow) -> Item:
        values = {key: row.get(key) for key in FIELDS}
        if values["input"] is None:
            values["input"] = ""
        wrong = next((key for key, value in values.items() if not isinstance(value, str)), None)
        if wrong is not None:
            return Unusable(name, f"no text in field {wrong!r}")
        instruction, context, output = map(str, values.values())
        if not instruction.strip():
            return Unusable(name, EMPTY)
        return check_document(Document(name, output, prompt(instruction, context)))

    return from_instruction if kind == "instructions" else from_text


def check_document(document: Document) -> Item:
    """The document, or why it is unusable: blank (responses can be), or not valid Unicode."""
    if document.prompt is None and not document.text.strip():
        return Unusable(document.name, EMPTY)
    try:
        document.text.encode()
        (document.prompt or "").encode()
    except UnicodeEncodeError:
        return Unusable(document.name, "not valid Unicode (half of a surrogate pair)")
    return document


# ---- the hub


class HubSource:
    """The training split of a data set on the hub, streamed."""

    def __init__(self, name: str, revision: str | None, convert: ToItem, columns: Sequence[str]) -> None:
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise ImportError(f"source {name!r} needs datasets: pip install 'muonssm[language]' ({error})") from error
        path, _, config = name.partition(":")
        try:
            self.stream = load_dataset(path, config or None, revision=revision, split="train", streaming=True)
        except Exception as error:  # datasets passes on errors of many libraries
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(
                f"source must be {SOURCES}, got {name!r}, which is not a local file and cannot be opened on the hub: "
                f"{reason}"
            ) from error
        available = list(self.stream.features or columns)
        if set(columns) - set(available):
            raise ValueError(_missing_column(f"source {name!r}", columns, available))
        self.convert = convert
        self.left_out: list[Unusable] = []
        self.total: int | None = None
        self.metadata: dict[str, Any] = {"revision": revision, "files": self.stream.num_shards, "fields": available}
        self._start, self._number = self.stream.state_dict(), 0

    def items(self, position: Position = None) -> Iterator[Item]:
        self.stream.load_state_dict((position or {"stream": self._start})["stream"])
        self._number = (position or {"number": 0})["number"]
        for row in self.stream:
            self._number += 1
            yield self.convert(f"row {self._number - 1}", row)

    def position(self) -> Position:
        return {"number": self._number, "stream": self.stream.state_dict()}

    def has_position(self, position: Position) -> bool:
        if position is None:
            return True
        is_whole = isinstance(position, dict) and is_int(position.get("number"), 0)
        return is_whole and isinstance(position.get("stream"), dict) and set(position["stream"]) == set(self._start)
