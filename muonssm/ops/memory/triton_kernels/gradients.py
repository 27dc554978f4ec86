"""Gradients within a chunk, from the states before it (S0, M0), their gradients after it (dS1, dM1), W and R.

R is the gradient of the right-hand side of the system for W (see prepare.py), so with E = -e R

    dU = (Cm * Q K^T)^T dY + ((Cm - LG) * G)^T E + Cm[last,:] K dS1^T + LG[last,:] K dM1^T            `values`
    d(Q K^T) = LA * dY W^T + Cm * dY U^T,    dG = LA * E W^T + (Cm - LG) * E U^T  (strictly lower)    `scores`

`scores` also finishes what the chunk's own products contribute to the gates. LA is a product of gates between two
steps, so dlog_alpha_j sums LA dLA over all t >= j > s, and dgamma_j = (LG^T dLG LG^T)[j, j-1]: no gate is divided by.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.write import write_scale_backward
from .common import (
    BY_K,
    BY_V,
    C,
    CM_END,
    D_BETA,
    D_CM_END,
    D_ERASE,
    D_GAMMA,
    D_LA_END,
    D_LG_END,
    D_LOG_ALPHA,
    ERASE_,
    LG_END,
    NORM_K,
    NORM_V,
    SCALE,
    chunk_rows,
    cumulate,
    decays,
    load_log_alpha,
    load_log_gamma,
    load_plane,
    load_rows,
    load_tile,
    product,
    store_plane,
    store_tile,
)


@triton.jit
def values(
    q, k, v, log_alpha, beta, gamma, dy, chunks, vectors, W, R, dS_all, dM_all, du, H, gamma_step, gamma_head,
    inside, outside, delta, m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """du `[n, H, C, d]`, and in `vectors` the gradients of the write's scale and of the last rows of LA, Cm and LG."""
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
    _, LG, Cm = decays(la, lg, MOMENTUM, PRECISION)
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
            dLA_end += tl.sum(load_tile(W, base, C, t, d, column).to(tl.float32) * X, axis=1)
        V = load_rows(v, rows, live, i, d, BD).to(tl.float32)
        dc += tl.sum(V * dU, axis=1)
        dCm_end += tl.sum(V * X, axis=1)
        dLG_end += tl.sum(V * Z, axis=1)
        store_tile(du, base, C, t, d, column, dU)
    c = load_plane(vectors, base, SCALE)
    b = tl.load(beta + rows, mask=live, other=0.0)
    norm_k = load_plane(vectors, base, NORM_K)
    norm_v = load_plane(vectors, base, NORM_V)
    db, by_k, by_v = write_scale_backward(dc, norm_k, norm_v, b, inside, outside, delta, STEPS)
    store_plane(vectors, base, D_BETA, db)
    store_plane(vectors, base, BY_K, by_k)
    store_plane(vectors, base, BY_V, by_v)
    store_plane(vectors, base, D_LA_END, dLA_end)
    store_plane(vectors, base, D_CM_END, c * dCm_end)
    store_plane(vectors, base, D_LG_END, c * dLG_end)


@triton.jit
def spread(P, PRECISION: tl.constexpr):
    """x_j = sum of P[t, s] over t >= j > s: what passes gate j."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    later = tl.where(s >= t, 1.0, 0.0)
    return tl.sum(tl.where(s < t, tl.dot(later, P, input_precision=PRECISION), 0.0), axis=1)


@triton.jit
def scores(
    q, k, v, log_alpha, gamma, dy, chunks, vectors, W, R, dQK, dG, H, gamma_step, gamma_head,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, DGAMMA: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQK, dG + dG^T `[n, H, C, C]`, and in `vectors` what the chunk's own products leave for the gates' gradients."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, last = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    la = load_log_alpha(log_alpha, rows, live)
    lg = load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head)
    LA, LG, Cm = decays(la, lg, MOMENTUM, PRECISION)
    dLA = tl.zeros((C, C), dtype=tl.float32)
    dCm = tl.zeros((C, C), dtype=tl.float32)

    # 1. The system's right-hand side and matrix, through G. LG enters as -Cm does: dLG = -dCm, for the time being.
    if ERASE:
        for i in range(0, d, BD):
            r = load_tile(R, base, C, t, d, i + tl.arange(0, BD))
            w = load_tile(W, base, C, t, d, i + tl.arange(0, BD))
            dLA += product(r, tl.trans(w), OPERAND, PRECISION)
            dCm += product(r, tl.trans(load_rows(v, rows, live, i, d, BD)), OPERAND, PRECISION)
        below = t[:, None] > t[None, :]
        dLA = tl.where(below, dLA, 0.0)
        dCm = tl.where(below, dCm * load_plane(vectors, base, SCALE)[None, :], 0.0)
        X = LA * dLA + (Cm - LG) * dCm
        G = tl.zeros((C, C), dtype=tl.float32)
        for j in range(0, m, BM):
            K = load_rows(k, rows, live, j, m, BM)
            G += product(K, tl.trans(K), OPERAND, PRECISION)
        store_plane(vectors, base, D_ERASE, -tl.sum(G * X, axis=1))
        e = load_plane(vectors, base, ERASE_)
        X = -e[:, None] * X
        store_tile(dG, base, C, t, C, t, X + tl.trans(X))
        G = -e[:, None] * G
        dLA = G * dLA
        dCm = G * dCm
    if DGAMMA:
        dLG = tl.where((t == last)[:, None], load_plane(vectors, base, D_LG_END)[None, :], 0.0) - dCm

    # 2. The outputs, through Q K^T.
    YW = tl.zeros((C, C), dtype=tl.float32)
    YU = tl.zeros((C, C), dtype=tl.float32)
    for i in range(0, d, BD):
        dY = load_rows(dy, rows, live, i, d, BD)
        YU += product(dY, tl.trans(load_rows(v, rows, live, i, d, BD)), OPERAND, PRECISION)
        if ERASE:
            w = load_tile(W, base, C, t, d, i + tl.arange(0, BD))
            YW += product(dY, tl.trans(w), OPERAND, PRECISION)
    YU *= load_plane(vectors, base, SCALE)[None, :]
    store_tile(dQK, base, C, t, C, t, LA * YW + Cm * YU)
    QK = tl.zeros((C, C), dtype=tl.float32)
    for j in range(0, m, BM):
        K = tl.trans(load_rows(k, rows, live, j, m, BM))
        QK += product(load_rows(q, rows, live, j, m, BM), K, OPERAND, PRECISION)
    dLA += QK * YW
    dCm += tl.where(t[:, None] >= t[None, :], QK * YU, 0.0)

    # 3. The gates: the last rows made the states, and Cm = LA LG.
    dLA += tl.where((t == last)[:, None], load_plane(vectors, base, D_LA_END)[None, :], 0.0)
    dCm += tl.where((t == last)[:, None], load_plane(vectors, base, D_CM_END)[None, :], 0.0)
    if MOMENTUM:
        dLA += tl.dot(dCm, tl.trans(LG), input_precision=PRECISION)
    else:
        dLA += dCm
    store_plane(vectors, base, D_LOG_ALPHA, spread(LA * dLA, PRECISION))
    if DGAMMA:
        dLG += tl.dot(tl.trans(LA), dCm, input_precision=PRECISION)
        X = tl.dot(tl.trans(LG), tl.where(t[:, None] >= t[None, :], dLG, 0.0), input_precision=PRECISION)
        high, low, zeros = cumulate(lg)
        before = load_log_gamma(gamma, start, t - 1, live & (t > 0), h, gamma_step, gamma_head)
        high_before, low_before, zeros_before = cumulate(before)
        shifted = tl.exp(tl.minimum((high_before[:, None] - high[None, :]) + (low_before[:, None] - low[None, :]), 0.0))
        passed = (t[:, None] > t[None, :]) & (zeros_before[:, None] == zeros[None, :])  # LG[j - 1, s]
        store_plane(vectors, base, D_GAMMA, tl.sum(tl.where(passed, X * shifted, 0.0), axis=1))
