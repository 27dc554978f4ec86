"""From recordings to windows of one length, and their standardisation.

Shapes: T samples, C channels, n windows; `samples` is `[T, C]`, windows are `[n, length, C]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .recordings import interpolate

MODES = ("windows", "clips")


@dataclass(frozen=True, eq=False)
class WindowSet:
    """The windows of one split.

    Attributes:
        x: `[n, length, C]`, float32, standardised.
        y: `[n]`, int64, index into the classes.
        recording: `[n]`, int64, index into the recordings; windows of one recording follow each other in time.
    """

    x: Tensor
    y: Tensor
    recording: Tensor

    def __len__(self) -> int:
        return len(self.x)


def hop_of(length: int, overlap: float) -> int:
    """Steps from the start of a window to the start of the next."""
    return max(1, round(length * (1 - overlap)))


def windows_of(samples: np.ndarray, length: int, overlap: float = 0.5) -> np.ndarray:
    """Cuts `[T, C]` into `[n, length, C]`; never empty.

    A window starts every `length * (1 - overlap)` samples; samples after the last full window belong to none. A
    recording shorter than a window becomes one, resampled to `length` (as `clip_of` does): padding would show the
    model how long a recording is, and put values there that no sensor gave.
    """
    if len(samples) < length:
        return clip_of(samples, length)
    windows = np.lib.stride_tricks.sliding_window_view(samples, length, axis=0)
    return np.ascontiguousarray(windows[:: hop_of(length, overlap)].transpose(0, 2, 1))


def leftover(samples: int, length: int, overlap: float) -> int:
    """How many samples of a recording come after its last full window; 0 for one that was resampled."""
    return (samples - length) % hop_of(length, overlap) if samples >= length else 0


def clip_of(samples: np.ndarray, length: int) -> np.ndarray:
    """The whole of `[T, C]` as one window `[1, length, C]`, first and last sample kept, linear in between."""
    steps = np.arange(len(samples), dtype=np.float64)
    return interpolate(samples, steps, np.linspace(0, len(samples) - 1, length))[None]


def cut(samples: np.ndarray, mode: str, length: int, overlap: float) -> np.ndarray:
    """Windows or the whole clip, by `mode`."""
    return windows_of(samples, length, overlap) if mode == "windows" else clip_of(samples, length)


def statistics(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and deviation `[C]` over windows and time. A channel that never changes gets deviation 1."""
    channels = [windows[..., c].astype(np.float64) for c in range(windows.shape[-1])]
    mean = np.array([channel.mean() for channel in channels])
    std = np.array([channel.std() for channel in channels])
    std[std <= 1e-7 * np.abs(mean)] = 1.0
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)


def standardise(x: Tensor | np.ndarray, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std, channel by channel, for `[..., C]`; float32."""
    return (torch.as_tensor(x, dtype=torch.float32) - mean) / std
