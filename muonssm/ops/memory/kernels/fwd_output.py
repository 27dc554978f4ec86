"""Third kernel: outputs read the state before the chunk, the chunk's own writes, and the correction.

Y = A Q S0^T + g Q M0^T + (Cm * Q K^T) U + (LA * Q K^T) W;   with RESIDUAL Cm replaces LA
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    A_,
    G_,
    SCALE,
    C,
    chunk_rows,
    decays,
    load_log_alpha,
    load_log_gamma,
    load_mu,
    load_plane,
    load_rows,
    load_tile,
    product,
    store_rows,
)


@triton.jit
def output(
    q, k, v, log_alpha, gamma, inject, chunks, vectors, W, S_all, M_all, y, H, gamma_step, gamma_head,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, MOMENTUM: tl.constexpr, ERASE: tl.constexpr,
    RESIDUAL: tl.constexpr, INJECT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute BD columns of y `[steps, H, d]` for one chunk of one head."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, _ = chunk_rows(chunks, base // H, h, H)
    first = tl.program_id(1) * BD
    column = first + tl.arange(0, BD)
    A = load_plane(vectors, base, A_)
    g = load_plane(vectors, base, G_)
    QK = tl.zeros((C, C), dtype=tl.float32)
    Y = tl.zeros((C, BD), dtype=tl.float32)
    for j in range(0, m, BM):
        key = j + tl.arange(0, BM)
        Q = load_rows(q, rows, live, j, m, BM).to(tl.float32)
        QK += product(Q, tl.trans(load_rows(k, rows, live, j, m, BM)), OPERAND, PRECISION)
        Y += product(A[:, None] * Q, load_tile(S_all, base, m, key, d, column), OPERAND, PRECISION)
        if MOMENTUM:
            Y += product(g[:, None] * Q, load_tile(M_all, base, m, key, d, column), OPERAND, PRECISION)
    la = load_log_alpha(log_alpha, rows, live)
    lg = load_log_gamma(gamma, start, tl.arange(0, C), live, h, gamma_step, gamma_head)
    LA, _, Cm = decays(la, lg, load_mu(inject, rows, live, INJECT), MOMENTUM, INJECT, PRECISION)
    if RESIDUAL:
        LA = Cm
    V = load_rows(v, rows, live, first, d, BD)
    Y += product(Cm * QK * load_plane(vectors, base, SCALE)[None, :], V, OPERAND, PRECISION)
    if ERASE:
        Y += product(LA * QK, load_tile(W, base, C, tl.arange(0, C), d, column), OPERAND, PRECISION)
    store_rows(y, rows, live, first, Y, d, BD)
