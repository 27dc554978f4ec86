"""`UESTC-MMEA-CL`: 32 daily activities of 10 subjects, about 25 Hz.

    train.txt, val.txt, test.txt                one clip per line: path, video frames, sensor samples, label
    sensor/<number>_<activity>/<clip>.csv       six columns of raw integers, no header

The first three columns are acceleration (16384 = 1 g), the others angular velocity (16.4 = 1 degree per second). The
layout does not say who was recorded.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from muonssm.lab.core.untrusted import read_lines

from ..csv_files import parse_numbers, read_columns
from ..recordings import Channels, LostFile, Recording, Signal
from .source import Listing, Source

CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
RAW_PER_UNIT = np.array([16384.0] * 3 + [16.4] * 3)
RATE = 25.0
ACTIVITIES = 32
SMALL_NUMBER = re.compile(r"[0-9]{1,9}")
MAX_SHOWN = 200  # characters of a malformed line
LIST_FILES = {"train.txt": "train", "val.txt": "validation", "test.txt": "test"}


class ListedClip(NamedTuple):
    """One line of a list: the clip's file, the number that its folder begins with, its label, and its split."""

    name: str
    number: int
    label: int
    split: str


def parse_line(text: str, split: str) -> ListedClip | str:
    """Parse a line of a list; returns an error message for a malformed line.

    Only the last two names of the path count, because the folders above them vary.
    """
    words = text.rsplit(maxsplit=3)
    if len(words) != 4 or not SMALL_NUMBER.fullmatch(words[3]):
        return f"must be a path, frames, samples and a label, got {text[:MAX_SHOWN]!r}"
    path = PurePosixPath(words[0].replace("\\", "/"))
    number = path.parent.name.split("_")[0]
    if not SMALL_NUMBER.fullmatch(number) or not 1 <= int(number) <= ACTIVITIES:
        wanted = f"a folder that begins with an activity's number, 1 to {ACTIVITIES}"
        return f"must have {wanted}, got {path.parent.name[:MAX_SHOWN]!r}"
    name = PurePosixPath("sensor", path.parent.name, path.stem + ".csv")
    return ListedClip(str(name), int(number), int(words[3]), split)


def read_lists(root: Path) -> tuple[list[ListedClip], list[LostFile]]:
    """Read the clips of the three lists, and the lines that cannot be used."""
    clips: dict[str, ListedClip] = {}
    lost: list[LostFile] = []
    for file, split in LIST_FILES.items():
        if not (root / file).is_file():
            raise FileNotFoundError(f"root must be a folder with {', '.join(LIST_FILES)}, got {str(root)!r}: no {file}")
        for number, text in enumerate(read_lines(root / file), start=1):
            clip = parse_line(text, split)
            if isinstance(clip, str):
                if text.strip():
                    lost.append((f"{file}, line {number}", clip))
            elif clip.name in clips:
                lost.append((f"{file}, line {number}", f"{clip.name} is already listed for {clips[clip.name].split}"))
            else:
                clips[clip.name] = clip
    return sorted(clips.values()), lost


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """Read one file; returns g and degrees per second."""
    values = parse_numbers(read_columns(path, CHANNELS), CHANNELS) / RAW_PER_UNIT
    return Signal.sorted_by_time(values, np.arange(len(values)) / RATE, CHANNELS).select(channels)


def find_recordings(root: Path, channels: Channels | None) -> Listing:
    """List the clips of the three lists, sorted by name.

    The folder decides the class. A clip whose label contradicts its folder cannot be used.
    """
    clips, lost = read_lists(root)
    offsets = Counter(clip.number - clip.label for clip in clips)
    offset = 0 if offsets[0] > offsets[1] else 1  # labels count from 1 or from 0
    lost += [
        (clip.name, f"must have the label of its folder, number {clip.number}, got {clip.label}")
        for clip in clips
        if clip.number - clip.label != offset
    ]
    clips = [clip for clip in clips if clip.number - clip.label == offset]
    names = {clip.number: clip.name.split("/")[1].partition("_")[2] for clip in clips}
    classes = tuple(names.get(number) or f"activity{number}" for number in range(1, ACTIVITIES + 1))

    def read(recording: Recording) -> Signal:
        return read_file(root / recording.name, channels)

    recordings = [Recording(clip.name, clip.number - 1) for clip in clips]
    return Listing(recordings, classes, read, lost, {"given": [clip.split for clip in clips]})


SOURCE = Source(("given", "kfold"), find_recordings, read_file, CHANNELS, RATE)
