"""`uci-har` and `uci-hapt`: activities of 30 subjects with a smartphone at the waist, 50 Hz, in the raw layout of HAPT.

    RawData/acc_exp01_user01.txt, RawData/gyro_exp01_user01.txt     three columns each, in g and radians per second
    RawData/labels.txt                      experiment, user, activity, first and last sample, one segment per line
    Train/subject_id_train.txt, Test/subject_id_test.txt            one subject per window of the published features

A recording is one labeled segment of an experiment. `uci-har` has the six activities of UCI HAR, `uci-hapt` also the
six transitions between postures. J.-L. Reyes-Ortiz et al., Transition-aware human activity recognition using
smartphones, Neurocomputing 2016.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from muonssm.lab.core.untrusted import UntrustedFileError, read_lines

from ..csv_files import parse_numbers, read_words
from ..recordings import Channels, DamagedFileError, LostFile, Recording, Signal
from .source import Listing, Source, SplitNames

SENSORS = ("acc", "gyro")
AXES = ("x", "y", "z")
CHANNELS = tuple(f"{sensor}_{axis}" for sensor in SENSORS for axis in AXES)
RATE = 50.0
ACTIVITIES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
TRANSITIONS = ("stand_to_sit", "sit_to_stand", "sit_to_lie", "lie_to_sit", "stand_to_lie", "lie_to_stand")
LABELS = "labels.txt"
SUBJECT_LISTS = {"Train/subject_id_train.txt": "train", "Test/subject_id_test.txt": "test"}
NUMBER = re.compile(r"[0-9]{1,9}")
FILE = re.compile(r"(?:acc|gyro)(_exp[0-9]{2,9}_user[0-9]{2,9}\.txt)")
MAX_SHOWN = 100  # characters of a malformed line


class Segment(NamedTuple):
    """One line of labels.txt; `first` and `last` count samples from 1, both included."""

    experiment: int
    subject: int
    activity: int
    first: int
    last: int

    @property
    def file(self) -> str:
        """The accelerometer's file of the experiment."""
        return f"acc_exp{self.experiment:02d}_user{self.subject:02d}.txt"

    @property
    def name(self) -> str:
        """The file, and the samples in it."""
        return f"{self.file}, samples {self.first} to {self.last}"


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """Read a whole experiment, given the file of either sensor."""
    match = FILE.fullmatch(path.name)
    if match is None:
        raise DamagedFileError(f"must be named like acc_exp01_user01.txt, got {path.name!r:.60}")
    sensors = [_read_sensor(path.with_name(f"{sensor}{match[1]}")) for sensor in SENSORS]
    if len(sensors[0]) != len(sensors[1]):
        raise DamagedFileError(
            f"must have as many samples of both sensors, got {len(sensors[0])} and {len(sensors[1])}"
        )
    values = np.column_stack(sensors)
    return Signal.sorted_by_time(values, np.arange(len(values)) / RATE, CHANNELS).select(channels)


def _read_sensor(path: Path) -> np.ndarray:
    if not path.exists():
        raise DamagedFileError(f"must have the files of both sensors, got no {path.name}")
    try:
        return parse_numbers(read_words(path, AXES), AXES)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}, in {path.name}") from error


def parse_line(text: str) -> Segment:
    """Parse a line of labels.txt."""
    words = text.split()
    if len(words) != 5 or not all(NUMBER.fullmatch(word) for word in words):
        wanted = "five numbers: experiment, user, activity, first and last sample"
        raise DamagedFileError(f"must have {wanted}, got {text[:MAX_SHOWN]!r}")
    segment = Segment(*map(int, words))
    known = len(ACTIVITIES) + len(TRANSITIONS)
    if not 1 <= segment.activity <= known:
        raise DamagedFileError(f"must have an activity from 1 to {known}, got {segment.activity}")
    if not 1 <= segment.first < segment.last:
        raise DamagedFileError(f"must have a first sample before the last, got {segment.first} and {segment.last}")
    return segment


def read_labels(path: Path) -> tuple[list[Segment], list[LostFile]]:
    """Read the segments of labels.txt, sorted, and the lines that cannot be used."""
    segments: dict[Segment, int] = {}
    lost: list[LostFile] = []
    for number, text in enumerate(read_lines(path), start=1):
        try:
            segment = parse_line(text) if text.strip() else None
        except DamagedFileError as error:
            lost.append((f"{path.name}, line {number}", str(error)))
            continue
        if segment in segments:
            lost.append((f"{path.name}, line {number}", f"repeats line {segments[segment]}"))
        elif segment is not None:
            segments[segment] = number
    return sorted(segments), lost


def published_subjects(root: Path) -> dict[int, str]:
    """Return the split of each subject that the published lists of windows name; empty if a list is missing."""
    split_of: dict[int, str] = {}
    for file, split in SUBJECT_LISTS.items():
        if not (root / file).is_file():
            return {}
        for number, text in enumerate(read_lines(root / file), start=1):
            word = text.strip()
            if word and (not NUMBER.fullmatch(word) or split_of.setdefault(int(word), split) != split):
                wanted = "the number of a subject that is in no other list"
                raise UntrustedFileError(root / file, f"must have {wanted} in line {number}, got {word[:MAX_SHOWN]!r}")
    return split_of


def _raw_folder(root: Path) -> Path:
    for folder in (root / "RawData", root):
        if (folder / LABELS).is_file():
            return folder
    raise FileNotFoundError(f"root must be a folder with RawData/{LABELS}, got {str(root)!r}")


def find_recordings(classes: tuple[str, ...], root: Path, channels: Channels | None) -> Listing:
    """List the segments of `classes`, sorted by experiment and time."""
    folder = _raw_folder(root)
    found, lost = read_labels(folder / LABELS)
    segments = {segment.name: segment for segment in found if segment.activity <= len(classes)}
    split_of = published_subjects(folder.parent if folder.name == "RawData" else root)

    @functools.lru_cache(maxsize=1)  # the segments of an experiment follow each other
    def experiment(file: str) -> Signal:
        return read_file(folder / file, channels)

    def read(recording: Recording) -> Signal:
        segment = segments[recording.name]
        whole = experiment(segment.file)
        if segment.last > len(whole.samples):
            wanted = f"a last sample within the {len(whole.samples)} of the experiment"
            raise DamagedFileError(f"must have {wanted}, got {segment.last}")
        part = slice(segment.first - 1, segment.last)
        return Signal.sorted_by_time(whole.samples[part], whole.times[part], whole.channels)  # type: ignore[index]

    recordings = [Recording(s.name, s.activity - 1, str(s.subject)) for s in segments.values()]
    return Listing(recordings, classes, read, lost, _given(segments.values(), split_of))


def _given(segments: Iterable[Segment], split_of: dict[int, str]) -> dict[str, SplitNames]:
    """Return the published split, which does not use a subject that is in no list."""
    return {"given": [split_of.get(segment.subject) for segment in segments]} if split_of else {}


def _source(classes: tuple[str, ...]) -> Source:
    find = functools.partial(find_recordings, classes)
    return Source(("given", "subject", "kfold"), find, read_file, CHANNELS, RATE)


SOURCE = _source(ACTIVITIES)
WITH_TRANSITIONS = _source((*ACTIVITIES, *TRANSITIONS))
