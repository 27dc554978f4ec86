"""One recording: what is known about it, its samples, and resampling them to one rate.

Shapes: T samples of C channels. `samples` is `[T, C]`, float32; `times` is `[T]`, float64, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Channels = tuple[str, ...]
LostFile = tuple[str, str]  # a file that cannot be used, and the reason

MAX_GROWTH = 100  # resampling to more than 100 times as many samples means that the time stamps are wrong
MAX_SAMPLES = 100_000_000  # of a recording after resampling; two weeks at 80 Hz
MAX_RATE = 1e9  # in Hz; a shorter median time step means that the time stamps are wrong
HERE = "muonssm.lab.activity.recordings"


class DamagedFileError(ValueError):
    """A file that cannot be used. The message is a predicate ("is empty") that is printed after the file's name."""


@dataclass(frozen=True)
class Recording:
    """What is known about a recording besides its samples.

    Attributes:
        name: the name of its file in the data set.
        label: index into the classes.
        subject: the person who was recorded; None if the data set does not say.
        split: `"train"`, `"validation"` or `"test"`; None if the chosen split does not use the recording.
    """

    name: str
    label: int
    subject: str | None = None
    split: str | None = None


class Signal(NamedTuple):
    """The samples of one recording, ordered by time; `times` is None if the file has no time stamps."""

    samples: np.ndarray
    times: np.ndarray | None
    channels: Channels
    duplicates: int = 0  # samples dropped because an earlier row has the same time stamp

    @classmethod
    def sorted_by_time(cls, samples: np.ndarray, times: np.ndarray | None, channels: Channels) -> Signal:
        """Sort samples by time. Of several samples with the same time stamp, keep the first in the file."""
        duplicates = 0
        if times is not None:
            times, first = np.unique(times, return_index=True)
            duplicates = len(samples) - len(first)
            samples = samples[first]
        if len(samples) < 2:
            raise DamagedFileError(f"must have 2 or more samples at different times, got {len(samples)}")
        if times is not None:
            _check_times(times)
        converted = to_float32(samples)
        place = first_infinite(converted)
        if place is not None:
            row, column = place
            got = f"{samples[row, column]} in sample {row + 1}"
            raise DamagedFileError(f"must have finite float32 numbers in column {channels[column]!r}, got {got}")
        return cls(converted, times, channels, duplicates)

    def select(self, channels: Channels | None) -> Signal:
        """Select channels, in this order; None selects all."""
        if channels is None or channels == self.channels:
            return self
        missing = [name for name in channels if name not in self.channels]
        if missing:
            raise DamagedFileError(f"must have the column {missing[0]!r}, got {', '.join(self.channels)}")
        return self._replace(samples=self.samples[:, [self.channels.index(c) for c in channels]], channels=channels)


def to_float32(values: np.ndarray) -> np.ndarray:
    """Convert to float32; numbers beyond its largest become infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def first_infinite(values: np.ndarray) -> tuple[int, int] | None:
    """Row and column of the first value `[rows, columns]` that is not a finite number; None if all are."""
    finite = np.isfinite(values)
    if finite.all():
        return None
    row, column = np.argwhere(~finite)[0].tolist()
    return row, column


def _check_times(times: np.ndarray) -> None:
    """Refuse time stamps that no clock writes: they would make the rate of the recording infinite or 0."""
    step = float(np.median(np.diff(times)))
    if not 1 / MAX_RATE <= step < np.inf:
        wanted = f"a median time step of {1 / MAX_RATE:g} s or more ({HERE}.MAX_RATE)"
        raise DamagedFileError(f"must have {wanted}, got {step:g} s")


def median_rate(times: np.ndarray) -> float:
    """Samples per second from the median time step, rounded to four digits because dates are exact to 0.2 us only."""
    return float(f"{1 / np.median(np.diff(times)):.4g}")


def sample_count(duration: float, rate: float, before: int) -> int:
    """Count the samples in `duration` seconds, both ends included; tolerates a thousandth of a step at the end.

    `before` is how many samples the recording has; many more mean that its time stamps are wrong.
    """
    steps = duration * rate + 1e-3
    if not steps < MAX_GROWTH * before:
        raise DamagedFileError(
            f"must have its time stamps in seconds, got {before} of them over {duration:.6g} s, which makes "
            f"{np.floor(steps) + 1:.10g} samples at {rate:g} Hz; name the time column time_ms, time_us or time_ns for "
            f"other units ({HERE}.MAX_GROWTH is {MAX_GROWTH})"
        )
    if not steps < MAX_SAMPLES:
        wanted = f"{MAX_SAMPLES} samples or less at {rate:g} Hz ({HERE}.MAX_SAMPLES)"
        raise DamagedFileError(f"must have {wanted}, got {np.floor(steps) + 1:.10g}")
    return int(steps) + 1


def resample(signal: Signal, rate: float | None = None) -> np.ndarray:
    """Interpolate linearly between time stamps; returns `[T, C]` at one rate, or at the file's median rate for None.

    Samples without time stamps are returned unchanged: they count as evenly spaced at that rate. No low-pass filter
    is applied before downsampling.
    """
    if signal.times is None:
        return signal.samples
    times = signal.times - signal.times[0]
    rate = median_rate(times) if rate is None else rate
    count = sample_count(float(times[-1]), rate, len(times))
    if count < 2:
        raise DamagedFileError(f"must last 2 samples or more at {rate:g} Hz, got {times[-1]:.6g} s")
    return interpolate(signal.samples, times, np.arange(count) / rate)


def interpolate(samples: np.ndarray, times: np.ndarray, new_times: np.ndarray) -> np.ndarray:
    """Interpolate samples `[T, C]` taken at `times` linearly at `new_times`; float32."""
    return np.stack([np.interp(new_times, times, channel) for channel in samples.T], axis=1).astype(np.float32)
