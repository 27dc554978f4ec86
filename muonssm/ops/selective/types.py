"""What every implementation of `muon_selective_scan` computes, and on which arguments.

    a_t = exp(dt_t A), or 1 - dt_t B_t^2 where A is None      [D, N], one gate per channel and state
    M_t = gamma_t M_{t-1} + u_t B_t^T
    S_t = a_t * S_{t-1} + mu_t M_t
    y_t = S_t C_t

Each module `NAME.py` beside this one has `run(steps, A, S, M) -> (y, S, M)` and `chunk_length(length) -> int`, as for
the memory operator. All tensors have one dtype, float32 or float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SelectiveSteps(NamedTuple):
    """Per-step inputs of the recurrence. D channels, state size N."""

    u: Tensor  # [B, L, D]   dt_t x_t times the scale of its normalised write: u_t B_t^T = NS(tau dt_t x_t B_t^T)
    dt: Tensor  # [B, L, D]
    B: Tensor  # [B, L, N]
    C: Tensor  # [B, L, N]
    gamma: Tensor  # [B, L, 1], size 1 where it does not vary
    mu: Tensor  # [B, L, 1], size 1 where it does not vary: 0 at the neutral steps that fill a row, otherwise 1


def retention(dt: Tensor, A: Tensor | None, B: Tensor) -> Tensor:
    """The gate a `[..., D, N]`: Mamba's exp(dt A), or LongHorn's released 1 - dt B^2 where A is None."""
    if A is None:
        return 1 - dt[..., None] * B[..., None, :] ** 2
    return torch.exp(dt[..., None] * A)
