"""Data of the paper's zero-shot tasks in local files, for lm-eval's own tasks: their prompts and metrics stay.

    with local_tasks(Path("data"), ["piqa", "boolq"], original_yaml) as tasks:
        tasks.files["piqa"]          # the YAML of lm-eval's task, with its data replaced
        tasks.settings               # names and digests of the files

A folder has one file per task, whose name begins with the task's: `piqa.jsonl`, `arc_easy_test.jsonl.xz`. Each line is
a row as the hub's data set has it. WikiText can be plain text, which is cut into documents at its top-level headings.
Rows are checked one by one, and lm-eval reads only what this module writes into a temporary folder.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from muonssm.lab.core.files import checksum
from muonssm.lab.core.untrusted import UntrustedFileError

from .compressed_files import COMPRESSED, inner_suffix, open_decompressed, read_decompressed

MAX_BYTES = 1 << 30  # of a file, before and after decompression
MAX_ROW_BYTES = 16 << 20
HERE = "muonssm.lab.language.zero_shot_data"
ROWS, TEXT = (".jsonl", ".json"), ".txt"
SPLIT_WORDS = {"validation": "validation", "valid": "validation", "dev": "validation", "val": "validation"}
SPLIT_WORDS |= {"test": "test"}
Row = dict[str, Any]


# ---- columns


class Column(NamedTuple):
    """What a value must be, in words, and a function that returns it as lm-eval's task expects it; None if wrong."""

    wanted: str
    convert: Callable[[Any], Any]


def _any_text(value: Any) -> str | None:
    """Text that is valid Unicode: JSON can have half of a surrogate pair."""
    if not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def _text(value: Any) -> str | None:
    return value if _any_text(value) is not None and value.strip() else None


def _label(*values: int, as_text: bool) -> Column:
    """One of some small integers, also as text."""

    def convert(value: Any) -> str | int | None:
        found = next((v for v in values if value == str(v) or (value == v and type(value) is int)), None)
        return None if found is None else str(found) if as_text else found

    return Column("one of " + ", ".join(map(str, values)), convert)


def _endings(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and len(value) == 4 and all(map(_text, value)) else None


def _choices(value: Any) -> Row | None:
    if not isinstance(value, dict):
        return None
    texts, labels = value.get("text"), value.get("label")
    if not (isinstance(texts, list) and isinstance(labels, list) and len(texts) == len(labels) > 1):
        return None
    is_text = all(map(_text, [*texts, *labels])) and len(set(labels)) == len(labels)
    return {"text": texts, "label": labels} if is_text else None


def _two_words(value: Any) -> str | None:
    """Text whose last word, after the last space, is to be predicted from those before it."""
    before, _, last = value.rpartition(" ") if _any_text(value) is not None else ("", "", "")
    return value if before.strip() and last.strip() else None


PLAIN = Column("text", _text)
ANY_TEXT = Column("text, or empty", _any_text)
WORDS = Column("text of two words or more", _two_words)
BLANK = Column("text with a blank, _", lambda value: value if _text(value) and "_" in value else None)


# ---- tasks


class LocalTask(NamedTuple):
    """A task of the paper's table: how the names of its files begin, its columns, and the split that lm-eval scores."""

    prefixes: tuple[str, ...]
    columns: Mapping[str, Column]
    split: str = "validation"


_CHOICES = Column("two or more texts with as many different labels", _choices)
_QUESTION = {"question": PLAIN, "choices": _CHOICES, "answerKey": PLAIN}
TASKS: dict[str, LocalTask] = {
    "wikitext": LocalTask(("wikitext",), {"page": PLAIN}, "test"),
    "lambada_openai": LocalTask(("lambada",), {"text": WORDS}, "test"),
    "piqa": LocalTask(("piqa",), {"goal": PLAIN, "sol1": PLAIN, "sol2": PLAIN, "label": _label(0, 1, as_text=False)}),
    "hellaswag": LocalTask(
        ("hellaswag",),
        {
            "activity_label": PLAIN,
            "ctx_a": ANY_TEXT,
            "ctx_b": ANY_TEXT,
            "endings": Column("a list of four texts", _endings),
            "label": _label(0, 1, 2, 3, as_text=True),
        },
    ),
    "winogrande": LocalTask(
        ("winogrande",), {"sentence": BLANK, "option1": PLAIN, "option2": PLAIN, "answer": _label(1, 2, as_text=True)}
    ),
    "arc_easy": LocalTask(("arc_easy",), _QUESTION, "test"),
    "arc_challenge": LocalTask(("arc_challenge",), _QUESTION, "test"),
    "social_iqa": LocalTask(
        ("social_iqa", "social_i_qa", "siqa"),
        {
            "context": PLAIN,
            "question": PLAIN,
            "answerA": PLAIN,
            "answerB": PLAIN,
            "answerC": PLAIN,
            "label": _label(1, 2, 3, as_text=True),
        },
    ),
    "boolq": LocalTask(("boolq",), {"question": PLAIN, "passage": PLAIN, "label": _label(0, 1, as_text=False)}),
}


class LocalTasks(NamedTuple):
    """YAML files by task, and what the scores depend on: by task the file, its SHA-256 and its split."""

    files: dict[str, Path]
    settings: dict[str, dict[str, str]]


@contextmanager
def local_tasks(folder: str | Path, names: Sequence[str], original_yaml: Callable[[str], Path]) -> Iterator[LocalTasks]:
    """Write lm-eval's tasks on the rows of a folder into a temporary folder, which is removed afterwards.

    Args:
        folder: one file per task.
        names: of tasks in `TASKS`.
        original_yaml: where lm-eval has the YAML file of a task.
    """
    files = find_files(Path(folder), names)
    settings = {name: _describe(name, path) for name, path in files.items()}
    with tempfile.TemporaryDirectory(prefix="muonssm-zero-shot-") as temporary:
        written = {}
        for name in dict.fromkeys(names):
            rows = list(read_rows(name, files[name]))
            if not rows:
                raise UntrustedFileError(files[name], f"must have rows of {name}, got none")
            split = settings[name]["split"]
            written[name] = _write_task(Path(temporary), name, split, rows, original_yaml(name))
        yield LocalTasks(written, settings)


def _describe(name: str, path: Path) -> dict[str, str]:
    words = inner_stem(path).lower().replace("-", "_").replace(".", "_").split("_")
    split = next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), TASKS[name].split)
    return {"file": path.name, "sha256": checksum(path), "split": split}


def inner_stem(path: Path) -> str:
    """The name without its suffixes: `piqa_test` for `piqa_test.jsonl.xz`."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSED else path.stem


def _write_task(folder: Path, name: str, split: str, rows: Sequence[Row], original: Path) -> Path:
    """Write the rows, and a YAML that includes lm-eval's and replaces its data."""
    import yaml

    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    own: dict[str, Any] = {"include": str(original), "task": name, "dataset_path": "json", "dataset_name": None}
    own["dataset_kwargs"] = {"data_files": {split: str(data)}, "cache_dir": str(folder / "cache")}
    own |= {"training_split": None, "validation_split": None, "test_split": None, f"{split}_split": split}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(own), encoding="utf-8")
    return path


# ---- files


def file_names(name: str) -> str:
    """What the file of a task can be called."""
    endings = ROWS[0] if name != "wikitext" else f"{ROWS[0]} or {TEXT}"
    return " or ".join(f"{prefix}*{endings}" for prefix in TASKS[name].prefixes)


def find_files(folder: Path, names: Sequence[str]) -> dict[str, Path]:
    """The file of each task that the folder has one for; raise if one of `names` has none, or a task has two."""
    if not folder.is_dir():
        raise ValueError(f"--data must be a folder with a file per task, got {str(folder)!r}, which is no folder")
    for name in names:
        if name not in TASKS:
            raise ValueError(f"--tasks must be paper or some of {', '.join(TASKS)} with --data, got {name!r}")
    found: dict[str, Path] = {}
    for name in TASKS:
        paths = [path for path in sorted(folder.iterdir()) if _is_of(name, path)]
        if len(paths) > 1:
            both = " and ".join(path.name for path in paths[:2])
            raise ValueError(f"--data must have one file for {name}, got {str(folder)!r} with {both}")
        if paths:
            found[name] = paths[0]
    missing = [f"{name} ({file_names(name)}, also .gz or .xz)" for name in dict.fromkeys(names) if name not in found]
    if missing:
        raise ValueError(f"--data must have a file for every task, got {str(folder)!r} without {', '.join(missing)}")
    return found


def _is_of(name: str, path: Path) -> bool:
    suffixes = (*ROWS, TEXT) if name == "wikitext" else ROWS
    stem = path.name.lower().replace("-", "_")
    return stem.startswith(TASKS[name].prefixes) and inner_suffix(path) in suffixes


# ---- rows


def read_rows(name: str, path: Path) -> Iterator[Row]:
    """Yield the checked rows of a task's file, with the columns of lm-eval's data; an error names line and column."""
    if inner_suffix(path) == TEXT:
        yield from ({"page": page} for page in split_pages(_read_text(path)))
        return
    for number, line in _lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise UntrustedFileError(path, f"must have a JSON object per line, got none in line {number}")
        yield _check_row(name, path, number, row)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers."""
    with open_decompressed(path, MAX_BYTES, f"{HERE}.MAX_BYTES") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b""), start=1):
            if len(line) > MAX_ROW_BYTES:
                wanted = f"lines of {MAX_ROW_BYTES} bytes or less ({HERE}.MAX_ROW_BYTES)"
                raise UntrustedFileError(path, f"must have {wanted}, got more in line {number}")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise UntrustedFileError(path, f"must be UTF-8 text, got other bytes in line {number}") from error
            if text.strip():
                yield number, text


def _read_text(path: Path) -> str:
    try:
        text = read_decompressed(path, MAX_BYTES, f"{HERE}.MAX_BYTES").decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UntrustedFileError(path, f"must be UTF-8 text, got byte {error.start} that is not") from error
    return text.replace("\r\n", "\n")


def _check_row(name: str, path: Path, number: int, row: Row) -> Row:
    """The row with the columns of lm-eval's data alone."""
    if name == "boolq" and "label" not in row and isinstance(row.get("answer"), bool):
        row = {**row, "label": int(row["answer"])}  # BoolQ as its authors publish it
    checked = {}
    for key, column in TASKS[name].columns.items():
        if key not in row:
            raise UntrustedFileError(path, f"must have the column {key!r} in line {number}, got {', '.join(row)}")
        checked[key] = column.convert(row[key])
        if checked[key] is None:
            got = f"{row[key]!r:.100} in line {number}"
            raise UntrustedFileError(path, f"must have {column.wanted} in column {key!r}, got {got}")
    if "answerKey" in checked and checked["answerKey"] not in checked["choices"]["label"]:
        got = f"{checked['answerKey']!r:.100} in line {number}"
        raise UntrustedFileError(path, f"must have a label of choices in column 'answerKey', got {got}")
    return checked


def split_pages(text: str) -> Iterator[str]:
    """Cut WikiText into its documents, which begin with top-level headings, " = Title = "."""
    page: list[str] = []
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            if "".join(page).strip():
                yield "\n".join(page)
            page = []
        page.append(line)
    if "".join(page).strip():
        yield "\n".join(page)
