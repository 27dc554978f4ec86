"""Last kernel of the backward pass: queries, keys, values and gates, with what the states contribute to them.

    dQ = A (dY S0) + g (dY M0) + dQK K
    dK = dQK^T Q + (dG + dG^T) K + (LA[last,:] W + Cm[last,:] U) dS1 + LG[last,:] U dM1 - e A (R S0) - e (g - Gam) (R M0)
    dA_t = q_t.(dY S0)_t - e_t k_t.(R S0)_t,   at the last step + <S0, dS1>;    likewise dg and dGam
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.write import write_scale_backward
from .common import (
    A_,
    C,
    CM_END,
    D_ERASE,
    D_GAMMA,
    D_LOG_ALPHA,
    D_SCALE,
    ERASE_,
    G_,
    GAM,
    LA_END,
    LG_END,
    NORM_K,
    NORM_V,
    SCALE,
    chunk_rows,
    decay_matrix,
    load_gates,
    load_plane,
    load_rows,
    load_tile,
    load_tile_transposed,
    product,
    store_rows,
)
from .gradients import spread


@triton.jit
def keys(
    q, k, v, log_alpha, beta, gamma, dy, chunks, vectors, W, R, S_all, M_all, dS_all, dM_all, du, dQK, dG,
    dq, dk, dv, dlog_alpha, dbeta, dgamma, H, gamma_step, gamma_head, eta, inside, outside, delta,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, DGAMMA: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one head, in the inputs' layouts; dgamma `[steps, H]`."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, last = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    A = load_plane(vectors, base, A_)
    g = load_plane(vectors, base, G_)
    Gam = load_plane(vectors, base, GAM)
    c = load_plane(vectors, base, SCALE)
    e = load_plane(vectors, base, ERASE_)
    b = tl.load(beta + rows, mask=live, other=0.0)
    dc = load_plane(vectors, base, D_SCALE)
    norm_k = load_plane(vectors, base, NORM_K)
    norm_v = load_plane(vectors, base, NORM_V)
    db, by_k, by_v = write_scale_backward(dc, norm_k, norm_v, b, inside, outside, delta, STEPS)
    LA_end = load_plane(vectors, base, LA_END)
    Cm_end = load_plane(vectors, base, CM_END) * c
    LG_end = load_plane(vectors, base, LG_END) * c

    # 1. Queries and keys; row sums of what the states contribute, for the gates.
    yS = tl.zeros((C,), dtype=tl.float32)
    yM = tl.zeros((C,), dtype=tl.float32)
    rS = tl.zeros((C,), dtype=tl.float32)
    rM = tl.zeros((C,), dtype=tl.float32)
    sum_SS = 0.0
    sum_MS = 0.0
    sum_MM = 0.0
    for j in range(0, m, BM):
        key = j + tl.arange(0, BM)
        YS = tl.zeros((C, BM), dtype=tl.float32)
        YM = tl.zeros((C, BM), dtype=tl.float32)
        RS = tl.zeros((C, BM), dtype=tl.float32)
        RM = tl.zeros((C, BM), dtype=tl.float32)
        dK = tl.zeros((C, BM), dtype=tl.float32)
        for i in range(0, d, BD):
            column = i + tl.arange(0, BD)
            dY = load_rows(dy, rows, live, i, d, BD)
            S = load_tile_transposed(S_all, base, m, key, d, column)
            dS = load_tile_transposed(dS_all, base, m, key, d, column)
            V = load_rows(v, rows, live, i, d, BD).to(tl.float32)
            X = Cm_end[:, None] * V
            YS += product(dY, S, OPERAND, PRECISION)
            sum_SS += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
            if ERASE:
                w = load_tile(W, base, C, t, d, column).to(tl.float32)
                r = load_tile(R, base, C, t, d, column)
                X += LA_end[:, None] * w
                RS += product(r, S, OPERAND, PRECISION)
            dK += product(X, dS, OPERAND, PRECISION)
            if MOMENTUM:
                M = load_tile_transposed(M_all, base, m, key, d, column)
                dM = load_tile_transposed(dM_all, base, m, key, d, column)
                YM += product(dY, M, OPERAND, PRECISION)
                dK += product(LG_end[:, None] * V, dM, OPERAND, PRECISION)
                sum_MS += tl.sum(M.to(tl.float32) * dS.to(tl.float32))
                sum_MM += tl.sum(M.to(tl.float32) * dM.to(tl.float32))
                if ERASE:
                    RM += product(r, M, OPERAND, PRECISION)
        Q = load_rows(q, rows, live, j, m, BM)
        K = load_rows(k, rows, live, j, m, BM)
        yS += tl.sum(YS * Q.to(tl.float32), axis=1)
        yM += tl.sum(YM * Q.to(tl.float32), axis=1)
        rS += tl.sum(RS * K.to(tl.float32), axis=1)
        rM += tl.sum(RM * K.to(tl.float32), axis=1)
        scores = load_tile(dQK, base, C, t, C, t)
        YS = A[:, None] * YS + g[:, None] * YM + product(scores, K, OPERAND, PRECISION)
        store_rows(dq, rows, live, j, YS, m, BM)
        dK += product(tl.trans(scores), Q, OPERAND, PRECISION) + by_k[:, None] * K.to(tl.float32)
        if ERASE:
            dK -= (e * A)[:, None] * RS + (e * (g - Gam))[:, None] * RM
            dK += product(load_tile(dG, base, C, t, C, t), K, OPERAND, PRECISION)
        store_rows(dk, rows, live, j, dK, m, BM)

    # 2. Values: through the write, and through the norm in its scale.
    for i in range(0, d, BD):
        dU = load_tile(du, base, C, t, d, i + tl.arange(0, BD)).to(tl.float32)
        V = load_rows(v, rows, live, i, d, BD).to(tl.float32)
        store_rows(dv, rows, live, i, c[:, None] * dU + by_v[:, None] * V, d, BD)

    # 3. Gates: A_t = LA[t, -1], so to speak, and g = LA Gam.
    at_end = t == last
    dA = yS - e * rS + tl.where(at_end, sum_SS, 0.0)
    dg = yM - e * rM + tl.where(at_end, sum_MS, 0.0)
    alpha, gam = load_gates(log_alpha, gamma, rows, live, start, h, gamma_step, gamma_head, MOMENTUM)
    LA = decay_matrix(alpha)
    da = load_plane(vectors, base, D_LOG_ALPHA) + tl.cumsum(A * dA, axis=0, reverse=True)
    if MOMENTUM:
        da += spread(LA * dg[:, None] * Gam[None, :])
    tl.store(dlog_alpha + rows, da, mask=live)
    if ERASE:
        db += eta * (load_plane(vectors, base, D_ERASE) - A * rS - (g - Gam) * rM)
    tl.store(dbeta + rows, db, mask=live)
    if DGAMMA:
        dGam = e * rM + tl.where(at_end, sum_MM, 0.0) + tl.sum(LA * dg[:, None], axis=0)
        LG = decay_matrix(gam)
        at = (start + t - 1) * gamma_step + h * gamma_head
        previous = tl.cumprod(tl.load(gamma + at, mask=live & (t > 0), other=1.0), axis=0)  # Gam_{j-1}
        dgam = load_plane(vectors, base, D_GAMMA) + previous * tl.sum(LG * dGam[:, None], axis=0)
        tl.store(dgamma + rows, dgam, mask=live)
