"""`UESTC-MMEA-CL`: 32 daily activities of 10 subjects, about 25 Hz.

`train.txt`, `val.txt` and `test.txt` list a clip a line: path, frames, inertial samples, label. The samples are in
`sensor/<number>_<activity>/<clip>.csv`, six columns of raw integers without a header: acceleration, of which 16384
are 1 g, and rotation, of which 16.4 are a degree a second. The layout does not say who was recorded.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from ..recordings import Channels, Listing, Lost, Recording, Signal, Source, numbers, read_columns, signal

CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
SCALE = np.array([16384.0] * 3 + [16.4] * 3)
RATE = 25.0
COUNT = 32  # activities
LISTS = {"train.txt": "train", "val.txt": "validation", "test.txt": "test"}


class Line(NamedTuple):
    """One clip of a list: the file in `sensor/`, the number its folder begins with, and the label beside it."""

    name: str
    number: int
    label: int
    part: str


def parse(text: str, part: str) -> Line | str:
    """A line of a list, or what is wrong with it. Of its path the last two names count: what is before them varies."""
    words = text.rsplit(maxsplit=3)
    if len(words) != 4 or not words[3].isdecimal():
        return f"{text!r} is not a path, frames, samples and label"
    path = PurePosixPath(words[0].replace("\\", "/"))
    number = path.parent.name.split("_")[0]
    if not number.isdecimal() or not 1 <= int(number) <= COUNT:
        return f"its folder {path.parent.name!r} does not begin with an activity's number, 1 to {COUNT}"
    name = PurePosixPath("sensor", path.parent.name, path.stem + ".csv")
    return Line(str(name), int(number), int(words[3]), part)


def read_lists(root: Path) -> tuple[list[Line], list[Lost]]:
    """The clips of the three lists, and lines that are none."""
    lines: dict[str, Line] = {}
    lost: list[Lost] = []
    for file, part in LISTS.items():
        if not (root / file).is_file():
            raise FileNotFoundError(f"root is {str(root)!r}, which has no {file}; it may have {', '.join(LISTS)}")
        for number, text in enumerate((root / file).read_text(encoding="utf-8-sig").splitlines(), start=1):
            line = parse(text, part)
            if isinstance(line, str):
                if text.strip():
                    lost.append((f"{file}, line {number}", line))
            elif line.name in lines:
                lost.append((f"{file}, line {number}", f"{line.name} is listed before, for {lines[line.name].part}"))
            else:
                lines[line.name] = line
    return sorted(lines.values()), lost


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """One file, in g and degrees a second."""
    values = numbers(read_columns(path, CHANNELS), CHANNELS) / SCALE
    return signal(values, np.arange(len(values)) / RATE, CHANNELS).select(channels)


def find(root: Path, channels: Channels | None) -> Listing:
    """The clips of the lists, by name. The class is the folder's; a label that says another makes a clip lost."""
    lines, lost = read_lists(root)
    offsets = Counter(line.number - line.label for line in lines)
    offset = 0 if offsets[0] > offsets[1] else 1  # labels count from 1 or from 0
    lost += [
        (line.name, f"has label {line.label}, and its folder is number {line.number}")
        for line in lines
        if line.number - line.label != offset
    ]
    lines = [line for line in lines if line.number - line.label == offset]
    names = {line.number: line.name.split("/")[1].partition("_")[2] for line in lines}
    classes = tuple(names.get(number) or f"activity{number}" for number in range(1, COUNT + 1))

    def read(recording: Recording) -> Signal:
        return read_file(root / recording.name, channels)

    recordings = [Recording(line.name, line.number - 1) for line in lines]
    return Listing(recordings, classes, read, lost, {"given": [line.part for line in lines]})


SOURCE = Source("UESTC-MMEA-CL", ("given", "kfold"), find, read_file, CHANNELS, RATE)
