"""Classify windows while samples arrive, in constant memory, with the same results as from whole windows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonssm.models.activity import ActivityClassifier, ActivityState

from .windows import window_hop

BLOCK = 16  # samples that are processed in one call of the model


class FinishedWindow(NamedTuple):
    """A window that just ended: the index of its last sample, and a probability per class."""

    end: int
    probabilities: Tensor


class ActivityStream:
    """Feed a trained model sample by sample.

    Windows overlap and each starts from an empty state, so ceil(length / hop) overlapping windows are processed as one
    batch. Samples are buffered and processed in blocks of `BLOCK`, which takes little longer than a single sample. The
    buffer is also processed when a window starts or ends, so results are never late.
    """

    def __init__(self, model: ActivityClassifier, length: int, overlap: float) -> None:
        if model.sizes.bidirectional:
            raise ValueError("bidirectional must be False for a model that reads a stream, got True")
        self.model = model.eval()
        self.length, self.hop = length, window_hop(length, overlap)
        self.open_windows = -(-length // self.hop)
        self.state: ActivityState | None = None
        self.sums = torch.zeros(self.open_windows, model.sizes.d_model)  # per window, of the encoded samples so far
        self.buffer: list[Tensor] = []
        self.count = 0

    @torch.inference_mode()
    def feed(self, sample: Tensor) -> FinishedWindow | None:
        """Add one standardized sample `[C]`; returns a result if a window ends with it."""
        if self.count % self.hop == 0:
            self._process_buffer()
            self._start_window(self.count // self.hop % self.open_windows)
        self.buffer.append(sample)
        self.count += 1
        window, remainder = divmod(self.count - self.length, self.hop)
        ends = window >= 0 and remainder == 0
        if ends or len(self.buffer) == BLOCK:
            self._process_buffer()
        if not ends:
            return None
        logits = self.model.head(self.sums[window % self.open_windows] / self.length)
        return FinishedWindow(self.count - 1, logits.softmax(dim=0))

    def _process_buffer(self) -> None:
        """Run the model on the buffered samples."""
        if self.buffer:
            h, self.state = self.model.encode(torch.stack(self.buffer).expand(self.open_windows, -1, -1), self.state)
            self.sums += h.sum(dim=1)
            self.buffer = []

    def _start_window(self, row: int) -> None:
        """Clear the state of the window that was in `row` of the batch."""
        new = torch.arange(self.open_windows) == row
        self.sums[row] = 0
        if self.state is not None:
            self.state = self.state.map(lambda x: x.masked_fill(new.view(-1, *(1,) * (x.ndim - 1)), 0))
