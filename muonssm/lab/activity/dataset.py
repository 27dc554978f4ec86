"""Activity recognition: sensor recordings cut into windows, split and standardised.

    data = load_activity(ActivityConfig())                  # the embedded `watch` data, split by subject
    data.train.x, data.train.y                              # [n, 512, 6] and [n]

A recording is read, brought to one rate, and cut; its windows all stay in its part. The statistics that standardise
every part are of training windows alone. Files that cannot be used are counted and named, never just left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muonssm.checks import is_int, is_number

from .recordings import Channels, DamagedFileError, Lost, Recording, Signal, Source, even, own_rate
from .sources import folder, mmact, muwiges, uestc, watch
from .splits import PARTS, assign
from .windows import MODES, WindowSet, cut, leftover, standardise, statistics

SOURCES: dict[str, Source] = {module.SOURCE.name: module.SOURCE for module in (watch, muwiges, uestc, mmact, folder)}
SHOWN = 10  # files or classes named in a message; the rest are counted


class TooManyLostError(ValueError):
    """More files cannot be used than `max_lost` allows; `lost` has all of them, with the reasons."""

    def __init__(self, message: str, lost: list[Lost]) -> None:
        super().__init__(message)
        self.lost = lost


@dataclass(frozen=True)
class ActivityConfig:
    """Which recordings, and how they become windows.

    Attributes:
        source: `"watch"` (embedded), `"MuWiGes"`, `"UESTC-MMEA-CL"`, `"MMAct"` or `"folder"`.
        root: the folder with the data; None for `"watch"`.
        length: samples of a window.
        overlap: share of a window that the next one has too, in [0, 1).
        mode: `"windows"` cuts recordings into windows (a shorter one becomes one window, resampled); `"clips"` makes
            each recording one window, resampled.
        rate: samples a second that recordings are brought to. None: the published rate, or else what is usual among
            the training recordings; with `"clips"`, each recording's own.
        split: `"subject"`, `"kfold"` (over subjects where there are any, otherwise over recordings), `"given"` (by the
            data), or `"cross-subject"`, `"cross-scene"`, `"cross-session"` for MMAct. None: the source's usual one.
        fold: which group is the test part, from 0; the next one is validation. Where a split comes with the data and
            has no validation part, which group of the training part is.
        folds: how many groups, 3 or more.
        seed: of the shuffle before groups are dealt.
        max_lost: share of files that may be unusable before loading stops.
        channels: names of the channels to take, in this order; None takes all (of MMAct all but orientation).
    """

    source: str = "watch"
    root: str | Path | None = None
    length: int = 512
    overlap: float = 0.5
    mode: str = "windows"
    rate: float | None = None
    split: str | None = None
    fold: int = 0
    folds: int = 5
    seed: int = 0
    max_lost: float = 0.01
    channels: Channels | None = None

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}; it may be one of {tuple(SOURCES)}")
        source = SOURCES[self.source]
        if (self.root is None) != source.embedded:
            may = "None: the data is embedded" if source.embedded else "the folder with the data"
            raise ValueError(f"root is {self.root!r} with source {self.source!r}; it may be {may}")
        object.__setattr__(self, "root", None if self.root is None else str(Path(self.root).resolve()))
        object.__setattr__(self, "split", source.splits[0] if self.split is None else self.split)
        if self.split not in source.splits:
            raise ValueError(f"split is {self.split!r} with source {self.source!r}; it may be one of {source.splits}")
        if self.mode not in MODES:
            raise ValueError(f"mode is {self.mode!r}; it may be one of {MODES}")
        self._check_numbers()
        self._check_channels(source)

    def _check_numbers(self) -> None:
        for name, least in (("length", 2), ("folds", 3), ("fold", 0), ("seed", 0)):
            value = getattr(self, name)
            if not is_int(value, least):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")
        if self.fold >= self.folds:
            raise ValueError(f"fold is {self.fold} with folds {self.folds}; it may be 0 to {self.folds - 1}")
        if not is_number(self.overlap) or not 0 <= self.overlap < 1:
            raise ValueError(f"overlap is {self.overlap!r}; it may be in [0, 1)")
        if not is_number(self.max_lost) or not 0 <= self.max_lost <= 1:
            raise ValueError(f"max_lost is {self.max_lost!r}; it may be in [0, 1]")
        if self.rate is not None and not (is_number(self.rate) and 0 < self.rate < math.inf):
            raise ValueError(f"rate is {self.rate!r}; it may be None or samples a second, > 0")

    def _check_channels(self, source: Source) -> None:
        if self.channels is None:
            return
        if isinstance(self.channels, str) or not all(isinstance(name, str) for name in self.channels):
            raise TypeError(f"channels is {self.channels!r}; it may be None or a tuple of names")
        object.__setattr__(self, "channels", tuple(self.channels))
        if not self.channels or len(set(self.channels)) < len(self.channels):
            raise ValueError(f"channels is {self.channels!r}; it may be one or more names, each once")
        unknown = set(self.channels) - set(source.channels or self.channels)
        if unknown:
            raise ValueError(f"channels has {min(unknown)!r}; with source {self.source!r} it may be {source.channels}")


@dataclass(frozen=True, eq=False)
class ActivityData:
    """Windows in three parts, and what they came from.

    Attributes:
        config: what was asked for.
        train, validation, test: standardised windows.
        classes, channels: names.
        mean, std: float32 `[C]`, of the training windows; `standardise` takes them for a new recording.
        rate: samples a second; None where each recording kept its own.
        recordings: all usable ones, with those that the split leaves out; `WindowSet.recording` counts them.
        lost: files that could not be used, with the reason.
        stretched: recordings shorter than a window, resampled to one.
        duplicates: samples left out because there was one with the same time stamp.
        outside: share of samples after the last window of their recording.
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
    lost: list[Lost]
    stretched: int
    duplicates: int
    outside: float

    def summary(self) -> str:
        """What there is in each part, and what was lost, in a few lines."""
        rate = "their own rates" if self.rate is None else f"{self.rate:g} Hz"
        lines = [
            f"{self.config.source}: {len(self.recordings)} recordings at {rate}, {len(self.classes)} classes, "
            f"{len(self.channels)} channels, {self.config.mode} of {self.config.length}, split {self.config.split!r}"
        ]
        for part in PARTS:
            lines.append(f"  {part:<10} {_describe(self.recordings, part, getattr(self, part), len(self.classes))}")
        unused = sum(recording.split is None for recording in self.recordings)
        untrained = [name for i, name in enumerate(self.classes) if i not in set(self.train.y.tolist())]
        notes = (
            (unused, f"{unused} recordings are in no part of this split"),
            (untrained, f"no training windows for {len(untrained)} classes: {_first(untrained)}"),
            (self.stretched, f"{self.stretched} recordings shorter than a window, resampled to one"),
            (self.outside, f"{self.outside:.1%} of the samples come after the last window of their recording"),
            (self.duplicates, f"{self.duplicates} samples left out for a time stamp that was there before"),
        )
        lines += [f"  {text}" for count, text in notes if count]
        lines.append(f"  lost {len(self.lost)} of {len(self.lost) + len(self.recordings)} files")
        return "\n".join([*lines, *_name(self.lost)])


def _describe(recordings: Sequence[Recording], part: str, windows: WindowSet, classes: int) -> str:
    chosen = [recording for recording in recordings if recording.split == part]
    subjects = {recording.subject for recording in chosen} - {None}
    text = (
        f"{len(chosen):>6} recordings {len(windows):>7} windows {len(set(windows.y.tolist())):>4} of {classes} classes"
    )
    return f"{text} {len(subjects):>4} subjects" if subjects else text


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:SHOWN], f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else names)


def _name(lost: Sequence[Lost]) -> list[str]:
    lines = [f"    {file}: {reason}" for file, reason in lost[:SHOWN]]
    return [*lines, f"    and {len(lost) - SHOWN} more"] if len(lost) > SHOWN else lines


def load_activity(config: ActivityConfig, progress: bool = True) -> ActivityData:
    """Reads, splits, cuts and standardises; `progress` shows a bar when reading takes more than a second."""
    source = SOURCES[config.source]
    if config.root is not None and not Path(config.root).is_dir():
        raise FileNotFoundError(f"root is {config.root!r}, which is no folder; it may be the folder with the data")
    listing = source.find(Path(config.root or ""), config.channels)
    _check_any(listing.recordings, listing.lost)
    recordings = assign(listing, str(config.split), config.fold, config.folds, config.seed)
    lost = list(listing.lost)
    signals = _read([recording for recording in recordings if recording.split], listing.read, lost, progress)
    channels = _agree(signals, lost)
    rate = _common_rate(config, source, signals)
    samples = _resample(signals, rate, lost)
    _check_lost(lost, len(samples), config.max_lost)

    kept = [recording for recording in recordings if recording.split is None or recording in samples]
    mean, std, (train, validation, test) = _standardised(kept, samples, config)
    lengths = [len(x) for x in samples.values()] if config.mode == "windows" else []
    outside = sum(leftover(n, config.length, config.overlap) for n in lengths)
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
        recordings=kept,
        lost=lost,
        stretched=sum(n < config.length for n in lengths),
        duplicates=sum(signal.duplicates for signal in signals.values()),
        outside=outside / max(1, sum(lengths)),
    )


def _standardised(
    recordings: Sequence[Recording], samples: dict[Recording, np.ndarray], config: ActivityConfig
) -> tuple[Tensor, Tensor, list[WindowSet]]:
    """Mean and deviation of the training windows, and the windows of all three parts standardised with them."""
    raw = []
    for part in PARTS:
        chosen = [(i, r, samples[r]) for i, r in enumerate(recordings) if r.split == part]
        raw.append(_cut(chosen, part, config))
    mean, std = statistics(raw[0].x.numpy())
    return mean, std, [replace(windows, x=standardise(windows.x, mean, std)) for windows in raw]


def _read(
    recordings: Sequence[Recording], read: Callable[[Recording], Signal], lost: list[Lost], progress: bool
) -> dict[Recording, Signal]:
    """The signals of those that can be read; the others join `lost`."""
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


def _agree(signals: dict[Recording, Signal], lost: list[Lost]) -> Channels:
    """The channels that most recordings have; they are brought into one order, and those with others join `lost`."""
    _check_any(signals, lost)
    sets = Counter(frozenset(signal.channels) for signal in signals.values())
    most = sets.most_common(1)[0][0]
    channels = next(signal.channels for signal in signals.values() if frozenset(signal.channels) == most)
    for recording, signal in list(signals.items()):
        if frozenset(signal.channels) == most:
            signals[recording] = signal.select(channels)
        else:
            del signals[recording]
            reason = f"has the channels {', '.join(signal.channels)}; most files have {', '.join(channels)}"
            lost.append((recording.name, reason))
    return channels


def _common_rate(config: ActivityConfig, source: Source, signals: dict[Recording, Signal]) -> float | None:
    """What `rate` asks for; see there. It depends on no recording outside the training part."""
    if config.rate is not None or config.mode == "clips":
        return config.rate
    if source.rate is not None:
        return source.rate
    training = [signal.times for recording, signal in signals.items() if recording.split == "train"]
    rates = [own_rate(times) for times in training if times is not None]
    return float(np.median(rates)) if rates else None


def _resample(signals: dict[Recording, Signal], rate: float | None, lost: list[Lost]) -> dict[Recording, np.ndarray]:
    samples = {}
    for recording, signal in signals.items():
        try:
            samples[recording] = even(signal, rate)
        except DamagedFileError as error:
            lost.append((recording.name, str(error)))
    return samples


def _check_any(usable: Collection[Recording], lost: list[Lost]) -> None:
    if not usable:
        raise TooManyLostError("\n".join([f"none of {len(lost)} files can be used:", *_name(lost)]), lost)


def _check_lost(lost: list[Lost], usable: int, max_lost: float) -> None:
    total = len(lost) + usable
    if len(lost) > max_lost * total:
        first = (
            f"{len(lost)} of {total} files cannot be used, which is {len(lost) / total:.1%}; max_lost is {max_lost:g}, "
            "it may be set higher to go on without them:"
        )
        raise TooManyLostError("\n".join([first, *_name(lost)]), lost)


def _cut(chosen: Sequence[tuple[int, Recording, np.ndarray]], part: str, config: ActivityConfig) -> WindowSet:
    """The windows of one part, not yet standardised."""
    if not chosen:
        raise ValueError(f"split is {config.split!r}, and of the recordings for {part} none can be used")
    pieces = [cut(x, config.mode, config.length, config.overlap) for _, _, x in chosen]
    counts = torch.tensor([len(piece) for piece in pieces])
    labels = torch.tensor([recording.label for _, recording, _ in chosen])
    index = torch.tensor([i for i, _, _ in chosen])
    x = torch.from_numpy(np.concatenate(pieces))
    return WindowSet(x, labels.repeat_interleave(counts), index.repeat_interleave(counts))


def read_recording(
    path: str | Path, channels: Sequence[str] | None = None, rate: float | None = None, source: str = "folder"
) -> np.ndarray:
    """One file as float32 `[T, C]` at one rate, the way `load_activity` reads it: what a trained model takes.

    Pass `channels`, `rate` and `source` of the data that the model was trained on. Any CSV file will do for `"folder"`
    and `"watch"`; for `"MMAct"`, one of a recording's files stands for all. Raises `DamagedFileError` with the reason
    if the file cannot be used.
    """
    if source not in SOURCES:
        raise ValueError(f"source is {source!r}; it may be one of {tuple(SOURCES)}")
    try:
        recorded = SOURCES[source].read_file(Path(path), None if channels is None else tuple(channels))
        return even(recorded, rate)
    except DamagedFileError as error:
        raise DamagedFileError(f"{path} {error}") from error
