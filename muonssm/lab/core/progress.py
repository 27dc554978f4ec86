"""Progress of a run: the bar, TensorBoard curves, and the rows of history.json and timing.json."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from .task import Metric


class Clock(TrainerCallback):
    """Adds training time (without validations and checkpoints) and tokens per second to every log.

    A resumed run continues from the last log of its checkpoint.
    """

    def __init__(self, tokens_per_step: int | None) -> None:
        self.tokens_per_step = tokens_per_step
        self.seconds = self.started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Continue the time of a resumed run."""
        self.seconds = next((row["seconds"] for row in reversed(state.log_history) if "seconds" in row), 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Start the clock."""
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Stop the clock."""
        self.seconds += time.perf_counter() - self.started

    def add(self, logs: dict[str, float], step: int) -> None:
        """Add both to a training log."""
        if "loss" in logs:
            logs["seconds"] = round(self.seconds, 3)
            if self.tokens_per_step and self.seconds:
                logs["tokens_per_second"] = round(step * self.tokens_per_step / self.seconds, 1)


class ProgressBar(TrainerCallback):
    """A progress bar over steps with the loss, the speed and the headline validation score."""

    def __init__(self, name: str, metrics: Sequence[Metric]) -> None:
        self.name = name
        self.bar: Any = None
        self.shown: dict[str, str] = {}
        first = metrics[0]
        self.keys = {
            "loss": "loss",
            "tokens_per_second": "tokens/s",
            f"eval_{first.name}": f"validation {first.title}",
        }

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Open the bar at the step where training starts."""
        from tqdm import tqdm

        shown = {"total": state.max_steps, "initial": state.global_step, "disable": not state.is_world_process_zero}
        self.bar = tqdm(desc=self.name, unit="step", leave=False, **shown)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Advance the bar."""
        self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **others: Any) -> None:
        """Show the newest values."""
        self.shown |= {self.keys[key]: f"{value:.4g}" for key, value in (logs or {}).items() if key in self.keys}
        if self.bar is not None:
            self.bar.set_postfix(self.shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar from the terminal. A second call does nothing."""
        if self.bar is not None:
            self.bar.close()


def tensorboard(path: Path) -> TensorBoardCallback:
    """A callback that writes TensorBoard curves to a folder."""
    from torch.utils.tensorboard import SummaryWriter

    return TensorBoardCallback(SummaryWriter(str(path)))


def history(log: Sequence[dict[str, Any]], metrics: Sequence[Metric]) -> list[dict[str, float]]:
    """One row per log: training loss, validation loss and scores, learning rate."""
    scores = {f"eval_{name}" for name in (*(metric.name for metric in metrics), "loss")}
    return _rows(log, {"loss", "learning_rate", "grad_norm"} | scores)


def timing(log: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """One row per log: seconds of training so far, and tokens per second."""
    return [row for row in _rows(log, {"seconds", "tokens_per_second"}) if "seconds" in row]


def _rows(log: Sequence[dict[str, Any]], keys: set[str]) -> list[dict[str, float]]:
    rows: dict[float, dict[str, float]] = {}
    for entry in log:
        if "epoch" not in entry or "train_runtime" in entry:
            continue
        row = rows.setdefault(entry["step"], {"epoch": entry["epoch"], "step": entry["step"]})
        row |= {key.replace("eval_", "validation_"): value for key, value in entry.items() if key in keys}
    return list(rows.values())
