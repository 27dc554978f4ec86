"""`MMAct`: 35 activities of 20 subjects, with a phone and a watch.

    acc_phone_clip/subject1/scene1/session1/walking.csv     100 Hz, columns time, x, y, z
    acc_watch_clip/..., gyro_clip/..., orientation_clip/... 100 Hz, 50 Hz, 50 Hz

A recording is the files of one name below these folders. Each sensor has its own time stamps, so a recording is what
all of them saw, at 100 Hz; further down it is brought to 50 Hz like any other. Names that differ in case are the same
(`Carrying_light`, `carrying_light`).
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
    count_at,
    interpolate,
    numbers,
    read_columns,
    seconds,
    signal,
)

SENSORS = ("acc_phone_clip", "acc_watch_clip", "gyro_clip", "orientation_clip")
AXES = ("x", "y", "z")
CHANNELS = tuple(f"{sensor.removesuffix('_clip')}_{axis}" for sensor in SENSORS for axis in AXES)
USUAL = CHANNELS[:9]  # without orientation, which the phone computes from the others
RATE, FINEST = 50.0, 100.0
ACTIVITIES = """
    carrying carrying_heavy carrying_light checking_time closing crouching drinking entering exiting fall jumping
    kicking loitering looking_around opening picking_up pocket_in pocket_out pointing pulling pushing running
    setting_down sitting sitting_down standing standing_up talking talking_on_phone throwing transferring_object
    using_pc using_phone walking waving_hand
"""
CLASSES = tuple(ACTIVITIES.split())
NAME = re.compile(r"subject(\d+)/scene(\d+)/session(\d+)/(\w+)")
# Number of subject, scene or session up to which a recording is for training, and the last one for test.
PUBLISHED = {"cross-subject": (1, 16, 20), "cross-scene": (2, 3, 4), "cross-session": (3, 3, 4)}
Files = dict[str, Path]  # by sensor


def sensors_of(channels: Channels | None) -> dict[str, list[str]]:
    """The sensors that `channels` are of, each with its three channels."""
    by_sensor = {sensor: list(CHANNELS[3 * i : 3 * i + 3]) for i, sensor in enumerate(SENSORS)}
    return {sensor: names for sensor, names in by_sensor.items() if set(names) & set(channels or USUAL)}


def read_sensor(path: Path, channels: Channels) -> Signal:
    """One sensor's file."""
    cells = read_columns(path, ("time", *AXES))
    return signal(numbers(cells[:, 1:], AXES), seconds(cells[:, 0]), channels)


def merge(signals: list[Signal]) -> Signal:
    """Several sensors as one signal, over the time that they share."""
    clocks = [one.times for one in signals if one.times is not None]
    start, end = max(clock[0] for clock in clocks), min(clock[-1] for clock in clocks)
    if end - start < 1 / FINEST:
        raise DamagedFileError(f"has sensors that share no time: one begins {start - end:.6g} s after another ends")
    at = np.arange(count_at(end - start, FINEST)) / FINEST
    samples = [interpolate(one.samples, clock - start, at) for one, clock in zip(signals, clocks, strict=True)]
    channels = tuple(channel for one in signals for channel in one.channels)
    return Signal(np.concatenate(samples, axis=1), at, channels, sum(one.duplicates for one in signals))


def read_files(files: Files, channels: Channels | None) -> Signal:
    """A recording from the files of its sensors; what is damaged in one is damaged in the whole."""
    signals = []
    for sensor, names in sensors_of(channels).items():
        if sensor not in files:
            raise DamagedFileError(f"has no file in {sensor}")
        try:
            signals.append(read_sensor(files[sensor], tuple(names)))
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}, in {sensor}") from error
    return merge(signals).select(channels or USUAL)


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """The recording that a file of any one sensor belongs to."""
    *_, root = path.absolute().parents[:5]
    name = path.absolute().relative_to(root).parts[1:]
    files = {sensor: root.joinpath(sensor, *name) for sensor in SENSORS}
    return read_files({sensor: file for sensor, file in files.items() if file.is_file()}, channels)


def scan(root: Path, channels: Channels | None) -> tuple[dict[str, Files], list[Lost]]:
    """The files of every recording, by its name in lower case, and files that belong to none."""
    sensors = [sensor for sensor in sensors_of(channels) if (root / sensor).is_dir()]
    if not sensors:
        raise FileNotFoundError(f"root is {str(root)!r}, which has no folder {' or '.join(sensors_of(channels))}")
    found: dict[str, Files] = {}
    lost: list[Lost] = []
    for sensor in sensors:
        for path in sorted((root / sensor).rglob("*.csv")):
            name = path.relative_to(root / sensor).with_suffix("").as_posix().lower()
            reason = unknown(name)
            if reason is None and sensor in found.get(name, {}):
                reason = f"has the name of {found[name][sensor].name}, but for case"
            if reason is None:
                found.setdefault(name, {})[sensor] = path
            else:
                lost.append((path.relative_to(root).as_posix(), reason))
    return found, lost


def unknown(name: str) -> str | None:
    """Why a name is not a recording's; None if it is."""
    match = NAME.fullmatch(name)
    if match is None:
        return "is not in subjectN/sceneN/sessionN"
    return None if match[4] in CLASSES else f"is called {match[4]!r}, which is none of the {len(CLASSES)} activities"


def part_of(name: str, split: str) -> str | None:
    """The part of a recording: up to which number it is for training, up to which for test; None beyond that."""
    group, training, test = PUBLISHED[split]
    number = int(NAME.fullmatch(name)[group])  # type: ignore[index]
    return "train" if number <= training else "test" if number <= test else None


def find(root: Path, channels: Channels | None) -> Listing:
    """All recordings that any of the sensors has, by name."""
    files, lost = scan(root, channels)
    names = sorted(files)
    recordings = []
    for name in names:
        subject, _, _, activity = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        recordings.append(Recording(name, CLASSES.index(activity), subject))

    def read(recording: Recording) -> Signal:
        return read_files(files[recording.name], channels)

    published = {split: [part_of(name, split) for name in names] for split in PUBLISHED}
    return Listing(recordings, CLASSES, read, lost, published)


SOURCE = Source("MMAct", (*PUBLISHED, "subject", "kfold"), find, read_file, CHANNELS, RATE)
