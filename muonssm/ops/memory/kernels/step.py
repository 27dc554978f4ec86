"""One decoding step: reads and writes both states once."""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.write import add_to_norm, write_scale


@triton.jit
def step(
    q, k, v, log_alpha, beta, gamma, inject, S0, M0, y, S_end, M_end,
    H, gamma_step, gamma_head, eta, inside, outside, delta,
    m: tl.constexpr, d: tl.constexpr, MP: tl.constexpr, DP: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
    MOMENTUM: tl.constexpr, RESIDUAL: tl.constexpr, INJECT: tl.constexpr, BETA_OUTSIDE: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """Compute BD rows of S and M `[B, H, d, m]` and of y `[B, 1, H, d]` (eqs. 3 and 4)."""
    head = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, MP)
    row = tl.program_id(1) * BD + tl.arange(0, BD)
    at = head * d * m + row[:, None] * m + key[None, :]
    inside_tile = (row < d)[:, None] & (key < m)[None, :]
    K = tl.load(k + head * m + key, mask=key < m, other=0.0).to(tl.float32)
    Q = tl.load(q + head * m + key, mask=key < m, other=0.0).to(tl.float32)
    V = tl.load(v + head * d + row, mask=row < d, other=0.0).to(tl.float32)
    b = tl.load(beta + head)
    alpha = tl.exp(tl.load(log_alpha + head))
    gam = tl.load(gamma + (head // H) * gamma_step + (head % H) * gamma_head)
    norm_k = b
    norm_v = b
    if STEPS >= 0:
        zero = tl.zeros((1,), dtype=tl.float32)
        largest, total = add_to_norm(zero, zero, K[None, :])
        norm_k = tl.sum(largest * tl.sqrt(total))
        everything = tl.arange(0, DP)
        whole = tl.load(v + head * d + everything, mask=everything < d, other=0.0).to(tl.float32)
        largest, total = add_to_norm(zero, zero, whole[None, :])
        norm_v = tl.sum(largest * tl.sqrt(total))
    c = write_scale(norm_k, norm_v, b, inside, outside, delta, STEPS, BETA_OUTSIDE)
    M = (c * V)[:, None] * K[None, :]
    S = tl.zeros((BD, MP), dtype=tl.float32)
    if STATE:
        if MOMENTUM:
            M += gam * tl.load(M0 + at, mask=inside_tile, other=0.0)
        S += tl.load(S0 + at, mask=inside_tile, other=0.0)
        correction = (eta * b * tl.sum(S * K[None, :], axis=1))[:, None] * K[None, :]
        if RESIDUAL:
            M -= alpha * correction
        else:
            S -= correction
    if INJECT:  # noqa: SIM108  a branch at compile time
        S = alpha * S + tl.load(inject + head) * M
    else:
        S = alpha * S + M
    tl.store(S_end + at, S, mask=inside_tile)
    tl.store(M_end + at, M, mask=inside_tile)
    Y = tl.sum(S * Q[None, :], axis=1)
    tl.store(y + head * d + row, Y.to(y.dtype.element_ty), mask=row < d)
