"""Padded, packed and bidirectional sequences: index arithmetic that all mixers share.

x           `[B, L, D]`
mask        `[B, L]`, 0 at padding
cu_seqlens  `[N + 1]`, bounds of N sequences packed into one row (B = 1)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Sequences(NamedTuple):
    """How the rows of one call hold its sequences.

        cu_seqlens      bounds of packed sequences; None for one sequence per row
        bidirectional   whether each sequence is also processed in reverse

    A bidirectional mixer runs its causal memory over every sequence and over its reverse, with the same weights, and
    averages the two answers. `add_reversed` appends the reversed sequences and `mean_of_directions` takes the average;
    in a causal mixer both return what they were given.
    """

    cu_seqlens: Tensor | None = None
    bidirectional: bool = False

    @property
    def bounds(self) -> Tensor | None:
        """`cu_seqlens` of what `add_reversed` returns."""
        if not self.bidirectional or self.cu_seqlens is None:
            return self.cu_seqlens
        return torch.cat([self.cu_seqlens, self.cu_seqlens[1:] + self.cu_seqlens[-1]])

    def add_reversed(self, *tensors: Tensor | None) -> tuple[Any, ...]:
        """Append to each tensor `[B, L, ...]` its reversed sequences: along the batch, or in a longer packed row."""
        if not self.bidirectional:
            return tensors
        axis = 0 if self.cu_seqlens is None else 1
        return tuple(None if x is None else torch.cat([x, reverse(x, self.cu_seqlens)], dim=axis) for x in tensors)

    def mean_of_directions(self, y: Tensor) -> Tensor:
        """Undo `add_reversed`: average both directions at each step."""
        if not self.bidirectional:
            return y
        forward, backward = y.chunk(2, dim=0 if self.cu_seqlens is None else 1)
        return (forward + reverse(backward, self.cu_seqlens)) / 2


class Packing(NamedTuple):
    """The unpadded steps of a padded batch.

    positions   `[steps]`, their indices in the flattened batch
    cu_seqlens  `[B + 1]`, bounds of each row's steps in the packed row
    """

    positions: Tensor
    cu_seqlens: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> Packing | None:
        """Find the unpadded steps of a mask `[B, L]`; return None if nothing is padded."""
        real = mask != 0
        if real.all():
            return None
        return cls(real.flatten().nonzero().squeeze(1), F.pad(real.sum(dim=1).cumsum(0), (1, 0)))

    def pack(self, x: Tensor) -> Tensor:
        """Gather `[B, L, D]` into the packed row `[1, steps, D]`."""
        return x.flatten(0, 1).index_select(0, self.positions)[None]

    def unpack(self, y: Tensor, B: int, L: int) -> Tensor:
        """Scatter the packed row back to `[B, L, D]`, with zeros at padding."""
        return y.new_zeros(B * L, y.shape[2]).index_copy(0, self.positions, y[0]).view(B, L, -1)


def reverse(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Reverse every sequence of `[B, L, ...]` in time."""
    if cu_seqlens is None:
        return x.flip(1)
    bounds = cu_seqlens.to(x.device)
    step = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), step, right=True)
    return x.index_select(1, bounds[sequence] + bounds[sequence + 1] - 1 - step)
