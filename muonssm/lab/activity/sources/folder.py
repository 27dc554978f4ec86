"""`folder`: your own recordings, one CSV file each, in a folder with an `index.csv`.

    path,label,subject              `split` (train, validation, test) can replace `subject` or stand beside it
    a/walk-1.csv,walking,ann

Paths are relative to the folder. An empty split leaves a recording out. `csv_files.read_csv` describes the format of a
recording.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..csv_files import read_cells, read_csv
from ..recordings import Channels, DamagedFileError, LostFile, Recording, Signal
from .source import Listing, Source

INDEX = "index.csv"
COLUMNS = "path, label, subject, split"
SPLIT_NAMES = {"train": "train", "validation": "validation", "val": "validation", "test": "test", "": None}
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # a terminal obeys them
IndexRow = dict[str, str]


def read_index(root: Path) -> list[IndexRow]:
    """Read the rows of `index.csv`. A mistake in the index is an error, not a damaged file."""
    path = root / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"root must be a folder with {INDEX} (columns {COLUMNS}), got {str(root)!r}")
    try:
        header, cells = read_cells(path)
    except DamagedFileError as error:
        raise ValueError(f"{path} {error}") from error
    columns = [name.lower() for name in header or ()]
    if not {"path", "label"} <= set(columns):
        raise ValueError(f"{path} must have the columns {COLUMNS}, got {', '.join(columns) or 'no header'}")
    repeated = [name for name in columns if columns.count(name) > 1]
    if repeated:
        raise ValueError(f"{path} must have every column once, got {repeated[0]!r} {columns.count(repeated[0])} times")
    rows = [dict(zip(columns, (str(cell).strip() for cell in row), strict=True)) for row in cells]
    _check_rows(path, root, rows)
    return rows


def _check_rows(path: Path, root: Path, rows: Sequence[IndexRow]) -> None:
    """Refuse repeated recordings, which could be in two splits at once, and unknown splits."""
    row_of: dict[str, int] = {}
    for number, row in enumerate(rows, start=2):
        file = os.path.realpath(root / row["path"])  # `Path.resolve` fails on a loop of links
        if file in row_of:
            raise ValueError(f"path must be unique in {path}, got {row['path']!r} in rows {row_of[file]} and {number}")
        row_of[file] = number
        for column in ("label", "subject"):
            if CONTROL.search(row.get(column, "")):
                raise ValueError(
                    f"{column} must have no control characters in {path}, got {row[column]!r:.100} in row {number}"
                )
        if row.get("split", "").lower() not in SPLIT_NAMES:
            raise ValueError(
                f"split must be train, validation, test or empty in {path}, got {row['split']!r} in row {number}"
            )


def _sort_labels(labels: set[str]) -> tuple[str, ...]:
    """Sort labels: numbers by value, then words."""
    return tuple(sorted(labels, key=lambda label: (not label.isdecimal(), label.zfill(20), label)))


def find_recordings(root: Path, channels: Channels | None) -> Listing:
    """List the recordings of `index.csv`, sorted by path."""
    rows = sorted(read_index(root), key=lambda row: row["path"])
    lost: list[LostFile] = [(row["path"], f"has no label in {INDEX}") for row in rows if not row["label"]]
    rows = [row for row in rows if row["label"]]
    classes = _sort_labels({row["label"] for row in rows})
    recordings = [Recording(row["path"], classes.index(row["label"]), row.get("subject") or None) for row in rows]
    splits = [SPLIT_NAMES[row["split"].lower()] for row in rows if "split" in row]

    def read(recording: Recording) -> Signal:
        return read_csv(root / recording.name, channels)

    return Listing(recordings, classes, read, lost, {"given": splits} if splits else {})


SOURCE = Source(("given", "subject", "kfold"), find_recordings, read_csv)
