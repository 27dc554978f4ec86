"""A trained model on new files: whole windows (`predict`) and sample by sample (`stream`)."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import torch

from muonssm.models.activity import ActivityClassifier

from .dataset import ActivityConfig, read_recording
from .stream import ActivityStream
from .windows import cut, hop_of, standardise


class Found(NamedTuple):
    """A window's samples (first and last), its class, how sure the model is, and microseconds a sample, if measured."""

    start: int
    end: int
    label: str
    probability: float
    microseconds: float | None = None

    def __str__(self) -> str:
        spent = "" if self.microseconds is None else f"  {self.microseconds:7.0f} us a sample"
        return f"{self.start:>8} to {self.end:<8} {self.label:<28} {self.probability:6.1%}{spent}"


@torch.inference_mode()
def predict(model: ActivityClassifier, config: ActivityConfig, metadata: dict[str, Any], path: str) -> list[Found]:
    """Every window of a file, cut as for training."""
    samples = read_recording(path, metadata["channels"], metadata["rate"], config.source)
    x = _standard(cut(samples, config.mode, config.length, config.overlap), metadata)
    probabilities = model(x)["logits"].softmax(dim=1)
    whole = config.mode == "clips" or len(samples) < config.length
    hop = hop_of(config.length, config.overlap)
    found = []
    for i, row in enumerate(probabilities):
        start, end = (0, len(samples) - 1) if whole else (i * hop, i * hop + config.length - 1)
        found.append(Found(start, end, metadata["classes"][int(row.argmax())], float(row.max())))
    return found


def stream(
    model: ActivityClassifier, config: ActivityConfig, metadata: dict[str, Any], rows: Iterator[Sequence[float]]
) -> Iterator[Found]:
    """Windows as they end, from rows of one number a channel, at the rate of the training data; in constant memory."""
    if config.mode != "windows":
        raise ValueError("the run was trained on whole clips (data.mode = 'clips'); only one on windows can stream")
    running = ActivityStream(model, config.length, config.overlap)
    spent, number = 0.0, -1
    for number, row in enumerate(rows):
        if len(row) != len(metadata["channels"]):
            names = ", ".join(metadata["channels"])
            raise ValueError(
                f"sample {number} has {len(row)} numbers; it may have {len(metadata['channels'])}: {names}"
            )
        start = time.perf_counter()
        answer = running.feed(_standard(torch.tensor(row, dtype=torch.float32), metadata))
        spent += time.perf_counter() - start
        if answer is not None:
            best = int(answer.probabilities.argmax())
            yield Found(
                answer.end - config.length + 1,
                answer.end,
                metadata["classes"][best],
                float(answer.probabilities[best]),
                1e6 * spent / (number + 1),
            )
    if number + 1 < config.length:
        raise ValueError(
            f"{number + 1} samples came, at the rate of the training data; there may be {config.length} or more"
        )


def rows_of(path: str, config: ActivityConfig, metadata: dict[str, Any]) -> Iterator[Sequence[float]]:
    """The samples of a file at the rate of the training data."""
    yield from read_recording(path, metadata["channels"], metadata["rate"], config.source).tolist()


def rows_from(lines: TextIO, channels: Sequence[str]) -> Iterator[Sequence[float]]:
    """The samples of a pipe: a line each, numbers separated by commas, in the order of `channels`.

    The first line may have names instead; then these say which columns are taken, and others (a time) are left out.
    """
    columns: list[int] | None = None
    for number, line in enumerate(line for line in lines if line.strip()):
        cells = [cell.strip() for cell in line.split(",")]
        if number == 0 and not any(_is_finite(cell) for cell in cells):
            missing = [name for name in channels if name not in cells]
            if missing:
                raise ValueError(f"the first line lacks {', '.join(missing)}; it may name {', '.join(channels)}")
            columns = [cells.index(name) for name in channels]
            continue
        taken = cells if columns is None else [cells[i] for i in columns if i < len(cells)]
        if not all(_is_finite(cell) for cell in taken):
            raise ValueError(f"a line is {line.strip()!r}; it may be finite numbers separated by commas")
        yield [float(cell) for cell in taken]


def _is_finite(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _standard(x: Any, metadata: dict[str, Any]) -> torch.Tensor:
    return standardise(x, torch.tensor(metadata["mean"]), torch.tensor(metadata["std"]))
