"""`Kind`: what decides which Triton kernels a call runs, and so what `self_check` checks before `auto` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..muon import Muon, has_momentum, is_residual, steps_of

LARGEST_CHECKED = 1024  # channels of the selective scan; further ones are further programs of the same kernel


class Kind(NamedTuple):
    """A kind of call.

    Attributes:
        operator: `"memory"` or `"selective"`.
        dtype: of the vectors.
        values, keys: d and m, or channels and states.
        erases: eta is not 0; for the selective scan, A is None (LongHorn).
        injects: `inject` is given.
        residual, momentum, steps, beta_outside: of the rule. `steps` are those of Newton-Schulz, 0 for the norm alone
            and -1 for no normalization.
    """

    operator: str
    dtype: torch.dtype
    values: int
    keys: int
    erases: bool = False
    injects: bool = False
    residual: bool = False
    momentum: bool = True
    steps: int = 1
    beta_outside: bool = False


def memory_kind(vectors: Sequence[Tensor], eta: float, muon: Muon, injects: bool) -> Kind:
    """Describe a call of `muon_memory` with q, k and v."""
    q, _, v = vectors
    d, m, residual = v.shape[3], q.shape[3], is_residual(muon, eta)
    return Kind("memory", _dtype(vectors), d, m, eta != 0, injects, residual, *_rule(muon))


def selective_kind(vectors: Sequence[Tensor], longhorn: bool, muon: Muon) -> Kind:
    """Describe a call of `muon_selective_scan` with x, dt, B and C."""
    channels = min(vectors[0].shape[2], LARGEST_CHECKED)
    return Kind("selective", _dtype(vectors), channels, vectors[2].shape[2], longhorn, False, False, *_rule(muon))


def _dtype(vectors: Sequence[Tensor]) -> torch.dtype:
    first = vectors[0].dtype
    return first if all(x.dtype == first for x in vectors) else torch.float32  # others are widened


def _rule(muon: Muon) -> tuple[bool, int, bool]:
    return has_momentum(muon), steps_of(muon), muon.beta_position == "outside"
