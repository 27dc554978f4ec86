"""The interface of the implementations of `muon_selective_scan`: the recurrence in terms of writes u_t.

    a_t = exp(dt_t A), or 1 - dt_t B_t^2 if A is None         [D, N], one gate per channel and state
    M_t = gamma_t M_{t-1} + u_t B_t^T
    S_t = a_t * S_{t-1} + mu_t M_t
    y_t = S_t C_t

`reference.py`, `scan.py` and `chunked.py` have `run(steps, A, S, M) -> (y, S, M)` and `chunk_length(length) -> int`,
on tensors of one dtype, float32 or float64. `native.py` and `triton.py` have `run_raw`, which gets the caller's inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SelectiveSteps(NamedTuple):
    """Per-step inputs of the recurrence. D channels, state size N."""

    u: Tensor  # [B, L, D]   dt_t x_t times the scale of its normalized write: u_t B_t^T = NS(tau dt_t x_t B_t^T)
    dt: Tensor  # [B, L, D]
    B: Tensor  # [B, L, N]
    C: Tensor  # [B, L, N]
    gamma: Tensor  # [B, L, 1], size 1 where it does not vary
    mu: Tensor  # [B, L, 1], size 1 where it does not vary; 0 at the neutral steps of padding, otherwise 1


def retention(dt: Tensor, A: Tensor | None, B: Tensor) -> Tensor:
    """Compute the gate a `[..., D, N]`: Mamba's exp(dt A), or 1 - dt B^2 of LongHorn's released model if A is None."""
    if A is None:
        return 1 - dt[..., None] * B[..., None, :] ** 2
    return torch.exp(dt[..., None] * A)
