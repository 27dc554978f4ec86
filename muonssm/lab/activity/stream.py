"""Recognition while samples come in: constant memory, and the same answers as from whole windows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from muonssm.models.activity import ActivityClassifier, ActivityState

from .windows import hop_of

BLOCK = 16  # samples


class Recognised(NamedTuple):
    """What a window that just ended shows: its last sample's number, and a probability for every class."""

    end: int
    probabilities: Tensor


class ActivityStream:
    """Feeds a trained model sample by sample.

    Windows overlap, and each is read from its own start: so many of them are open at a time as begin within one, and
    they go through the model together, as a batch. Samples wait for up to `BLOCK` of them to go through at once, which
    takes little longer than one; where a window ends, none waits.
    """

    def __init__(self, model: ActivityClassifier, length: int, overlap: float) -> None:
        if model.sizes.bidirectional:
            raise ValueError("the model is bidirectional; only one that looks back alone can read a stream")
        self.model = model.eval()
        self.length, self.hop = length, hop_of(length, overlap)
        self.open = -(-length // self.hop)
        self.state: ActivityState | None = None
        self.sums = torch.zeros(self.open, model.sizes.d_model)
        self.waiting: list[Tensor] = []
        self.count = 0

    @torch.inference_mode()
    def feed(self, sample: Tensor) -> Recognised | None:
        """Takes one standardised sample `[C]`; answers when a window ends with it."""
        if self.count % self.hop == 0:
            self._read()
            self._begin(self.count // self.hop % self.open)
        self.waiting.append(sample)
        self.count += 1
        over, rest = divmod(self.count - self.length, self.hop)
        ends = over >= 0 and rest == 0
        if ends or len(self.waiting) == BLOCK:
            self._read()
        if not ends:
            return None
        logits = self.model.head(self.sums[over % self.open] / self.length)
        return Recognised(self.count - 1, logits.softmax(dim=0))

    def _read(self) -> None:
        """What waits goes through the model."""
        if self.waiting:
            h, self.state = self.model.encode(torch.stack(self.waiting).expand(self.open, -1, -1), self.state)
            self.sums += h.sum(dim=1)
            self.waiting = []

    def _begin(self, row: int) -> None:
        """A window starts in `row`: whatever was there is forgotten."""
        new = torch.arange(self.open) == row
        self.sums[row] = 0
        if self.state is not None:
            self.state = self.state.map(lambda x: x.masked_fill(new.view(-1, *(1,) * (x.ndim - 1)), 0))
