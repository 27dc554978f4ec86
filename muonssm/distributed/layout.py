"""Which steps of which sequences a process has.

A batch `[B, L, ...]` without `cu_seqlens` has B sequences, and every process has a piece of each. With `cu_seqlens`,
the bounds of N sequences in the whole row, a process has the segments of those sequences that its piece touches.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The segments of this process's piece, in order.

    Attributes:
        length: steps of the piece.
        bounds: int64 `[segments + 1]`, of the segments within the piece; None if the batch is not packed.
        members: which of the packed sequences they belong to; None if the batch is not packed.
        total: number of packed sequences.
        carries_in: whether the first segment (of a batch, every row) continues on an earlier process.
        carries_out: whether the last one continues on a later process.
    """

    length: int
    bounds: Tensor | None
    members: range | None
    total: int
    carries_in: bool
    carries_out: bool

    @property
    def spans(self) -> bool:
        """Whether the sequence that comes in also goes out."""
        return self.carries_in and self.carries_out and (self.members is None or len(self.members) == 1)

    @property
    def first_length(self) -> int:
        """Steps of the first segment."""
        return self.length if self.bounds is None else int(self.bounds[1])

    @property
    def last_start(self) -> int:
        """Where the last segment begins."""
        return 0 if self.bounds is None else int(self.bounds[-2])

    @property
    def beginning(self) -> slice:
        """The packed sequences that begin on this process."""
        assert self.members is not None
        return slice(self.members.start + self.carries_in, self.members.stop)

    @property
    def ending(self) -> slice:
        """The packed sequences that end on this process."""
        assert self.members is not None
        return slice(self.members.start, self.members.stop - self.carries_out)


def batch_layout(length: int, rank: int, size: int) -> Layout:
    """Lay out a piece of a batch, each row of which is one sequence."""
    return Layout(length, None, None, 0, rank > 0, rank < size - 1)


def packed_layout(bounds: list[int], lengths: list[int], rank: int) -> Layout:
    """Lay out a piece of a packed row; `bounds` are those of `cu_seqlens`, `lengths` has the steps of every process."""
    _check(bounds, lengths)
    start = sum(lengths[:rank])
    end = start + lengths[rank]
    is_last = rank == len(lengths) - 1
    touched = [
        i
        for i, (low, high) in enumerate(itertools.pairwise(bounds))
        if (low < end and high > start) or (low == high and (start <= low < end or (is_last and low == end)))
    ]
    members = range(touched[0], touched[-1] + 1)
    cuts = [min(max(bounds[i] - start, 0), end - start) for i in range(members.start, members.stop + 1)]
    carries_in, carries_out = bounds[members.start] < start, bounds[members.stop] > end
    return Layout(end - start, torch.tensor(cuts), members, len(bounds) - 1, carries_in, carries_out)


def _check(bounds: list[int], lengths: list[int]) -> None:
    total = sum(lengths)
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != total or any(a > b for a, b in itertools.pairwise(bounds)):
        wanted = f"start at 0, never decrease and end at {total}, the steps of all processes together"
        raise ValueError(f"cu_seqlens must {wanted}, inside context_parallel, got {shortened(bounds)}")
    if min(lengths) == 0:
        raise ValueError(f"with cu_seqlens every process must have at least one step, got pieces of {lengths} steps")


def shortened(bounds: list[int]) -> str:
    """Return the first bounds and the last one."""
    return str(bounds) if len(bounds) <= 8 else f"{str(bounds[:6])[:-1]}, ..., {bounds[-1]}]"
