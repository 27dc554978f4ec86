"""`MuWiGes`: 12 hand gestures of 50 subjects, one file a gesture.

Files are CSV without a header, the time first, then 6 channels; the first two characters of a file's name are its
gesture, counted from 1. They may lie at any depth. Of the folders above a file, one called `data_train`, `data_val` or
`data_test` is its part of the split `"given"`, and one called like `subject12`, `user_12`, `P12` or `S12` its subject.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..recordings import (
    Channels,
    DamagedFileError,
    Listing,
    Lost,
    Recording,
    Signal,
    Source,
    numbers,
    read_columns,
    signal,
)

CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
CLASSES = tuple(f"gesture{number}" for number in range(1, 13))
PARTS = {"data_train": "train", "data_val": "validation", "data_test": "test"}
SUBJECT = re.compile(r"(?:subject|user|person|s|p)[ _-]?(\d+)", re.IGNORECASE)


def label_of(name: str) -> int:
    """Class of a file: the first two characters of its name, minus 1."""
    number = int(name[:2]) if name[:2].isdecimal() else 0
    if not 1 <= number <= len(CLASSES):
        raise DamagedFileError(f"begins with {name[:2]!r}, which is no gesture; it may be 01 to {len(CLASSES)}")
    return number - 1


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """One file. The unit of its time is not published: it is the one that makes 1 to 1000 samples a second."""
    names = ("time", *CHANNELS)
    values = numbers(read_columns(path, names), names)
    times = values[:, 0]
    steps = np.diff(np.unique(times))
    step = float(np.median(steps)) if len(steps) else 1.0
    unit = next((unit for limit, unit in ((1, 1.0), (1e3, 1e-3), (1e6, 1e-6)) if step < limit), 1e-9)
    return signal(values[:, 1:], times * unit, CHANNELS).select(channels)


def find(root: Path, channels: Channels | None) -> Listing:
    """All CSV files below `root`, by path."""
    recordings: list[Recording] = []
    parts: list[str | None] = []
    lost: list[Lost] = []
    for path in sorted(root.rglob("*.csv")):
        folders = path.relative_to(root).parts[:-1]
        subjects = [match[1].lstrip("0") for match in map(SUBJECT.fullmatch, folders) if match]
        name = path.relative_to(root).as_posix()
        try:
            recordings.append(Recording(name, label_of(path.name), subjects[-1] if subjects else None))
            parts.append(next((PARTS[folder] for folder in folders if folder in PARTS), None))
        except DamagedFileError as error:
            lost.append((name, str(error)))
    if not recordings:
        raise FileNotFoundError(f"root is {str(root)!r}, which has no CSV file of a gesture (01*.csv to 12*.csv) in it")

    def read(recording: Recording) -> Signal:
        return read_file(root / recording.name, channels)

    return Listing(recordings, CLASSES, read, lost, {"given": parts} if any(parts) else {})


SOURCE = Source("MuWiGes", ("kfold", "subject", "given"), find, read_file, CHANNELS)
