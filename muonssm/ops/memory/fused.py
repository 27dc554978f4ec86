"""What implementations on raw inputs (`native`, `triton`) make of a call before their kernels see it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import cpu_library
from ..dtypes import gamma_tensor, widen
from ..muon import Muon


class Fused(NamedTuple):
    """A call: q, k, v, log_alpha, beta and gamma; the states or None; bounds of sequences; what else the kernels need.

    settings    eta, whether there is momentum, the numbers of the write
    recorded    whether gradients will be asked for
    """

    tensors: list[Tensor]
    S: Tensor | None
    M: Tensor | None
    offsets: Tensor
    settings: tuple[float, bool, list[float]]
    recorded: bool


def fused(
    inputs: tuple[Tensor, ...],
    eta: float,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> Fused:
    """Vectors in one dtype of theirs, gates and states in `dtype`, everything contiguous."""
    q, k, v, log_alpha, beta = inputs
    vectors = cpu_library.common_dtype((q, k, v), dtype)
    log_alpha, beta = (widen(x, dtype).contiguous() for x in (log_alpha, beta))
    gamma = gamma_tensor(muon.gamma, dtype, v.device).contiguous()
    S, M = (widen(x, dtype).contiguous() for x in state) if state else (None, None)
    tensors = [*vectors, log_alpha, beta, gamma]
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, S, M))
    offsets = cpu_library.sequence_offsets(v.shape[0], v.shape[1], cu_seqlens)
    settings = (float(eta), cpu_library.has_momentum(muon), cpu_library.write_numbers(muon))
    return Fused(tensors, S, M, offsets, settings, recorded)
