"""The interface of the implementations of `muon_memory`: the recurrence in terms of writes u_t.

    M_t = gamma_t M_{t-1} + u_t k_t^T
    S_t = alpha_t (S_{t-1} - e_t (S_{t-1} k_t) k_t^T) + mu_t M_t
    y_t = S_t q_t

`reference.py`, `scan.py` and `chunked.py` have `run(steps, S, M) -> (y, S, M)` and `chunk_length(length) -> int`: `run`
gets batches whose length is a multiple of `chunk_length(length)`, in one dtype, float32 or float64. `native.py` and
`triton.py` have `run_raw`, which gets the caller's inputs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MemorySteps(NamedTuple):
    """Per-step inputs of the recurrence. H heads, key dimension m, value dimension d."""

    q: Tensor  # [B, L, H, m]
    k: Tensor  # [B, L, H, m]
    u: Tensor  # [B, L, H, d]   value times the scale of its normalized write: u_t k_t^T = NS(tau beta_t v_t k_t^T)
    log_alpha: Tensor  # [B, L, H]
    erase: Tensor | None  # [B, L, H]   e_t = eta beta_t; None if eta is 0
    gamma: Tensor  # [B, L, H], size 1 where it does not vary
    mu: Tensor  # [B, L, 1], size 1 where it does not vary; 0 at the neutral steps of padding, otherwise 1
