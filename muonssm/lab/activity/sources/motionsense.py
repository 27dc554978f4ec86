"""`motionsense`: 6 activities of 24 subjects in 15 trials, an iPhone in the front pocket, 50 Hz.

    A_DeviceMotion_data/dws_1/sub_7.csv     activity, trial and subject

The columns are an index, then three each of attitude, gravity, rotationRate and userAcceleration. The six channels are
those of an accelerometer (gravity + userAcceleration, in g) and a gyroscope (rotationRate, in radians per second).
M. Malekzadeh et al., Mobile sensor data anonymization, IoTDI 2019.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..csv_files import read_csv
from ..recordings import Channels, DamagedFileError, LostFile, Recording, Signal
from .source import Listing, Source, SplitNames

FOLDER = "A_DeviceMotion_data"
CHANNELS = ("acc_x", "acc_y", "acc_z", "gyro_x", "gyro_y", "gyro_z")
COLUMNS = tuple(f"{sensor}.{axis}" for sensor in ("gravity", "userAcceleration", "rotationRate") for axis in "xyz")
RATE = 50.0
ACTIVITIES = {
    "dws": "downstairs",
    "ups": "upstairs",
    "wlk": "walking",
    "jog": "jogging",
    "sit": "sitting",
    "std": "standing",
}
TRIAL = re.compile(rf"({'|'.join(ACTIVITIES)})_([0-9]{{1,3}})")
SUBJECT = re.compile(r"sub_([0-9]{1,3})\.csv")
LAST_LONG_TRIAL = 9  # trials 1 to 9 take 2 to 3 minutes each, 11 to 16 half a minute to one


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """Read one file as published."""
    raw = read_csv(path, COLUMNS).samples.astype(np.float64)
    values = np.column_stack([raw[:, 0:3] + raw[:, 3:6], raw[:, 6:9]])
    return Signal.sorted_by_time(values, np.arange(len(values)) / RATE, CHANNELS).select(channels)


def parse_path(path: Path) -> tuple[int, int, str]:
    """Return the class, the trial and the subject that the path of a file says."""
    trial, subject = TRIAL.fullmatch(path.parent.name), SUBJECT.fullmatch(path.name)
    if trial is None:
        wanted = f"in a folder like dws_1, one of {', '.join(ACTIVITIES)} with the number of a trial"
        raise DamagedFileError(f"must be {wanted}, got {path.parent.name!r:.60}")
    if subject is None:
        raise DamagedFileError(f"must be named sub_N.csv after its subject, got {path.name!r:.60}")
    return list(ACTIVITIES).index(trial[1]), int(trial[2]), str(int(subject[1]))


def _data_folder(root: Path) -> Path:
    """Return the folder of the trials: `root`, or the innermost A_DeviceMotion_data below it, as archives nest it."""
    found = [path for path in sorted(root.rglob(FOLDER)) if path.is_dir()]
    return found[-1] if found else root


def find_recordings(root: Path, channels: Channels | None) -> Listing:
    """List all files, sorted by path. The split `"trial"` trains on trials 1 to 9 and tests on 11 to 16."""
    folder = _data_folder(root)
    recordings: list[Recording] = []
    splits: SplitNames = []
    lost: list[LostFile] = []
    for path in sorted(folder.rglob("*.csv")):
        name = path.relative_to(root).as_posix()
        try:
            label, trial, subject = parse_path(path)
        except DamagedFileError as error:
            lost.append((name, str(error)))
            continue
        recordings.append(Recording(name, label, subject))
        splits.append("train" if trial <= LAST_LONG_TRIAL else "test")
    if not recordings:
        wanted = f"a folder with {FOLDER} or with its folders dws_1, jog_9 and so on"
        raise FileNotFoundError(f"root must be {wanted}, got {str(root)!r}")

    def read(recording: Recording) -> Signal:
        return read_file(root / recording.name, channels)

    return Listing(recordings, tuple(ACTIVITIES.values()), read, lost, {"trial": splits})


SOURCE = Source(("subject", "trial", "kfold"), find_recordings, read_file, CHANNELS, RATE)
