"""`utd-mhad`, the inertial part of UTD-MHAD: 27 actions of 8 subjects, 4 times each, 50 Hz.

    Inertial/a1_s2_t3_inertial.mat          action 1, subject 2, trial 3

A file is a MATLAB 5 file with the matrix `d_iner`: acceleration in g and angular velocity in degrees per second, on the
right wrist for actions 1 to 21 and on the right thigh for actions 22 to 27. C. Chen, R. Jafari, N. Kehtarnavaz,
UTD-MHAD: a multimodal dataset for human action recognition utilizing a depth camera and a wearable inertial sensor,
ICIP 2015.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..mat_files import read_matrix
from ..recordings import Channels, DamagedFileError, LostFile, Recording, Signal
from .source import Listing, Source, SplitNames

CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
VARIABLE = "d_iner"
RATE = 50.0
ACTIONS = """
    swipe_left swipe_right wave clap throw arm_cross basketball_shoot draw_x draw_circle_clockwise
    draw_circle_counter_clockwise draw_triangle bowling boxing baseball_swing tennis_swing arm_curl tennis_serve push
    knock catch pickup_and_throw jog walk sit_to_stand stand_to_sit lunge squat
"""
CLASSES = tuple(ACTIONS.split())
NAME = re.compile(r"a([0-9]{1,3})_s([0-9]{1,3})_t([0-9]{1,3})_inertial\.mat")


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """Read one file as published."""
    values = read_matrix(path, VARIABLE)
    if values.shape[1] != len(CHANNELS):
        wanted = f"{len(CHANNELS)} columns in {VARIABLE!r} ({', '.join(CHANNELS)})"
        raise DamagedFileError(f"must have {wanted}, got {values.shape[1]}")
    return Signal.sorted_by_time(values, np.arange(len(values)) / RATE, CHANNELS).select(channels)


def parse_name(name: str) -> tuple[int, int]:
    """Return the class and the subject that the name of a file says."""
    match = NAME.fullmatch(name)
    if match is None:
        raise DamagedFileError(f"must be named like a1_s2_t3_inertial.mat, got {name!r:.60}")
    if not 1 <= int(match[1]) <= len(CLASSES):
        raise DamagedFileError(f"must have an action from 1 to {len(CLASSES)} in its name, got {match[1]}")
    return int(match[1]) - 1, int(match[2])


def find_recordings(root: Path, channels: Channels | None) -> Listing:
    """List all files, sorted by path. `"cross-subject"` trains on odd subjects and tests on even ones, as published."""
    recordings: list[Recording] = []
    splits: SplitNames = []
    lost: list[LostFile] = []
    for path in sorted(root.rglob("*_inertial.mat")):
        name = path.relative_to(root).as_posix()
        try:
            label, subject = parse_name(path.name)
        except DamagedFileError as error:
            lost.append((name, str(error)))
            continue
        recordings.append(Recording(name, label, str(subject)))
        splits.append("train" if subject % 2 else "test")
    if not recordings:
        raise FileNotFoundError(f"root must be a folder with files like a1_s2_t3_inertial.mat, got {str(root)!r}")

    def read(recording: Recording) -> Signal:
        return read_file(root / recording.name, channels)

    return Listing(recordings, CLASSES, read, lost, {"cross-subject": splits})


SOURCE = Source(("cross-subject", "subject", "kfold"), find_recordings, read_file, CHANNELS, RATE)
