"""The interface of the implementations of `muon_memory`: the recurrence in terms of writes u_t.

    c_t = S_{t-1} k_t                                              the recall
    M_t = gamma_t M_{t-1} + (u_t - alpha_t eps_t c_t) k_t^T        eps_t: the correction in the momentum
    S_t = alpha_t (S_{t-1} - e_t c_t k_t^T) + mu_t M_t             e_t: the correction in the memory
    y_t = S_t q_t

A rule has one of the two corrections: `Muon.correction` says which.

`reference.py`, `scan.py` and `chunked.py` have `run(steps, S, M) -> (y, S, M)` and `chunk_length(length) -> int`: `run`
gets batches whose length is a multiple of `chunk_length(length)`, in one dtype, float32 or float64. `native.py` and
`triton.py` have `run_raw`, which gets the caller's inputs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MemoryInputs(NamedTuple):
    """The caller's tensors, in any supported dtype."""

    q: Tensor  # [B, L, H, m]
    k: Tensor  # [B, L, H, m]
    v: Tensor  # [B, L, H, d]
    log_alpha: Tensor  # [B, L, H]
    beta: Tensor  # [B, L, H]
    inject: Tensor | None  # [B, L, H]


class MemorySteps(NamedTuple):
    """Per-step inputs of the recurrence. H heads, key dimension m, value dimension d."""

    q: Tensor  # [B, L, H, m]
    k: Tensor  # [B, L, H, m]
    u: Tensor  # [B, L, H, d]   value times the scale of its normalized write: u_t k_t^T = NS(tau beta_t v_t k_t^T)
    log_alpha: Tensor  # [B, L, H]
    erase: Tensor | None  # [B, L, H]   e_t = eta beta_t with correction="memory"; None if eta is 0
    residual: Tensor | None  # [B, L, H]   eps_t = eta beta_t with correction="momentum"; None if eta is 0
    gamma: Tensor  # [B, L, H], size 1 where it does not vary
    mu: Tensor  # [B, L, H], size 1 where it does not vary: `inject`, or 1; 0 at the neutral steps of padding
