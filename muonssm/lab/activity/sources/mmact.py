"""`MMAct`: 35 activities of 20 subjects, recorded with a phone and a watch.

    acc_phone_clip/subject1/scene1/session1/walking.csv     100 Hz; columns time, x, y, z
    acc_watch_clip/..., gyro_clip/..., orientation_clip/... 100 Hz, 50 Hz, 50 Hz

A recording consists of the files with the same name below these folders. Each sensor has its own time stamps: the
sensors are interpolated at 100 Hz over the time that they share, and resampled to 50 Hz like any other recording later.
File names are compared without case (`Carrying_light`, `carrying_light`).
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from ..csv_files import parse_numbers, parse_times, read_columns
from ..recordings import Channels, DamagedFileError, LostFile, Recording, Signal, interpolate, sample_count
from .source import Listing, Source

SENSORS = ("acc_phone_clip", "acc_watch_clip", "gyro_clip", "orientation_clip")
AXES = ("x", "y", "z")
CHANNELS = tuple(f"{sensor.removesuffix('_clip')}_{axis}" for sensor in SENSORS for axis in AXES)
DEFAULT_CHANNELS = CHANNELS[:9]  # without orientation, which the phone computes from the other sensors
RATE, MERGE_RATE = 50.0, 100.0
ACTIVITIES = """
    carrying carrying_heavy carrying_light checking_time closing crouching drinking entering exiting fall jumping
    kicking loitering looking_around opening picking_up pocket_in pocket_out pointing pulling pushing running
    setting_down sitting sitting_down standing standing_up talking talking_on_phone throwing transferring_object
    using_pc using_phone walking waving_hand
"""
CLASSES = tuple(ACTIVITIES.split())
NAME = re.compile(r"subject(\d+)/scene(\d+)/session(\d+)/(\w+)")
# For each published split: the group of NAME that decides, the last number for training, and the last number for test.
PUBLISHED_SPLITS = {"cross-subject": (1, 16, 20), "cross-scene": (2, 3, 4), "cross-session": (3, 3, 4)}
SensorFiles = dict[str, Path]


def sensors_of(channels: Channels | None) -> dict[str, list[str]]:
    """The sensors that measure `channels`, each with its three channels."""
    by_sensor = {sensor: list(CHANNELS[3 * i : 3 * i + 3]) for i, sensor in enumerate(SENSORS)}
    return {sensor: names for sensor, names in by_sensor.items() if set(names) & set(channels or DEFAULT_CHANNELS)}


def read_sensor(path: Path, channels: Channels) -> Signal:
    """Read the file of one sensor."""
    cells = read_columns(path, ("time", *AXES))
    return Signal.sorted_by_time(parse_numbers(cells[:, 1:], AXES), parse_times(cells[:, 0]), channels)


def merge_sensors(signals: list[Signal]) -> Signal:
    """Interpolate several sensors over the time that they share, and join their channels."""
    sensor_times = [signal.times for signal in signals if signal.times is not None]
    start, end = max(times[0] for times in sensor_times), min(times[-1] for times in sensor_times)
    if end - start < 1 / MERGE_RATE:
        raise DamagedFileError(
            f"must have sensors that overlap in time, got one that begins {start - end:.6g} s after another one ends"
        )
    before = max(len(times) for times in sensor_times)
    grid = np.arange(sample_count(float(end - start), MERGE_RATE, before)) / MERGE_RATE
    samples = [
        interpolate(signal.samples, times - start, grid) for signal, times in zip(signals, sensor_times, strict=True)
    ]
    channels = tuple(channel for signal in signals for channel in signal.channels)
    return Signal(np.concatenate(samples, axis=1), grid, channels, sum(signal.duplicates for signal in signals))


def read_files(files: SensorFiles, channels: Channels | None) -> Signal:
    """Read a recording from the files of its sensors. One damaged file makes the recording unusable."""
    signals = []
    for sensor, names in sensors_of(channels).items():
        if sensor not in files:
            raise DamagedFileError(f"has no file in {sensor}")
        try:
            signals.append(read_sensor(files[sensor], tuple(names)))
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}, in {sensor}") from error
    return merge_sensors(signals).select(channels or DEFAULT_CHANNELS)


def read_file(path: Path, channels: Channels | None = None) -> Signal:
    """Read the whole recording that a file of any one sensor belongs to."""
    *_, root = path.absolute().parents[:5]
    name = path.absolute().relative_to(root).parts[1:]
    files = {sensor: root.joinpath(sensor, *name) for sensor in SENSORS}
    return read_files({sensor: file for sensor, file in files.items() if file.is_file()}, channels)


def scan_folders(root: Path, channels: Channels | None) -> tuple[dict[str, SensorFiles], list[LostFile]]:
    """Find the files of every recording, by its name in lower case, and the files that belong to no recording."""
    sensors = [sensor for sensor in sensors_of(channels) if (root / sensor).is_dir()]
    if not sensors:
        raise FileNotFoundError(
            f"root must be a folder with {' or '.join(sensors_of(channels))} in it, got {str(root)!r}"
        )
    recordings: dict[str, SensorFiles] = {}
    lost: list[LostFile] = []
    for sensor in sensors:
        for path in sorted((root / sensor).rglob("*.csv")):
            name = path.relative_to(root / sensor).with_suffix("").as_posix().lower()
            reason = _why_not_a_recording(name)
            if reason is None and sensor in recordings.get(name, {}):
                reason = f"differs only in case from {recordings[name][sensor].name}"
            if reason is None:
                recordings.setdefault(name, {})[sensor] = path
            else:
                lost.append((path.relative_to(root).as_posix(), reason))
    return recordings, lost


def _why_not_a_recording(name: str) -> str | None:
    """The reason why a name is not the name of a recording; None if it is."""
    match = NAME.fullmatch(name)
    if match is None:
        return "is not in subjectN/sceneN/sessionN"
    return (
        None if match[4] in CLASSES else f"must be named after one of the {len(CLASSES)} activities, got {match[4]!r}"
    )


def published_split(name: str, protocol: str) -> str | None:
    """The split of a recording in a published protocol; None if the protocol does not use it."""
    group, last_training, last_test = PUBLISHED_SPLITS[protocol]
    number = int(NAME.fullmatch(name)[group])  # type: ignore[index]
    return "train" if number <= last_training else "test" if number <= last_test else None


def find_recordings(root: Path, channels: Channels | None) -> Listing:
    """List all recordings that one or more of the sensors have, sorted by name."""
    files, lost = scan_folders(root, channels)
    names = sorted(files)
    recordings = []
    for name in names:
        subject, _, _, activity = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        recordings.append(Recording(name, CLASSES.index(activity), subject))

    def read(recording: Recording) -> Signal:
        return read_files(files[recording.name], channels)

    splits = {protocol: [published_split(name, protocol) for name in names] for protocol in PUBLISHED_SPLITS}
    return Listing(recordings, CLASSES, read, lost, splits)


SOURCE = Source((*PUBLISHED_SPLITS, "subject", "kfold"), find_recordings, read_file, CHANNELS, RATE)
