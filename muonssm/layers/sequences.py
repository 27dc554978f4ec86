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

from .state import MixerState


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
        axis = 0 if self.cu_seqlens is None else 1
        forward, backward = y.unflatten(axis, (2, -1)).unbind(axis)  # two of any size; `chunk` depends on the size
        return (forward + reverse(backward, self.cu_seqlens)) / 2


class Packing(NamedTuple):
    """The steps of a padded batch in one packed row.

    positions   `[steps]`, their indices in the flattened batch
    cu_seqlens  `[B + 1]`, bounds of each row's steps in the packed row
    real        None, or `[steps]`: which steps are not padding. Compiled code does not know their number, so it packs
                the padding too, as one more sequence at the end (`cu_seqlens` `[B + 2]`), whose outputs it drops.
    """

    positions: Tensor
    cu_seqlens: Tensor
    real: Tensor | None = None

    @classmethod
    def from_mask(cls, mask: Tensor) -> Packing | None:
        """Find the unpadded steps of a mask `[B, L]`; return None if nothing is padded."""
        real = mask != 0
        if torch.compiler.is_compiling():
            return cls._of_all(real)
        if real.all():
            return None
        return cls(real.flatten().nonzero().squeeze(1), F.pad(real.sum(dim=1).cumsum(0), (1, 0)))

    @classmethod
    def _of_all(cls, real: Tensor) -> Packing:
        """Order all steps by row, padding last, by where each step goes: behind as many of its kind."""
        flat = real.flatten()
        behind = torch.where(flat, flat.cumsum(0), flat.sum() + (~flat).cumsum(0)) - 1
        positions = torch.zeros_like(behind).scatter(0, behind, torch.arange(flat.numel(), device=flat.device))
        lengths = torch.cat([real.sum(dim=1), (~real).sum()[None]])
        return cls(positions, F.pad(lengths.cumsum(0), (1, 0)), flat[positions])

    def pack(self, x: Tensor) -> Tensor:
        """Gather `[B, L, D]` into the packed row `[1, steps, D]`."""
        return x.flatten(0, 1).index_select(0, self.positions)[None]

    def unpack(self, y: Tensor, B: int, L: int) -> Tensor:
        """Scatter the packed row back to `[B, L, D]`, with zeros at padding."""
        steps = y[0] if self.real is None else torch.where(self.real[:, None], y[0], 0)
        return y.new_zeros(B * L, y.shape[2]).index_copy(0, self.positions, steps).view(B, L, -1)

    def pack_state(self, state: MixerState | None) -> MixerState | None:
        """Add a state for the padding where it is a sequence."""
        if state is None or self.real is None:
            return state
        return state.map(lambda x: torch.cat([x, torch.zeros_like(x[:1])]))

    def unpack_state(self, state: MixerState) -> MixerState:
        """Drop the state of the padding."""
        return state if self.real is None else state.map(lambda x: x[:-1])


def reverse(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Reverse every sequence of `[B, L, ...]` in time."""
    if cu_seqlens is None:
        return x.flip(1)
    bounds = cu_seqlens.to(x.device)
    step = torch.arange(x.shape[1], device=x.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), step, right=True)
    return x.index_select(1, bounds[sequence] + bounds[sequence + 1] - 1 - step)
