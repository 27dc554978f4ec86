"""Read recordings from CSV files: cells, numbers, time stamps. Everything wrong with a file is a `DamagedFileError`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from muonssm.lab.core.untrusted import UntrustedFileError, read_lines

from .recordings import Channels, DamagedFileError, Signal, first_infinite, to_float32

BEYOND_FLOAT32 = " (float32 ends at 3.4e38)"
SECONDS_PER_UNIT = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
TIME_COLUMN = re.compile(r"(?:t|ts|time|timestamp|datetime)(?:[ _]?[(\[]?(s|ms|us|ns)[)\]]?)?", re.IGNORECASE)
COMPACT_DATE = re.compile(r"(\d{4})(\d{2})(\d{2})_")  # 20180423_15:09:13.120
DATE = re.compile(r"\d{4}-.*")  # numpy would also read words, such as "now"
TIME_ZONE = re.compile(r"(?<=:\d\d)(\.\d+)?(?:Z|[+-]\d\d:?\d\d)$")


def read_csv(path: Path, channels: Channels | None = None) -> Signal:
    """Read any CSV file of samples.

    With a header: the column `time` (or `t`, `ts`, `timestamp`, `datetime`) holds dates, or times in seconds unless the
    name ends with a unit (`time_ms`, `time_us`, `time_ns`). All other columns are channels, or those in `channels`.

    Without a header: the columns are `channels` in this order, after a time column if there is one column more. If
    `channels` is None, every column is a channel, named `x0`, `x1` and so on.
    """
    header, cells = read_cells(path)
    names = header or _names_without_header(cells.shape[1], channels)
    time_columns = [i for i, name in enumerate(names) if TIME_COLUMN.fullmatch(name) and name not in (channels or ())]
    selected = channels or tuple(name for i, name in enumerate(names) if i not in time_columns)
    _check_names(names, selected, time_columns if channels is None else time_columns[:1])
    times = None
    if time_columns:
        unit = TIME_COLUMN.fullmatch(names[time_columns[0]])[1]  # type: ignore[index]
        times = parse_times(cells[:, time_columns[0]], unit and unit.lower())
    samples = parse_numbers(cells[:, [names.index(name) for name in selected]], selected)
    return Signal.sorted_by_time(samples, times, selected)


def read_cells(path: Path) -> tuple[Channels | None, np.ndarray]:
    """Read the header of a CSV file, and its cells `[rows, columns]` as text.

    Comma, semicolon and tab separate cells. The first row is a header if none of its cells is a number; None if the
    file has no header. A cell has no line break, not even in quotes: one that is not closed would hide rows.
    """
    try:
        lines = [line + "\n" for line in read_lines(path) if line.strip()]
    except UntrustedFileError as error:
        raise DamagedFileError(error.reason) from error
    if not lines:
        raise DamagedFileError("is empty")
    delimiter = max(",;\t", key=lines[0].count)
    try:
        # Of objects: in an array of strings, one long cell would make all others as long.
        cells = np.loadtxt(lines, dtype=object, delimiter=delimiter, comments=None, quotechar='"', ndmin=2)
    except ValueError as error:
        raise DamagedFileError(f"must be a table: {str(error).split(';')[0]}") from error
    broken = next((row for row, of_row in enumerate(cells, start=1) if any("\n" in cell for cell in of_row)), None)
    if broken is not None:
        raise DamagedFileError(f"must have no line break in a quoted cell, got one in row {broken}")
    if any(_is_number(cell) for cell in cells[0]):
        return None, cells
    if len(cells) == 1:
        raise DamagedFileError("has a header but no rows")
    return tuple(str(cell).strip() for cell in cells[0]), cells[1:]


def read_columns(path: Path, names: Channels) -> np.ndarray:
    """Read the cells of a file that has exactly these columns, with or without a header."""
    cells = read_cells(path)[1]
    if cells.shape[1] != len(names):
        raise DamagedFileError(f"must have {len(names)} columns ({', '.join(names)}), got {cells.shape[1]}")
    return cells


def read_words(path: Path, names: Channels) -> np.ndarray:
    """Read the words of a text file with exactly these columns, which spaces separate, and no header."""
    try:
        rows = [line.split() for line in read_lines(path) if line.strip()]
    except UntrustedFileError as error:
        raise DamagedFileError(error.reason) from error
    if not rows:
        raise DamagedFileError("is empty")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(names):
            raise DamagedFileError(
                f"must have {len(names)} columns ({', '.join(names)}), got {len(row)} in row {number}"
            )
    return np.array(rows, dtype=object)


def parse_numbers(cells: np.ndarray, names: Channels) -> np.ndarray:
    """Convert cells `[rows, columns]` to float64; an error names the first cell that is not finite as float32."""
    try:
        if any("_" in cell for cell in cells.flat):  # Python reads "1_5" as 15
            raise ValueError
        values = cells.astype(np.float64)
    except ValueError:
        row, column = next(index for index in np.ndindex(*cells.shape) if not _is_number(str(cells[index])))
        raise _not_finite(names[column], row, f"{str(cells[row, column])!r:.100}") from None
    place = first_infinite(to_float32(values))
    if place is not None:
        row, column = place
        value = values[row, column]
        raise _not_finite(names[column], row, f"{value}{BEYOND_FLOAT32 if np.isfinite(value) else ''}")
    return values


def _not_finite(name: str, row: int, value: object) -> DamagedFileError:
    return DamagedFileError(f"must have finite numbers in column {name!r:.100}, got {value} in row {row + 1}")


def parse_times(cells: np.ndarray, unit: str | None = None) -> np.ndarray:
    """Convert a column of text to seconds. Cells are numbers in `unit`, or dates.

    Dates are `20180423_15:09:13.120` or ISO 8601, with or without a fraction. The time zone is ignored because only
    differences matter.
    """
    if _is_number(cells[0]):
        return parse_numbers(cells[:, None], ("time",))[:, 0] * SECONDS_PER_UNIT[unit]
    dates = [TIME_ZONE.sub(r"\1", COMPACT_DATE.sub(r"\1-\2-\3T", str(cell).strip())) for cell in cells]
    words = [date for date in dates if date and not DATE.fullmatch(date)]
    if words:
        raise DamagedFileError(f"must have numbers or dates as time stamps, got {words[0]!r}")
    try:
        stamps = np.array(dates, dtype="datetime64[us]")
    except (ValueError, OverflowError) as error:
        raise DamagedFileError(f"must have numbers or dates as time stamps: {error}") from error
    if np.isnat(stamps).any():
        raise DamagedFileError(f"has no time stamp in row {int(np.isnat(stamps).argmax()) + 1}")
    return stamps.astype(np.int64) * 1e-6


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python reads "1_5" as 15


def _names_without_header(columns: int, channels: Channels | None) -> Channels:
    if channels is None:
        return tuple(f"x{i}" for i in range(columns))
    if columns not in (len(channels), len(channels) + 1):
        raise DamagedFileError(
            f"must have {len(channels)} columns ({', '.join(channels)}), or one more with the time first, since it has "
            f"no header; got {columns}"
        )
    return channels if columns == len(channels) else ("time", *channels)


def _check_names(names: Channels, selected: Channels, time_columns: list[int]) -> None:
    missing = [name for name in selected if name not in names]
    if missing:
        raise DamagedFileError(f"must have the column {missing[0]!r}, got {', '.join(names)}")
    if not selected:
        raise DamagedFileError(f"must have one or more channels, got {', '.join(names)}")
    unclear = [name for name in selected if not name or names.count(name) > 1]
    if unclear:
        raise DamagedFileError(f"must have a unique name for every column, got {unclear[0]!r}")
    if len(time_columns) > 1:
        raise DamagedFileError(f"must have one time column, got {', '.join(names[i] for i in time_columns)}")
