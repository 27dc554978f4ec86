"""`folder`: any directory with an `index.csv` and one CSV file a recording.

`index.csv` has the columns `path` (relative to the folder) and `label`, and `subject`, `split` (`train`, `validation`,
`test`; empty for a recording to leave out) or both. What a recording may look like is said by `recordings.read_csv`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..recordings import Channels, DamagedFileError, Listing, Lost, Recording, Signal, Source, read_csv, read_table

INDEX = "index.csv"
PARTS = {"train": "train", "validation": "validation", "val": "validation", "test": "test", "": None}
Row = dict[str, str]


def read_index(root: Path) -> list[Row]:
    """The rows of `index.csv`, checked: a mistake in it is an error, not a damaged file."""
    path = root / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"root is {str(root)!r}, which has no {INDEX} (columns path, label, subject, split)")
    try:
        header, cells = read_table(path)
    except DamagedFileError as error:
        raise ValueError(f"{path} {error}") from error
    columns = [name.lower() for name in header or ()]
    if not {"path", "label"} <= set(columns):
        found = ", ".join(columns) or "no header"
        raise ValueError(f"{path} has {found}; it may have the columns path, label, subject, split")
    rows = [dict(zip(columns, (str(cell).strip() for cell in row), strict=True)) for row in cells]
    _check(path, root, rows)
    return rows


def _check(path: Path, root: Path, rows: Sequence[Row]) -> None:
    """A recording listed twice could stand in two parts at once."""
    seen: dict[Path, int] = {}
    for number, row in enumerate(rows, start=2):
        file = (root / row["path"]).resolve()
        if file in seen:
            raise ValueError(f"{path} lists {row['path']!r} in rows {seen[file]} and {number}; it may be there once")
        seen[file] = number
        if row.get("split", "").lower() not in PARTS:
            raise ValueError(
                f"{path} has split {row['split']!r} in row {number}; it may be train, validation, test or empty"
            )


def _in_order(labels: set[str]) -> tuple[str, ...]:
    """Numbers by size, then words."""
    return tuple(sorted(labels, key=lambda label: (not label.isdecimal(), label.zfill(20), label)))


def find(root: Path, channels: Channels | None) -> Listing:
    """The recordings of `index.csv`, by path."""
    rows = sorted(read_index(root), key=lambda row: row["path"])
    lost: list[Lost] = [(row["path"], f"has no label in {INDEX}") for row in rows if not row["label"]]
    rows = [row for row in rows if row["label"]]
    classes = _in_order({row["label"] for row in rows})
    recordings = [Recording(row["path"], classes.index(row["label"]), row.get("subject") or None) for row in rows]
    given = [PARTS[row["split"].lower()] for row in rows if "split" in row]

    def read(recording: Recording) -> Signal:
        return read_csv(root / recording.name, channels)

    return Listing(recordings, classes, read, lost, {"given": given} if given else {})


SOURCE = Source("folder", ("given", "subject", "kfold"), find, read_csv)
