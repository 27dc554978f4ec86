"""States of a piece's segments: those that they start from, and those that a call returns.

A state has one row per sequence of a batch, or per segment of a packed row; see `layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonssm.ops import MemoryState

from .layout import Layout

if TYPE_CHECKING:
    from .context import ContextParallel


def first_rows(layout: Layout, given: Tensor | None, carried: Tensor | None, zeros: Tensor | None) -> Tensor | None:
    """Return the rows that the segments start from: `carried` from earlier processes, `given` by the caller, or zeros.

    Args:
        given: rows of all sequences; those that begin on this process count.
        carried: the row of the segment that continues; None if there is none.
        zeros: rows of zeros for segments without `given`.
    """
    if layout.members is None:
        return carried if layout.carries_in else given
    if given is None and not layout.carries_in:
        return None
    begin = layout.beginning
    rows = zeros if given is None else given
    assert rows is not None
    own = rows[: begin.stop - begin.start] if given is None else rows[begin]
    return torch.cat([carried, own]) if layout.carries_in and carried is not None else own


def check_first_order() -> None:
    """Check in a backward pass that it is not to be differentiated: gradients of gradients would miss other pieces."""
    if torch.is_grad_enabled():
        raise ValueError("create_graph must be False for calls inside context_parallel, got True")


def segment_states(
    piece: Any, layout: Layout, state: MemoryState | None, carried: MemoryState | None
) -> MemoryState | None:
    """Return the states that the segments start from; None if all are zero."""
    zeros = None if layout.members is None else piece.zero_state(len(layout.members))
    rows = [
        first_rows(
            layout,
            None if state is None else state[i].to(piece.dtype),
            None if carried is None else carried[i],
            None if zeros is None else zeros[i],
        )
        for i in range(2)
    ]
    return None if rows[0] is None or rows[1] is None else MemoryState(rows[0], rows[1])


def final_states(ends: Sequence[Tensor], layout: Layout, context: ContextParallel) -> list[Tensor]:
    """Return the rows after the end of each sequence, on every process; or a copy of `ends`, with `states="own"`."""
    if not context.shares_states:
        return [x.clone() for x in ends]
    exchange = context.exchange
    if layout.members is None:
        return [exchange.broadcast(x, exchange.size - 1) for x in ends]
    shared = []
    for x in ends:
        every = x.new_zeros(layout.total, *x.shape[1:])
        every[layout.ending] = x[: len(x) - layout.carries_out]
        shared.append(exchange.sum(every))
    return shared


def gradient_of_final_states(grads: Sequence[Tensor], layout: Layout, context: ContextParallel) -> list[Tensor]:
    """Return the gradients of `ends`, given those of what `final_states` returned on each process."""
    if not context.shares_states:
        return list(grads)
    exchange = context.exchange
    if layout.members is None:
        return [exchange.sum_to(x, exchange.size - 1) for x in grads]
    own = []
    for x in grads:
        total = exchange.sum(x)[layout.ending]
        own.append(torch.cat([total, total.new_zeros(int(layout.carries_out), *total.shape[1:])]))
    return own
