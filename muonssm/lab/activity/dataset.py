"""Load sensor recordings as standardized windows in three splits.

    data = load_activity(ActivityConfig())                  # the embedded `watch` data, split by subject
    data.train.x, data.train.y                              # [n, 512, 6] and [n]

A recording is read, resampled to one rate and cut into windows, which all belong to the recording's split. Mean and
standard deviation come from the training windows alone. Unusable files are counted and named, never skipped silently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muonssm.checks import check_choice

from .config import ActivityConfig
from .recordings import Channels, DamagedFileError, LostFile, Recording, Signal, median_rate, resample
from .sources import SOURCES
from .splits import SPLITS, assign_splits
from .windows import WindowSet, channel_statistics, count_dropped_samples, make_windows, standardize

MAX_NAMED = 10  # files or classes that a message names; the others are counted


class TooManyLostError(ValueError):
    """More files are unusable than `max_lost` allows; `lost` holds all of them, with the reasons."""

    def __init__(self, message: str, lost: list[LostFile]) -> None:
        super().__init__(message)
        self.lost = lost


@dataclass(frozen=True, eq=False)
class ActivityData:
    """Windows in three splits, and where they come from.

    Attributes:
        config: the configuration that was loaded.
        train, validation, test: standardized windows.
        classes, channels: names.
        mean, std: float32 `[C]`, of the training windows; pass them to `standardize` for a new recording.
        rate: sampling rate in Hz; None if each recording keeps its own.
        recordings: all usable recordings, including those that the split does not use; `WindowSet.recording` is an
            index into them.
        lost: unusable files, with the reasons.
        short_recordings: how many recordings were shorter than a window and were resampled to one.
        duplicates: how many samples were dropped because an earlier one has the same time stamp.
        dropped_share: fraction of samples after the last window of their recording.
    """

    config: ActivityConfig
    train: WindowSet
    validation: WindowSet
    test: WindowSet
    classes: tuple[str, ...]
    channels: Channels
    mean: Tensor
    std: Tensor
    rate: float | None
    recordings: list[Recording]
    lost: list[LostFile]
    short_recordings: int
    duplicates: int
    dropped_share: float

    def summary(self) -> str:
        """Describe the splits and the unusable files in a few lines."""
        rate = "their own rates" if self.rate is None else f"{self.rate:g} Hz"
        lines = [
            f"{self.config.source}: {len(self.recordings)} recordings at {rate}, {len(self.classes)} classes, "
            f"{len(self.channels)} channels, {self.config.mode} of {self.config.length}, split {self.config.split!r}"
        ]
        lines += [f"  {split:<10} {self._describe_split(split)}" for split in SPLITS]
        unused = sum(recording.split is None for recording in self.recordings)
        untrained = [name for i, name in enumerate(self.classes) if i not in set(self.train.y.tolist())]
        notes = (
            (unused, f"{unused} recordings are not used by this split"),
            (untrained, f"{len(untrained)} classes have no training windows: {_join_names(untrained)}"),
            (self.short_recordings, f"{self.short_recordings} recordings are shorter than a window and were resampled"),
            (self.dropped_share, f"{self.dropped_share:.1%} of the samples come after the last window"),
            (self.duplicates, f"{self.duplicates} samples with a repeated time stamp were dropped"),
        )
        lines += [f"  {text}" for count, text in notes if count]
        lines.append(f"  {len(self.lost)} of {len(self.lost) + len(self.recordings)} files cannot be used")
        return "\n".join([*lines, *_list_lost(self.lost)])

    def _describe_split(self, split: str) -> str:
        recordings = [recording for recording in self.recordings if recording.split == split]
        subjects = {recording.subject for recording in recordings} - {None}
        windows: WindowSet = getattr(self, split)
        classes = f"{len(set(windows.y.tolist())):>4} of {len(self.classes)} classes"
        text = f"{len(recordings):>6} recordings {len(windows):>7} windows {classes}"
        return f"{text} {len(subjects):>4} subjects" if subjects else text


def _join_names(names: Sequence[str]) -> str:
    hidden = len(names) - MAX_NAMED
    return ", ".join([*names[:MAX_NAMED], f"and {hidden} more"] if hidden > 0 else names)


def _list_lost(lost: Sequence[LostFile]) -> list[str]:
    lines = [f"    {file}: {reason}" for file, reason in lost[:MAX_NAMED]]
    return [*lines, f"    and {len(lost) - MAX_NAMED} more"] if len(lost) > MAX_NAMED else lines


def load_activity(config: ActivityConfig, progress: bool = True) -> ActivityData:
    """Read, split, cut and standardize; `progress` shows a bar if reading takes more than a second."""
    source = SOURCES[config.source]
    if config.root is not None and not Path(config.root).is_dir():
        raise FileNotFoundError(f"root must be the folder with the data, got {config.root!r}, which is not a folder")
    listing = source.find_recordings(Path(config.root or ""), config.channels)
    _check_any_usable(listing.recordings, listing.lost)
    recordings = assign_splits(listing, str(config.split), config.fold, config.folds, config.seed)
    lost = list(listing.lost)
    signals = _read_all([recording for recording in recordings if recording.split], listing.read, lost, progress)
    channels = _use_common_channels(signals, lost)
    rate = _common_rate(config, source.rate, signals)
    samples = _resample_all(signals, rate, lost)
    mean, std, (train, validation, test) = _standardized_splits(recordings, samples, config, lost)
    _check_classes(train, listing.classes)
    usable = _usable(recordings, samples)
    lengths = [len(x) for x in samples.values()] if config.mode == "windows" else []
    dropped = sum(count_dropped_samples(n, config.length, config.overlap) for n in lengths)
    return ActivityData(
        config,
        train,
        validation,
        test,
        classes=listing.classes,
        channels=channels,
        mean=mean,
        std=std,
        rate=rate,
        recordings=usable,
        lost=lost,
        short_recordings=sum(n < config.length for n in lengths),
        duplicates=sum(signal.duplicates for signal in signals.values()),
        dropped_share=dropped / max(1, sum(lengths)),
    )


def read_recording(
    path: str | Path, channels: Sequence[str] | None = None, rate: float | None = None, source: str = "folder"
) -> np.ndarray:
    """Read one file as float32 `[T, C]` at one rate, as `load_activity` does; the input of a trained model.

    Pass `channels`, `rate` and `source` of the data that the model was trained on. `"folder"` and `"watch"` accept any
    CSV file; for `"MMAct"`, pass the file of any one sensor. Raises `DamagedFileError` with the reason if the file
    cannot be used.
    """
    check_choice("source", source, tuple(SOURCES))
    try:
        signal = SOURCES[source].read_file(Path(path), None if channels is None else tuple(channels))
        return resample(signal, rate)
    except DamagedFileError as error:
        raise DamagedFileError(f"{path} {error}") from error


def _read_all(
    recordings: Sequence[Recording], read: Callable[[Recording], Signal], lost: list[LostFile], progress: bool
) -> dict[Recording, Signal]:
    """Read all recordings; append those that cannot be read to `lost`."""
    from tqdm import tqdm

    signals = {}
    for recording in tqdm(recordings, desc="reading", unit="recording", delay=1, disable=not progress):
        try:
            signals[recording] = read(recording)
        except DamagedFileError as error:
            lost.append((recording.name, str(error)))
        except OSError as error:
            lost.append((recording.name, error.strerror or str(error)))
    return signals


def _use_common_channels(signals: dict[Recording, Signal], lost: list[LostFile]) -> Channels:
    """Bring the most common set of channels into one order; move recordings with other channels to `lost`."""
    _check_any_usable(signals, lost)
    counts = Counter(frozenset(signal.channels) for signal in signals.values())
    common = counts.most_common(1)[0][0]
    channels = next(signal.channels for signal in signals.values() if frozenset(signal.channels) == common)
    for recording, signal in list(signals.items()):
        if frozenset(signal.channels) == common:
            signals[recording] = signal.select(channels)
        else:
            del signals[recording]
            reason = f"must have the channels of most files, {', '.join(channels)}, got {', '.join(signal.channels)}"
            lost.append((recording.name, reason))
    return channels


def _common_rate(config: ActivityConfig, published: float | None, signals: dict[Recording, Signal]) -> float | None:
    """The rate to resample to, see `ActivityConfig.rate`. It depends on training recordings alone."""
    if config.rate is not None or config.mode == "clips":
        return config.rate
    if published is not None:
        return published
    training = [signal.times for recording, signal in signals.items() if recording.split == "train"]
    rates = [median_rate(times) for times in training if times is not None]
    return float(np.median(rates)) if rates else None


def _resample_all(
    signals: dict[Recording, Signal], rate: float | None, lost: list[LostFile]
) -> dict[Recording, np.ndarray]:
    samples = {}
    for recording, signal in signals.items():
        try:
            samples[recording] = resample(signal, rate)
        except DamagedFileError as error:
            lost.append((recording.name, str(error)))
    return samples


def _usable(recordings: Sequence[Recording], samples: dict[Recording, np.ndarray]) -> list[Recording]:
    """The recordings that were read, and those that the split does not use."""
    return [recording for recording in recordings if recording.split is None or recording in samples]


def _standardized_splits(
    recordings: Sequence[Recording],
    samples: dict[Recording, np.ndarray],
    config: ActivityConfig,
    lost: list[LostFile],
) -> tuple[Tensor, Tensor, list[WindowSet]]:
    """Mean and deviation of the training windows, and the windows of all splits standardized with them.

    Recordings that are not finite then, because a value is too large, move from `samples` to `lost`.
    """
    while True:
        _check_lost(lost, len(samples), config.max_lost)
        usable = _usable(recordings, samples)
        raw = [_cut_split(usable, samples, split, config) for split in SPLITS]
        mean, std = channel_statistics(raw[0].x.numpy())
        splits = [replace(windows, x=standardize(windows.x, mean, std)) for windows in raw]
        infinite = {i for windows in splits for i in _infinite_recordings(windows)}
        if not infinite:
            return mean, std, splits
        for i in sorted(infinite):
            peak = np.abs(samples.pop(usable[i])).max()
            lost.append((usable[i].name, f"must be finite after standardization, got values up to {peak:.6g}"))


def _infinite_recordings(windows: WindowSet) -> list[int]:
    """The recordings with a value that is not finite."""
    finite = windows.x.isfinite()
    return [] if finite.all() else windows.recording[~finite.all(dim=2).all(dim=1)].unique().tolist()


def _cut_split(
    recordings: Sequence[Recording], samples: dict[Recording, np.ndarray], split: str, config: ActivityConfig
) -> WindowSet:
    """Cut the recordings of one split into windows, which are not standardized yet."""
    indices = [i for i, recording in enumerate(recordings) if recording.split == split]
    if not indices:
        raise ValueError(f"split must leave usable recordings for {split}, got {config.split!r}, which leaves none")
    windows = [make_windows(samples[recordings[i]], config.mode, config.length, config.overlap) for i in indices]
    counts = torch.tensor([len(x) for x in windows])
    labels = torch.tensor([recordings[i].label for i in indices])
    x = torch.from_numpy(np.concatenate(windows))
    return WindowSet(x, labels.repeat_interleave(counts), torch.tensor(indices).repeat_interleave(counts))


def _check_any_usable(usable: Collection[Recording], lost: list[LostFile]) -> None:
    if not usable:
        raise TooManyLostError("\n".join([f"none of {len(lost)} files can be used:", *_list_lost(lost)]), lost)


def _check_classes(train: WindowSet, classes: Sequence[str]) -> None:
    """Refuse one class: a model that knows nothing else is always right."""
    present = train.y.unique().tolist()
    if len(present) < 2:
        raise ValueError(f"training data must have 2 or more classes, got 1: {classes[present[0]]}")


def _check_lost(lost: list[LostFile], usable: int, max_lost: float) -> None:
    total = len(lost) + usable
    if len(lost) > max_lost * total:
        first = (
            f"max_lost must cover the unusable files, {len(lost)} of {total} ({len(lost) / total:.1%}), "
            f"got {max_lost:g}; raise it to continue without them:"
        )
        raise TooManyLostError("\n".join([first, *_list_lost(lost)]), lost)
