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

from .common import (
    C,
    CM_END,
    D_CM_END,
    D_ERASE,
    D_GAMMA,
    D_LA_END,
    D_LG_END,
    D_LOG_ALPHA,
    D_SCALE,
    ERASE_,
    LG_END,
    SCALE,
    chunk_rows,
    decays,
    load_gates,
    load_plane,
    load_rows,
    load_tile,
    product,
    store_plane,
    store_tile,
)


@triton.jit
def values(
    q, k, v, log_alpha, gamma, dy, chunks, vectors, W, R, dS_all, dM_all, du, H, gamma_step, gamma_head,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
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
    alpha, gam = load_gates(log_alpha, gamma, rows, live, start, h, gamma_step, gamma_head, MOMENTUM)
    _, LG, Cm = decays(alpha, gam, MOMENTUM, PRECISION)
    reads = tl.trans(Cm * QK).to(OPERAND)
    if ERASE:
        e = load_plane(vectors, base, ERASE_)
        lost = tl.where(t[:, None] > t[None, :], (Cm - LG) * G * (-e)[:, None], 0.0)
        lost = tl.trans(lost).to(OPERAND)
    c = load_plane(vectors, base, SCALE)
    Cm_end = load_plane(vectors, base, CM_END)
    LG_end = load_plane(vectors, base, LG_END)
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
        dU = Cm_end[:, None] * X + LG_end[:, None] * Z
        dU += product(reads, load_rows(dy, rows, live, i, d, BD), OPERAND, PRECISION)
        if ERASE:
            dU += product(lost, load_tile(R, base, C, t, d, column), OPERAND, PRECISION)
            dLA_end += tl.sum(load_tile(W, base, C, t, d, column).to(tl.float32) * X, axis=1)
        V = load_rows(v, rows, live, i, d, BD).to(tl.float32)
        dc += tl.sum(V * dU, axis=1)
        dCm_end += tl.sum(V * X, axis=1)
        dLG_end += tl.sum(V * Z, axis=1)
        store_tile(du, base, C, t, d, column, dU)
    store_plane(vectors, base, D_SCALE, dc)
    store_plane(vectors, base, D_LA_END, dLA_end)
    store_plane(vectors, base, D_CM_END, c * dCm_end)
    store_plane(vectors, base, D_LG_END, c * dLG_end)


@triton.jit
def spread(P):
    """x_j = sum of P[t, s] over t >= j > s: what passes gate j."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    return tl.sum(tl.where(s < t, tl.cumsum(P, axis=0, reverse=True), 0.0), axis=1)


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
    c = load_plane(vectors, base, SCALE)
    YW = tl.zeros((C, C), dtype=tl.float32)
    YU = tl.zeros((C, C), dtype=tl.float32)
    RW = tl.zeros((C, C), dtype=tl.float32)
    RU = tl.zeros((C, C), dtype=tl.float32)
    for i in range(0, d, BD):
        column = i + tl.arange(0, BD)
        dY = load_rows(dy, rows, live, i, d, BD)
        V = tl.trans(load_rows(v, rows, live, i, d, BD))
        YU += product(dY, V, OPERAND, PRECISION)
        if ERASE:
            r = load_tile(R, base, C, t, d, column)
            w = tl.trans(load_tile(W, base, C, t, d, column))
            YW += product(dY, w, OPERAND, PRECISION)
            RW += product(r, w, OPERAND, PRECISION)
            RU += product(r, V, OPERAND, PRECISION)
    YU *= c[None, :]
    RU *= c[None, :]
    QK = tl.zeros((C, C), dtype=tl.float32)
    G = tl.zeros((C, C), dtype=tl.float32)
    for j in range(0, m, BM):
        K = load_rows(k, rows, live, j, m, BM)
        QK += product(load_rows(q, rows, live, j, m, BM), tl.trans(K), OPERAND, PRECISION)
        if ERASE:
            G += product(K, tl.trans(K), OPERAND, PRECISION)
    alpha, gam = load_gates(log_alpha, gamma, rows, live, start, h, gamma_step, gamma_head, MOMENTUM)
    LA, LG, Cm = decays(alpha, gam, MOMENTUM, PRECISION)
    store_tile(dQK, base, C, t, C, t, LA * YW + Cm * YU)

    at_end = (t == last)[:, None]
    dLA = QK * YW + tl.where(at_end, load_plane(vectors, base, D_LA_END)[None, :], 0.0)
    dCm = QK * YU + tl.where(at_end, load_plane(vectors, base, D_CM_END)[None, :], 0.0)
    dCm = tl.where(t[:, None] >= t[None, :], dCm, 0.0)
    dLG = tl.where(at_end, load_plane(vectors, base, D_LG_END)[None, :], 0.0)
    if ERASE:
        e = load_plane(vectors, base, ERASE_)
        below = t[:, None] > t[None, :]
        RW = tl.where(below, RW, 0.0)
        RU = tl.where(below, RU, 0.0)
        X = LA * RW + (Cm - LG) * RU
        store_plane(vectors, base, D_ERASE, -tl.sum(G * X, axis=1))
        X = -e[:, None] * X
        store_tile(dG, base, C, t, C, t, X + tl.trans(X))
        dLA -= e[:, None] * G * RW
        X = e[:, None] * G * RU
        dCm -= X
        dLG += X
    if MOMENTUM:
        dLA += tl.dot(dCm, tl.trans(LG), input_precision=PRECISION)
    else:
        dLA += dCm
    store_plane(vectors, base, D_LOG_ALPHA, spread(LA * dLA))
    if DGAMMA:
        dLG += tl.dot(tl.trans(LA), dCm, input_precision=PRECISION)
        dLG = tl.where(t[:, None] >= t[None, :], dLG, 0.0)
        X = tl.dot(tl.trans(LG), dLG, input_precision=PRECISION)
        at = (start + t - 1) * gamma_step + h * gamma_head
        previous = tl.load(gamma + at, mask=live & (t > 0), other=1.0)
        shifted = tl.cumprod(tl.where(t[:, None] > t[None, :] + 1, previous[:, None], 1.0), axis=0)  # LG[j - 1, s]
        store_plane(vectors, base, D_GAMMA, tl.sum(tl.where(t[:, None] > t[None, :], X * shifted, 0.0), axis=1))
