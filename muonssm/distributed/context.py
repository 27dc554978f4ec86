"""`context_parallel`: inside it, the operators' arguments are pieces of sequences that are split over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from muonssm.checks import check_choice
from muonssm.ops import split
from muonssm.ops.dtypes import full_precision

from .convolution import convolution
from .exchange import Exchange
from .layout import Layout, batch_layout, packed_layout
from .recurrence import MemoryPiece, Piece, SelectivePiece, run

STATES = ("last", "own")


class ContextParallel:
    """The split of sequences over the processes of a group, in the order of their ranks; see `context_parallel`."""

    def __init__(self, group: dist.ProcessGroup | None = None, states: str = "last") -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("torch.distributed must be initialized for context_parallel, got no process group")
        self.exchange = Exchange(group)
        self.shares_states = check_choice("states", states, STATES) == "last"
        self._known: tuple[Tensor, Layout] | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this process has sent so far."""
        return self.exchange.bytes_sent

    def memory(self, *inputs: Any, **settings: Any) -> Any:
        """Run `muon_memory` on this process's piece."""
        return self._run(MemoryPiece, *inputs, **settings)

    def selective(self, *inputs: Any, **settings: Any) -> Any:
        """Run `muon_selective_scan` on this process's piece."""
        return self._run(SelectivePiece, *inputs, **settings)

    def _run(self, piece: type[Piece], *inputs: Any, state: Any, cu_seqlens: Any, **settings: Any) -> Any:
        with split.use(None), full_precision(inputs[0].device):
            return run(piece(*inputs, **settings), self.layout(inputs[0], cu_seqlens), self, state)

    def convolution(self, x: Tensor, *weights: Any, tail: Any, cu_seqlens: Any, **settings: Any) -> Any:
        """Run `causal_convolution` on this process's piece."""
        with split.use(None):
            return convolution(x, weights, self.layout(x, cu_seqlens), self, tail, settings)

    def layout(self, x: Tensor, cu_seqlens: Tensor | None) -> Layout:
        """Lay out the piece x `[B, L, ...]`. Processes tell each other their L once per tensor `cu_seqlens`."""
        exchange = self.exchange
        if cu_seqlens is None:
            return batch_layout(x.shape[1], exchange.rank, exchange.size)
        if x.shape[0] != 1:
            raise ValueError(f"the batch size must be 1 with cu_seqlens, all sequences in one row, got {x.shape[0]}")
        if self._known is None or self._known[0] is not cu_seqlens:
            lengths = exchange.gather(x.shape[1], x.device)
            self._known = cu_seqlens, packed_layout(cu_seqlens, lengths, exchange.rank)
        layout = self._known[1]
        if layout.length != x.shape[1]:
            raise ValueError(
                f"a piece must have {layout.length} steps, as before with these cu_seqlens, got {x.shape[1]}"
            )
        return layout


@contextmanager
def context_parallel(group: dist.ProcessGroup | None = None, states: str = "last") -> Iterator[ContextParallel]:
    """Split sequences over the processes of `group`, in the order of their ranks.

    Inside the `with` statement, `muon_memory`, `muon_selective_scan` and every causal mixer take this process's piece
    of the inputs and return its piece of the outputs: the same numbers as one process on the whole sequence. Pieces can
    have different lengths. All processes must make the same calls in the same order, and call backward: gradients cross
    the processes too, those of a loss that is the sum of the processes' losses. To have checkpointed activations
    recomputed, call backward inside the `with` statement.

    `state=` counts where a sequence begins: for a batch, on the first process; so does its gradient. `cu_seqlens` are
    bounds in the whole row, and the same on every process.

    Args:
        group: processes that share a sequence; None for all of them.
        states: which state a call returns. `"last"`: after the end of each sequence, on every process. `"own"`: after
            this process's piece (of packed sequences: of their segments here), which sends nothing.
    """
    context = ContextParallel(group, states)
    with split.use(context):
        yield context
