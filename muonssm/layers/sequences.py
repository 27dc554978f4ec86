"""Padded, packed and reversed sequences: index arithmetic, once for all mixers.

x           `[B, L, D]`
mask        `[B, L]`, true where a step is real
cu_seqlens  `[N + 1]`, bounds of N sequences packed into one row
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Packing(NamedTuple):
    """The real steps of a padded batch: where they stood, and the bounds of each row's in one packed row."""

    places: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """From a mask `[B, L]` of bools."""
        counts = mask.sum(dim=1)
        return cls(mask.flatten().nonzero().squeeze(1), F.pad(counts.cumsum(0), (1, 0)))

    def pack(self, x: Tensor) -> Tensor:
        """`[B, L, D]` to the packed row `[1, steps, D]`."""
        return x.flatten(0, 1).index_select(0, self.places)[None]

    def unpack(self, y: Tensor, B: int, L: int) -> Tensor:
        """The packed row back in its places `[B, L, D]`, zeros elsewhere."""
        return y.new_zeros(B * L, y.shape[2]).index_copy(0, self.places, y[0]).view(B, L, -1)


def check_mask(mask: Tensor, B: int, L: int) -> Tensor:
    """The mask as bools; raises unless it is a tensor `[B, L]`."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask is of type {type(mask).__name__}; it may be a tensor [B, L], not 0 where a step is real")
    if tuple(mask.shape) != (B, L):
        raise ValueError(f"mask has shape {list(mask.shape)}; it may be [B, L] = {[B, L]}, not 0 where a step is real")
    return mask != 0


def reverse(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Every sequence of `[B, L, ...]` from its end to its start."""
    if cu_seqlens is None:
        return x.flip(1)
    bounds = cu_seqlens.to(x.device)
    step = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), step, right=True)
    return x.index_select(1, bounds[sequence] + bounds[sequence + 1] - 1 - step)


def both_ways(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sequences, and after them the same ones reversed: along the batch, or in one longer packed row."""
    return torch.cat([x, reverse(x, cu_seqlens)], dim=0 if cu_seqlens is None else 1)


def both_bounds(cu_seqlens: Tensor | None) -> Tensor | None:
    """`cu_seqlens` of `both_ways`."""
    return None if cu_seqlens is None else torch.cat([cu_seqlens, cu_seqlens[1:] + cu_seqlens[-1]])


def mean_of_both(y: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Undoes `both_ways`: the mean of what both directions say at each step."""
    forward, backward = y.chunk(2, dim=0 if cu_seqlens is None else 1)
    return (forward + reverse(backward, cu_seqlens)) / 2
