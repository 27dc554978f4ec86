"""`context_parallel`: inside it, the operators' arguments are pieces of sequences that are split over processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from muonssm.checks import check_choice
from muonssm.ops import split
from muonssm.ops.dtypes import full_precision

from .convolution import convolution, describe
from .exchange import Exchange, digest
from .layout import Layout, batch_layout, packed_layout, shortened
from .recurrence import MemoryPiece, Piece, SelectivePiece, run

STATES = ("last", "own")


class ContextParallel:
    """The split of sequences over the processes of a group, in the order of their ranks; see `context_parallel`."""

    def __init__(self, group: dist.ProcessGroup | None = None, states: str = "last") -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("torch.distributed must be initialized for context_parallel, got no process group")
        _check_group(group)
        self.exchange = Exchange(group)
        self.shares_states = check_choice("states", states, STATES) == "last"
        self._known: tuple[Tensor, int, Layout] | None = None
        self._agreed: set[str] = set()

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
            call = piece(*inputs, **settings)
            self.agree(call.description(state, cu_seqlens), call.device)
            return run(call, self.layout(inputs[0], cu_seqlens), self, state)

    def convolution(self, x: Tensor, *weights: Any, tail: Any, cu_seqlens: Any, **settings: Any) -> Any:
        """Run `causal_convolution` on this process's piece."""
        with split.use(None):
            self.agree(describe(x, weights, tail, cu_seqlens), x.device)
            return convolution(x, weights, self.layout(x, cu_seqlens), self, tail, settings)

    def agree(self, call: str, device: torch.device) -> None:
        """Check that every process makes the same call, once per description of a call.

        Otherwise messages of other sizes, or other numbers than expected, would abort processes or go unnoticed.
        """
        if call in self._agreed or self.exchange.size == 1:
            return
        others = self.exchange.differing(call, device)
        if others:
            raise ValueError(
                f"calls inside context_parallel must be the same on every process, got {call} on process "
                f"{self.exchange.rank} and another one on {others}"
            )
        self._agreed.add(call)

    def layout(self, x: Tensor, cu_seqlens: Tensor | None) -> Layout:
        """Lay out the piece x `[B, L, ...]`. Processes compare bounds, and tell their L, once per `cu_seqlens`."""
        exchange = self.exchange
        if cu_seqlens is None:
            return batch_layout(x.shape[1], exchange.rank, exchange.size)
        version = 0 if cu_seqlens.is_inference() else cu_seqlens._version
        if self._known is None or self._known[0] is not cu_seqlens or self._known[1] != version:
            bounds = cu_seqlens.tolist()
            every = exchange.gather([x.shape[1], digest(str(bounds))], x.device)
            if any(found != every[exchange.rank][1] for _, found in every):
                raise ValueError(f"cu_seqlens must be the same on every process, got others than {shortened(bounds)}")
            self._known = cu_seqlens, version, packed_layout(bounds, [length for length, _ in every], exchange.rank)
        layout = self._known[2]
        if layout.length != x.shape[1]:
            raise ValueError(
                f"a piece must have {layout.length} steps, as before with these cu_seqlens, got {x.shape[1]}"
            )
        return layout


def _check_group(group: Any) -> None:
    """Check that this process is in the group."""
    if group is None:
        return
    if group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        kind = type(group).__name__  # of a DeviceMesh: mesh.get_group()
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got a value of type {kind}")
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(f"group must contain this process, {dist.get_rank()}, got a group of others")


@contextmanager
def context_parallel(group: dist.ProcessGroup | None = None, states: str = "last") -> Iterator[ContextParallel]:
    """Split sequences over the processes of `group`, in the order of their ranks.

    Inside the `with` statement, `muon_memory`, `muon_selective_scan` and every causal mixer take this process's piece
    of the inputs and return its piece of the outputs: the same numbers as one process on the whole sequence. Pieces can
    have different lengths. All processes must make the same calls in the same order, and call backward: gradients cross
    the processes too, those of a loss that is the sum of the processes' losses. Calls of other sizes or rules on some
    process raise an error on all of them. To have checkpointed activations recomputed, call backward inside the `with`
    statement. Contexts can be nested: the innermost one counts.

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
