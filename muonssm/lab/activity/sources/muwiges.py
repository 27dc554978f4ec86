"""`MuWiGes`: 12 hand gestures of 50 subjects, one file per gesture.

    data_train/subject12/01_x.csv

Files are CSV without a header: time, then 6 channels. The first two characters of a file name are the gesture, counted
from 1. Files can be at any depth. A parent folder `data_train`, `data_val` or `data_test` gives the split `"given"`; a
parent folder like `subject12`, `user_12`, `P12` or `S12` gives the subject.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..csv_files import parse_numbers, read_columns
from ..recordings import Channels, DamagedFileError, LostFile, Recording, Signal
from .source import Listing, Source, SplitNames

CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
CLASSES = tuple(f"gesture{number}" for number in range(1, 13))
SPLIT_FOLDERS = {"data_train": "train", "data_val": "validation", "data_test": "test"}
SUBJECT_FOLDER = re.compile(r"(?:subject|user|person|s|p)[ _-]?(\d+)", re.IGNORECASE)
# Unit of time in seconds, by the largest median time step that it is assumed for.
UNIT_BY_STEP = ((1, 1.0), (1e3, 1e-3), (1e6, 1e-6))


def parse_label(name: str) -> int:
    """Parse the class of a file: the first two characters of its name, minus 1."""
    number = int(name[:2]) if name[:2].isdecimal() else 0
    if not 1 <= number <= len(CLASSES):
        raise DamagedFileError(f"must begin with the number of a gesture, 01 to {len(CLASSES)}, got {name[:2]!r}")
    return number - 1


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """Read one file. The unit of time is not published; the one that makes 1 to 1000 samples per second is used."""
    names = ("time", *CHANNELS)
    values = parse_numbers(read_columns(path, names), names)
    times = values[:, 0]
    differences = np.diff(np.unique(times))
    time_step = float(np.median(differences)) if len(differences) else 1.0
    unit = next((unit for limit, unit in UNIT_BY_STEP if time_step < limit), 1e-9)
    return Signal.sorted_by_time(values[:, 1:], times * unit, CHANNELS).select(channels)


def find_recordings(root: Path, channels: Channels | None) -> Listing:
    """List all CSV files below `root`, sorted by path."""
    recordings: list[Recording] = []
    splits: SplitNames = []
    lost: list[LostFile] = []
    for path in sorted(root.rglob("*.csv")):
        folders = path.relative_to(root).parts[:-1]
        subjects = [match[1].lstrip("0") for match in map(SUBJECT_FOLDER.fullmatch, folders) if match]
        name = path.relative_to(root).as_posix()
        try:
            recordings.append(Recording(name, parse_label(path.name), subjects[-1] if subjects else None))
            splits.append(next((SPLIT_FOLDERS[folder] for folder in folders if folder in SPLIT_FOLDERS), None))
        except DamagedFileError as error:
            lost.append((name, str(error)))
    if not recordings:
        raise FileNotFoundError(
            f"root must be a folder with CSV files of gestures (01*.csv to 12*.csv), got {str(root)!r}"
        )

    def read(recording: Recording) -> Signal:
        return read_file(root / recording.name, channels)

    return Listing(recordings, CLASSES, read, lost, {"given": splits} if any(splits) else {})


SOURCE = Source(("kfold", "subject", "given"), find_recordings, read_file, CHANNELS)
