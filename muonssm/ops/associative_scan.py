"""A parallel prefix scan over time steps for any associative operator, in torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Elements = tuple[Tensor, ...]


def associative_scan(combine: Callable[[Elements, Elements], Elements], elements: Elements) -> Elements:
    """Compute all prefixes e_1, e_1 * e_2, e_1 * e_2 * e_3, ... along axis 1 (Remark 1; Blelloch, 1990).

    Combine neighbors in pairs, scan the pairs, and fill in the prefixes in between: O(L) work, O(log L) depth.
    `combine(earlier, later)` gets whole slices along axis 1. Elements are tuples of tensors `[B, L, ...]`.
    """
    L = elements[0].shape[1]
    if L < 2:
        return elements
    pairs = combine(_slice(elements, 0, L - 1, 2), _slice(elements, 1, L, 2))
    odd = associative_scan(combine, pairs)  # prefixes that end at steps 1, 3, 5, ..., counted from 0
    first = _slice(elements, 0, 1, 1)
    if L == 2:
        return _interleave(first, odd)
    later = combine(_slice(odd, 0, (L - 1) // 2, 1), _slice(elements, 2, L, 2))
    even = tuple(torch.cat(pair, dim=1) for pair in zip(first, later, strict=True))
    return _interleave(even, odd)


def _slice(elements: Elements, start: int, stop: int, step: int) -> Elements:
    return tuple(x[:, start:stop:step] for x in elements)


def _interleave(even: Elements, odd: Elements) -> Elements:
    def merge(a: Tensor, b: Tensor) -> Tensor:
        n = b.shape[1]
        merged = torch.stack((a[:, :n], b), dim=2).flatten(1, 2)
        return merged if a.shape[1] == n else torch.cat((merged, a[:, n:]), dim=1)

    return tuple(merge(a, b) for a, b in zip(even, odd, strict=True))
