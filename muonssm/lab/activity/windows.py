"""Cut recordings into windows of one length, and standardize them.

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
        x: `[n, length, C]`, float32, standardized.
        y: `[n]`, int64, index into the classes.
        recording: `[n]`, int64, index into the recordings; windows of one recording are consecutive, ordered by time.
    """

    x: Tensor
    y: Tensor
    recording: Tensor

    def __len__(self) -> int:
        return len(self.x)


def make_windows(samples: np.ndarray, mode: str, length: int, overlap: float) -> np.ndarray:
    """Cut `[T, C]` into windows, or resample it to one window, depending on `mode`."""
    return cut_windows(samples, length, overlap) if mode == "windows" else resample_to_window(samples, length)


def window_hop(length: int, overlap: float) -> int:
    """Samples from the start of a window to the start of the next one."""
    return max(1, round(length * (1 - overlap)))


def cut_windows(samples: np.ndarray, length: int, overlap: float = 0.5) -> np.ndarray:
    """Cut `[T, C]` into one or more windows `[n, length, C]`.

    A window starts every `length * (1 - overlap)` samples. Samples after the last full window are dropped. A recording
    shorter than a window is resampled to one window. It is not padded: padding would tell the model how long the
    recording is, and would contain values that no sensor measured.
    """
    if len(samples) < length:
        return resample_to_window(samples, length)
    windows = np.lib.stride_tricks.sliding_window_view(samples, length, axis=0)
    return np.ascontiguousarray(windows[:: window_hop(length, overlap)].transpose(0, 2, 1))


def count_dropped_samples(samples: int, length: int, overlap: float) -> int:
    """Count the samples after the last full window of a recording; 0 for a recording shorter than a window."""
    return (samples - length) % window_hop(length, overlap) if samples >= length else 0


def resample_to_window(samples: np.ndarray, length: int) -> np.ndarray:
    """Resample all of `[T, C]` linearly to one window `[1, length, C]`; the first and the last sample are kept."""
    positions = np.arange(len(samples), dtype=np.float64)
    return interpolate(samples, positions, np.linspace(0, len(samples) - 1, length))[None]


def channel_statistics(windows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation `[C]` over windows and time.

    The deviation of a channel that is constant, or too small for float32 to divide by, is set to 1.
    """
    channels = [windows[..., c].astype(np.float64) for c in range(windows.shape[-1])]
    mean = np.array([channel.mean() for channel in channels])
    std = np.array([channel.std() for channel in channels])
    std[(std <= 1e-7 * np.abs(mean)) | (std < np.finfo(np.float32).tiny)] = 1.0
    return torch.tensor(mean, dtype=torch.float32), torch.tensor(std, dtype=torch.float32)


def standardize(x: Tensor | np.ndarray, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std per channel, for `[..., C]`; float32."""
    return (torch.as_tensor(x, dtype=torch.float32) - mean) / std
