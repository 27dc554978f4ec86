"""One recording: reading a CSV file, its time stamps, and bringing it to one rate.

Shapes: T samples of C channels. `samples` is `[T, C]`, float32; `times` is `[T]`, float64, in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

Channels = tuple[str, ...]
Lost = tuple[str, str]  # a file, and why it cannot be used

UNITS = {None: 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
TIME_COLUMN = re.compile(r"(?:t|ts|time|timestamp|datetime)(?:[ _]?[(\[]?(s|ms|us|ns)[)\]]?)?", re.IGNORECASE)
MMACT_DATE = re.compile(r"(\d{4})(\d{2})(\d{2})_")
ZONE = re.compile(r"(?<=:\d\d)(\.\d+)?(?:Z|[+-]\d\d:?\d\d)$")
MOST_GROWTH = 100  # times as many samples as were taken: beyond that, the time stamps are wrong


class DamagedFileError(ValueError):
    """A file that cannot be used; the message is the reason."""


@dataclass(frozen=True)
class Recording:
    """What is known of a recording besides its samples.

    Attributes:
        name: its file, as the source names it.
        label: index into the classes.
        subject: who was recorded; None where the source does not say.
        split: `"train"`, `"validation"` or `"test"`; None for one that the chosen split leaves out.
    """

    name: str
    label: int
    subject: str | None = None
    split: str | None = None


class Signal(NamedTuple):
    """The samples of one recording, in order of time; `times` is None where none were written down."""

    samples: np.ndarray
    times: np.ndarray | None
    channels: Channels
    duplicates: int = 0  # samples left out, because there was one at that time already

    def select(self, channels: Channels | None) -> Signal:
        """The same signal with these channels, in this order."""
        if channels is None or channels == self.channels:
            return self
        missing = [name for name in channels if name not in self.channels]
        if missing:
            raise DamagedFileError(f"has no column {missing[0]!r}; it has {', '.join(self.channels)}")
        return self._replace(samples=self.samples[:, [self.channels.index(c) for c in channels]], channels=channels)


@dataclass
class Listing:
    """What a source holds: its recordings before any was read, and how one is read.

    Attributes:
        recordings: without a `split`, in an order that depends on nothing but their names.
        classes: names of the classes that `Recording.label` counts.
        read: the signal of a recording; raises `DamagedFileError` or an `OSError`.
        lost: files that are no recording, with the reason.
        published: for each split that comes with the data, the part of every recording; None for one left out.
        folds: groups of subjects for split `"subject"`, where the source fixes them.
    """

    recordings: list[Recording]
    classes: tuple[str, ...]
    read: Callable[[Recording], Signal]
    lost: list[Lost] = field(default_factory=list)
    published: dict[str, list[str | None]] = field(default_factory=dict)
    folds: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Source:
    """One place recordings come from.

    Attributes:
        name: what `ActivityConfig.source` calls it.
        splits: the splits it takes, the usual one first.
        find: its recordings, from a folder (None where the data is embedded) and the channels asked for.
        read_file: one file of its layout.
        channels: the names one may ask for; None where the files say.
        rate: samples a second, where that is published.
        embedded: whether it needs no folder.
    """

    name: str
    splits: tuple[str, ...]
    find: Callable[[Path, Channels | None], Listing]
    read_file: Callable[[Path, Channels | None], Signal]
    channels: Channels | None = None
    rate: float | None = None
    embedded: bool = False


def read_table(path: Path) -> tuple[Channels | None, np.ndarray]:
    """The header of a CSV file and its cells `[rows, columns]` as text.

    Cells are parted by comma, semicolon or tab. The first row is a header if none of its cells is a number; None if
    there is no header.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise DamagedFileError(f"is not text: its byte {error.start} is not UTF-8") from error
    if not lines:
        raise DamagedFileError("is empty")
    delimiter = max(",;\t", key=lines[0].count)
    try:
        cells = np.loadtxt(lines, dtype=str, delimiter=delimiter, comments=None, quotechar='"', ndmin=2)
    except ValueError as error:
        raise DamagedFileError(f"is no table: {str(error).split(';')[0]}") from error
    if any(_is_number(cell) for cell in cells[0]):
        return None, cells
    if len(cells) == 1:
        raise DamagedFileError("has a header and no rows")
    return tuple(str(cell).strip() for cell in cells[0]), cells[1:]


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def read_columns(path: Path, names: Channels) -> np.ndarray:
    """The cells of a file that has exactly these columns, with a header or without."""
    cells = read_table(path)[1]
    if cells.shape[1] != len(names):
        raise DamagedFileError(f"has {cells.shape[1]} columns; it may have {len(names)}: {', '.join(names)}")
    return cells


def numbers(cells: np.ndarray, names: Channels) -> np.ndarray:
    """Cells `[rows, columns]` as float64; the first that is no finite number is what is wrong with the file."""
    try:
        values = cells.astype(np.float64)
    except ValueError:
        row, column = next(index for index in np.ndindex(*cells.shape) if not _is_number(str(cells[index])))
        raise DamagedFileError(
            f"has {str(cells[row, column])!r} for a number in row {row + 1} of {names[column]!r}"
        ) from None
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise DamagedFileError(f"has {values[row, column]} in row {row + 1} of {names[column]!r}")
    return values


def seconds(cells: np.ndarray, unit: str | None = None) -> np.ndarray:
    """Times in seconds from a column of text: numbers in `unit`, or dates.

    Dates are `20180423_15:09:13.120` or ISO 8601, with a fraction or without; their time zone is left aside, as only
    differences count.
    """
    if _is_number(cells[0]):
        return numbers(cells[:, None], ("time",))[:, 0] * UNITS[unit]
    dates = [ZONE.sub(r"\1", MMACT_DATE.sub(r"\1-\2-\3T", str(cell).strip())) for cell in cells]
    try:
        stamps = np.array(dates, dtype="datetime64[us]")
    except ValueError as error:
        raise DamagedFileError(f"has a time stamp that is neither a number nor a date: {error}") from error
    if np.isnat(stamps).any():
        raise DamagedFileError(f"has no time stamp in row {int(np.isnat(stamps).argmax()) + 1}")
    return stamps.astype(np.int64) * 1e-6


def signal(samples: np.ndarray, times: np.ndarray | None, channels: Channels) -> Signal:
    """Puts samples in order of time. Of several at the same time the first in the file stays."""
    duplicates = 0
    if times is not None:
        times, first = np.unique(times, return_index=True)
        duplicates = len(samples) - len(first)
        samples = samples[first]
    if len(samples) < 2:
        raise DamagedFileError(f"has {len(samples)} sample, with repeated times counted once; it takes 2 or more")
    return Signal(samples.astype(np.float32), times, channels, duplicates)


def read_csv(path: Path, channels: Channels | None = None) -> Signal:
    """Any CSV file of samples.

    With a header, the column called `time` (or `t`, `ts`, `timestamp`, `datetime`) holds the times, in seconds unless
    the name goes on with a unit (`time_ms`, `time_us`, `time_ns`), or as dates; all others are channels, or those in
    `channels` alone. Without a header, the columns are `channels` in this order, the time before them where there is
    one column more; with `channels` None, every column is a channel, called `x0`, `x1` and so on.
    """
    header, cells = read_table(path)
    names = header or _names_without_header(cells.shape[1], channels)
    clocks = [i for i, name in enumerate(names) if TIME_COLUMN.fullmatch(name) and name not in (channels or ())]
    wanted = channels or tuple(name for i, name in enumerate(names) if i not in clocks)
    _check_names(names, wanted, clocks if channels is None else clocks[:1])
    times = None
    if clocks:
        unit = TIME_COLUMN.fullmatch(names[clocks[0]])[1]  # type: ignore[index]
        times = seconds(cells[:, clocks[0]], unit and unit.lower())
    samples = numbers(cells[:, [names.index(name) for name in wanted]], wanted)
    return signal(samples, times, wanted)


def _names_without_header(columns: int, channels: Channels | None) -> Channels:
    if channels is None:
        return tuple(f"x{i}" for i in range(columns))
    if columns not in (len(channels), len(channels) + 1):
        raise DamagedFileError(
            f"has {columns} columns and no header; it may have {len(channels)} ({', '.join(channels)}), "
            "or one more with the time first"
        )
    return channels if columns == len(channels) else ("time", *channels)


def _check_names(names: Channels, wanted: Channels, clocks: list[int]) -> None:
    missing = [name for name in wanted if name not in names]
    if missing:
        raise DamagedFileError(f"has no column {missing[0]!r}; it has {', '.join(names)}")
    if not wanted:
        raise DamagedFileError(f"has no channels; it has {', '.join(names)}")
    unclear = [name for name in wanted if not name or names.count(name) > 1]
    if unclear:
        raise DamagedFileError(
            f"has {names.count(unclear[0])} column called {unclear[0]!r}; every column needs its own name"
        )
    if len(clocks) > 1:
        raise DamagedFileError(
            f"has {len(clocks)} time columns ({', '.join(names[i] for i in clocks)}); it may have one"
        )


def own_rate(times: np.ndarray) -> float:
    """Samples a second, by the middle one of the steps in time, to four digits: dates are exact to 0.2 us only."""
    return float(f"{1 / np.median(np.diff(times)):.4g}")


def count_at(duration: float, rate: float) -> int:
    """Samples from the first to the last instant; a thousandth of a step may be missing to the last."""
    return int(duration * rate + 1e-3) + 1


def even(recorded: Signal, rate: float | None = None) -> np.ndarray:
    """Samples `[T, C]` at one rate, from linear interpolation between the time stamps; None takes the file's own rate.

    Without time stamps there is nothing to interpolate between: the samples are taken to be at that rate already.
    There is no low-pass filter in front of a lower rate.
    """
    if recorded.times is None:
        return recorded.samples
    times = recorded.times - recorded.times[0]
    rate = own_rate(times) if rate is None else rate
    count = count_at(times[-1], rate)
    if count > MOST_GROWTH * len(times):
        raise DamagedFileError(
            f"has {len(times)} time stamps over {times[-1]:.6g} s, which is {count} samples at {rate:g} Hz; "
            "a time column that is not in seconds may be called time_ms, time_us or time_ns"
        )
    if count < 2:
        raise DamagedFileError(f"lasts {times[-1]:.6g} s, which is {count} sample at {rate:g} Hz; it takes 2 or more")
    return interpolate(recorded.samples, times, np.arange(count) / rate)


def interpolate(samples: np.ndarray, times: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Samples `[T, C]` taken at `times`, linearly interpolated at other times; float32."""
    return np.stack([np.interp(at, times, channel) for channel in samples.T], axis=1).astype(np.float32)
