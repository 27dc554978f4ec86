"""Gradients within a chunk, from the states before it (S0, M0), their gradients after it (dS1, dM1), W and R.

R is the gradient of the right-hand side of the system for W (see fwd_prepare.py), so with E = -e R

    dU = (Cm * Q K^T)^T dY + (N * G)^T E + Cm[last,:] K dS1^T + LG[last,:] K dM1^T,   N = Cm - mu LG  `values`
    d(Q K^T) = LA * dY W^T + Cm * dY U^T,    dG = LA * E W^T + N * E U^T  (strictly lower)            `scores`

`scores` stores the gradients of LA, Cm and LG for bwd_gates.py in four matrices (one kernel could not hold them all):

    by_YW = Q K^T * dY W^T,   by_YU = Q K^T * dY U^T,   by_RW = G * E W^T,   by_RU = G * E U^T
    dLA = by_YW + by_RW,   dCm = by_YU + by_RU,   dLG = -mu by_RU, plus the gradient through Cm = LA diag(mu) LG

With RESIDUAL, U + W replaces U and W has no part of its own: by_YU and by_RU take up by_YW and by_RW.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.write import write_scale_backward
from .common import (
    BY_K,
    BY_V,
    CM_END,
    D_BETA,
    D_CM_END,
    D_ERASE,
    D_LA_END,
    D_LG_END,
    ERASE_,
    LG_END,
    NORM_K,
    NORM_V,
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
    store_plane,
    store_tile,
)


@triton.jit
def values(
    q, k, v, log_alpha, beta, gamma, inject, dy, chunks, vectors, W, R, dS_all, dM_all, du, H, gamma_step, gamma_head,
    inside, outside, delta, m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, RESIDUAL: tl.constexpr, INJECT: tl.constexpr,
    BETA_OUTSIDE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute du `[n, H, C, d]`, and in `vectors` the gradients of the scale and of the last rows of LA, Cm and LG."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, _ = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    QK = tl.zeros((C, C), dtype=tl.float32)
    G = tl.zeros((C, C), dtype=tl.float32)
    for j in range(0, m, BM):
        K = load_rows(k, rows, live, j, m, BM)
        QK += product(load_rows(q, rows, live, j, m, BM), tl.trans(K), OPERAND, PRECISION)
        if ERASE:
            G += product(K, tl.trans(K), OPERAND, PRECISION)
    la = load_log_alpha(log_alpha, rows, live)
    lg = load_log_gamma(gamma, start, tl.arange(0, C), live, h, gamma_step, gamma_head)
    _, LG, Cm = decays(la, lg, load_mu(inject, rows, live, INJECT), MOMENTUM, INJECT, PRECISION)
    reads = tl.trans(Cm * QK).to(OPERAND)
    if ERASE:
        e = load_plane(vectors, base, ERASE_)
        lost = tl.where(t[:, None] > t[None, :], (Cm - LG) * G * (-e)[:, None], 0.0)
        lost = tl.trans(lost).to(OPERAND)
    dc = tl.zeros((C,), dtype=tl.float32)
    dLA_end = tl.zeros((C,), dtype=tl.float32)
    dCm_end = tl.zeros((C,), dtype=tl.float32)
    dLG_end = tl.zeros((C,), dtype=tl.float32)
    for i in range(0, d, BD):
        column = i + tl.arange(0, BD)
        X = tl.zeros((C, BD), dtype=tl.float32)  # K dS1^T
        Z = tl.zeros((C, BD), dtype=tl.float32)  # K dM1^T
        for j in range(0, m, BM):
            key = j + tl.arange(0, BM)
            K = load_rows(k, rows, live, j, m, BM)
            X += product(K, load_tile(dS_all, base, m, key, d, column), OPERAND, PRECISION)
            if MOMENTUM:
                Z += product(K, load_tile(dM_all, base, m, key, d, column), OPERAND, PRECISION)
        dU = load_plane(vectors, base, CM_END)[:, None] * X + load_plane(vectors, base, LG_END)[:, None] * Z
        dU += product(reads, load_rows(dy, rows, live, i, d, BD), OPERAND, PRECISION)
        if ERASE:
            dU += product(lost, load_tile(R, base, C, t, d, column), OPERAND, PRECISION)
        V = load_rows(v, rows, live, i, d, BD).to(tl.float32)
        dc += tl.sum(V * dU, axis=1)
        V = load_plane(vectors, base, SCALE)[:, None] * V
        if ERASE:
            w = load_tile(W, base, C, t, d, column).to(tl.float32)
            if RESIDUAL:
                V += w
            else:
                dLA_end += tl.sum(w * X, axis=1)
        dCm_end += tl.sum(V * X, axis=1)
        dLG_end += tl.sum(V * Z, axis=1)
        store_tile(du, base, C, t, d, column, dU)
    b = tl.load(beta + rows, mask=live, other=0.0)
    norm_k = load_plane(vectors, base, NORM_K)
    norm_v = load_plane(vectors, base, NORM_V)
    db, by_k, by_v = write_scale_backward(dc, norm_k, norm_v, b, inside, outside, delta, STEPS, BETA_OUTSIDE)
    store_plane(vectors, base, D_BETA, db)
    store_plane(vectors, base, BY_K, by_k)
    store_plane(vectors, base, BY_V, by_v)
    store_plane(vectors, base, D_LA_END, dLA_end)
    store_plane(vectors, base, D_CM_END, dCm_end)
    store_plane(vectors, base, D_LG_END, dLG_end)


@triton.jit
def scores(
    q, k, v, log_alpha, gamma, inject, dy, chunks, vectors, W, R, dQK, dG, by_YW, by_YU, by_RW, by_RU,
    H, gamma_step, gamma_head,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, MOMENTUM: tl.constexpr, ERASE: tl.constexpr,
    RESIDUAL: tl.constexpr, INJECT: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQK, dG + dG^T and the four matrices `[n, H, C, C]`, and in `vectors` the gradient of the erase."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, _ = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    la = load_log_alpha(log_alpha, rows, live)
    lg = load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head)
    LA, LG, Cm = decays(la, lg, load_mu(inject, rows, live, INJECT), MOMENTUM, INJECT, PRECISION)

    # 1. The outputs, through Q K^T.
    YW = tl.zeros((C, C), dtype=tl.float32)
    YU = tl.zeros((C, C), dtype=tl.float32)
    for i in range(0, d, BD):
        dY = load_rows(dy, rows, live, i, d, BD)
        YU += product(dY, tl.trans(load_rows(v, rows, live, i, d, BD)), OPERAND, PRECISION)
        if ERASE:
            w = load_tile(W, base, C, t, d, i + tl.arange(0, BD))
            YW += product(dY, tl.trans(w), OPERAND, PRECISION)
    YU = tl.where(t[:, None] >= t[None, :], YU * load_plane(vectors, base, SCALE)[None, :], 0.0)
    if RESIDUAL:
        YU += tl.where(t[:, None] >= t[None, :], YW, 0.0)
        store_tile(dQK, base, C, t, C, t, Cm * YU)
    else:
        store_tile(dQK, base, C, t, C, t, LA * YW + Cm * YU)
    Cm = (Cm - LG).to(OPERAND)  # used again below; OPERAND takes fewer registers
    LA = LA.to(OPERAND)
    QK = tl.zeros((C, C), dtype=tl.float32)
    for j in range(0, m, BM):
        K = tl.trans(load_rows(k, rows, live, j, m, BM))
        QK += product(load_rows(q, rows, live, j, m, BM), K, OPERAND, PRECISION)
    store_tile(by_YU, base, C, t, C, t, QK * YU)

    # 2. The system's right-hand side and matrix, through G.
    if ERASE:
        if not RESIDUAL:
            store_tile(by_YW, base, C, t, C, t, QK * YW)
        RW = tl.zeros((C, C), dtype=tl.float32)
        RU = tl.zeros((C, C), dtype=tl.float32)
        for i in range(0, d, BD):
            r = load_tile(R, base, C, t, d, i + tl.arange(0, BD))
            w = load_tile(W, base, C, t, d, i + tl.arange(0, BD))
            RW += product(r, tl.trans(w), OPERAND, PRECISION)
            RU += product(r, tl.trans(load_rows(v, rows, live, i, d, BD)), OPERAND, PRECISION)
        below = t[:, None] > t[None, :]
        RW = tl.where(below, RW, 0.0)
        RU = tl.where(below, RU * load_plane(vectors, base, SCALE)[None, :], 0.0)
        G = tl.zeros((C, C), dtype=tl.float32)
        for j in range(0, m, BM):
            K = load_rows(k, rows, live, j, m, BM)
            G += product(K, tl.trans(K), OPERAND, PRECISION)
        e = load_plane(vectors, base, ERASE_)
        if RESIDUAL:
            RU += RW
            X = Cm * RU
        else:
            store_tile(by_RW, base, C, t, C, t, -e[:, None] * G * RW)
            X = LA * RW + Cm * RU
        store_tile(by_RU, base, C, t, C, t, -e[:, None] * G * RU)
        store_plane(vectors, base, D_ERASE, -tl.sum(G * X, axis=1))
        X = -e[:, None] * X
        store_tile(dG, base, C, t, C, t, X + tl.trans(X))
