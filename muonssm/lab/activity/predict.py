"""Classify new recordings with a trained model: a whole file (`predict`), or sample by sample (`stream`)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np
import torch

from muonssm.lab.core.untrusted import MAX_LINE, printable
from muonssm.models.activity import ActivityClassifier

from .config import ActivityConfig
from .dataset import read_recording
from .stream import ActivityStream
from .windows import make_windows, standardize, window_hop

LARGEST = float(np.finfo(np.float32).max)
MAX_SHOWN = 200  # characters of a wrong line


class Prediction(NamedTuple):
    """A window's first and last sample, its class and the class's probability; from `stream` also us per sample."""

    start: int
    end: int
    label: str
    probability: float
    microseconds: float | None = None

    def __str__(self) -> str:
        timing = "" if self.microseconds is None else f"  {self.microseconds:7.0f} us per sample"
        return f"{self.start:>8} to {self.end:<8} {printable(self.label):<28} {self.probability:6.1%}{timing}"


@torch.inference_mode()
def predict(model: ActivityClassifier, config: ActivityConfig, metadata: dict[str, Any], path: str) -> list[Prediction]:
    """Classify every window of a file, cut as for training."""
    samples = read_recording(path, metadata["channels"], metadata["rate"], config.source)
    x = _standardize(make_windows(samples, config.mode, config.length, config.overlap), metadata)
    probabilities = model(x)["logits"].softmax(dim=1)
    is_one_window = config.mode == "clips" or len(samples) < config.length
    hop = window_hop(config.length, config.overlap)
    predictions = []
    for i, row in enumerate(probabilities):
        start, end = (0, len(samples) - 1) if is_one_window else (i * hop, i * hop + config.length - 1)
        _check_finite(x[i], row, f"{path}, samples {start} to {end},", f"values up to {abs(samples).max():.6g}")
        predictions.append(Prediction(start, end, metadata["classes"][int(row.argmax())], float(row.max())))
    return predictions


def stream(
    model: ActivityClassifier, config: ActivityConfig, metadata: dict[str, Any], samples: Iterable[Sequence[float]]
) -> Iterator[Prediction]:
    """Classify each window as soon as it ends, in constant memory.

    A sample is one number per channel. Samples must have the rate of the training data.
    """
    if config.mode != "windows":
        raise ValueError(f"data.mode must be 'windows' for a run that reads a stream, got {config.mode!r}")
    activity_stream = ActivityStream(model, config.length, config.overlap)
    seconds, count = 0.0, 0
    for count, sample in enumerate(samples, start=1):
        _check_sample(sample, count, metadata["channels"])
        start = time.perf_counter()
        x = _standardize(torch.tensor(sample, dtype=torch.float32), metadata)
        window = activity_stream.feed(x)
        seconds += time.perf_counter() - start
        probabilities = torch.zeros(0) if window is None else window.probabilities
        _check_finite(x, probabilities, f"the stream up to sample {count}", f"{list(sample)} in the last")
        if window is not None:
            best = int(window.probabilities.argmax())
            yield Prediction(
                window.end - config.length + 1,
                window.end,
                metadata["classes"][best],
                float(window.probabilities[best]),
                1e6 * seconds / count,
            )
    if count < config.length:
        raise ValueError(f"a stream must have {config.length} or more samples, one window, got {count}")


def file_samples(path: str, config: ActivityConfig, metadata: dict[str, Any]) -> Iterator[Sequence[float]]:
    """Read the samples of a file at the rate of the training data."""
    yield from read_recording(path, metadata["channels"], metadata["rate"], config.source).tolist()


def piped_samples(lines: TextIO, channels: Sequence[str]) -> Iterator[Sequence[float]]:
    """Read samples from a pipe: one per line, numbers separated by commas, in the order of `channels`.

    The first line can be a header. Then the columns named in `channels` are used, and others, such as a time, are not.
    """
    columns: list[int] | None = None
    for number, line in enumerate(line for line in _read_lines(lines) if line.strip()):
        cells = [cell.strip() for cell in line.split(",")]
        if number == 0 and not any(_is_finite(cell) for cell in cells):
            missing = [name for name in channels if name not in cells]
            if missing:
                raise ValueError(f"the header must name {', '.join(channels)}, got none named {', '.join(missing)}")
            columns = [cells.index(name) for name in channels]
            continue
        selected = cells if columns is None else [cells[i] for i in columns if i < len(cells)]
        if not all(_is_finite(cell) for cell in selected):
            raise ValueError(f"a line must be finite numbers separated by commas, got {line.strip()[:MAX_SHOWN]!r}")
        yield [float(cell) for cell in selected]


def _check_sample(sample: Sequence[float], number: int, channels: Sequence[str]) -> None:
    if len(sample) != len(channels):
        names = ", ".join(channels)
        raise ValueError(f"a sample must have {len(channels)} numbers ({names}), got {len(sample)} in sample {number}")
    if not all(_is_finite(value) for value in sample):
        raise ValueError(f"a sample must have finite numbers (float32), got {list(sample)} in sample {number}")


def _check_finite(x: torch.Tensor, probabilities: torch.Tensor, what: str, got: str) -> None:
    """Refuse what the model has no answer for, because numbers overflow on the way: standardized x, probabilities."""
    if not (x.isfinite().all() and probabilities.isfinite().all()):
        raise ValueError(
            f"{what} must have values near those of the training data, got {got}: the probabilities are not finite"
        )


def _is_finite(cell: str | float) -> bool:
    """Whether a number is finite as float32."""
    try:
        return abs(float(cell)) <= LARGEST
    except (ValueError, OverflowError):
        return False


def _read_lines(lines: TextIO) -> Iterator[str]:
    """The lines of a pipe; one that does not end is refused before it fills the memory."""
    try:
        while line := lines.readline(MAX_LINE + 1):
            if len(line) > MAX_LINE:
                raise ValueError(f"a line must have {MAX_LINE} characters or less, got more: {line[:MAX_SHOWN]!r}")
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"a line must be text, got bytes that are not: {error}") from error


def _standardize(x: Any, metadata: dict[str, Any]) -> torch.Tensor:
    return standardize(x, torch.tensor(metadata["mean"]), torch.tensor(metadata["std"]))
