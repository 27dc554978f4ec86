"""Gradients of queries and keys.

    dQ = A (dY S0) + g (dY M0) + dQK K
    dK = dQK^T Q + (dG + dG^T) K + (LA[last,:] W + Cm[last,:] U) dS1 + LG[last,:] U dM1
         - e A (R S0) - e (g - mu Gam) (R M0)

With RESIDUAL, U + W replaces U, and LA[last,:] W goes.

Vectors are loaded each time they are used: holding them across a loop would cost registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    A_,
    BY_K,
    CM_END,
    ERASE_,
    FORGET_M,
    FORGET_S,
    G_,
    KEEP_M,
    LA_END,
    LG_END,
    READ_M,
    READ_S,
    RECALL_,
    SCALE,
    C,
    chunk_rows,
    load_plane,
    load_rows,
    load_tile,
    load_tile_transposed,
    product,
    store_plane,
    store_rows,
)


@triton.jit
def keys(
    q, k, v, dy, chunks, vectors, W, R, S_all, M_all, dS_all, dM_all, dQK, dG, dq, dk, H,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, RESIDUAL: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk `[steps, H, m]` of one chunk of one head, and in `vectors` the gates' gradients by states."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, _, last = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
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
            YS += product(dY, S, OPERAND, PRECISION)
            sum_SS += tl.sum(S.to(tl.float32) * dS.to(tl.float32))
            U = load_rows(v, rows, live, i, d, BD) * load_plane(vectors, base, SCALE)[:, None]
            if RESIDUAL:
                U += load_tile(W, base, C, t, d, column)
            X = load_plane(vectors, base, CM_END)[:, None] * U
            if ERASE:
                r = load_tile(R, base, C, t, d, column)
                RS += product(r, S, OPERAND, PRECISION)
                if not RESIDUAL:
                    X += load_plane(vectors, base, LA_END)[:, None] * load_tile(W, base, C, t, d, column)
            dK += product(X, dS, OPERAND, PRECISION)
            if MOMENTUM:
                M = load_tile_transposed(M_all, base, m, key, d, column)
                sum_MS += tl.sum(M.to(tl.float32) * dS.to(tl.float32))
                YM += product(dY, M, OPERAND, PRECISION)
                if ERASE:
                    RM += product(r, M, OPERAND, PRECISION)
                dM = load_tile_transposed(dM_all, base, m, key, d, column)
                sum_MM += tl.sum(M.to(tl.float32) * dM.to(tl.float32))
                dK += product(load_plane(vectors, base, LG_END)[:, None] * U, dM, OPERAND, PRECISION)
        Q = load_rows(q, rows, live, j, m, BM)
        K = load_rows(k, rows, live, j, m, BM)
        A = load_plane(vectors, base, A_)
        g = load_plane(vectors, base, G_)
        yS += tl.sum(YS * Q.to(tl.float32), axis=1)
        yM += tl.sum(YM * Q.to(tl.float32), axis=1)
        scores = load_tile(dQK, base, C, t, C, t)
        YS = A[:, None] * YS + g[:, None] * YM + product(scores, K, OPERAND, PRECISION)
        store_rows(dq, rows, live, j, YS, m, BM)
        dK += product(tl.trans(scores), Q, OPERAND, PRECISION)
        dK += load_plane(vectors, base, BY_K)[:, None] * K.to(tl.float32)
        if ERASE:
            rS += tl.sum(RS * K.to(tl.float32), axis=1)
            rM += tl.sum(RM * K.to(tl.float32), axis=1)
            e = load_plane(vectors, base, ERASE_)
            dK -= (e * A)[:, None] * RS
            if MOMENTUM:
                dK -= (e * load_plane(vectors, base, RECALL_))[:, None] * RM
            dK += product(load_tile(dG, base, C, t, C, t), K, OPERAND, PRECISION)
        store_rows(dk, rows, live, j, dK, m, BM)
    store_plane(vectors, base, READ_S, yS + tl.where(t == last, sum_SS, 0.0))
    store_plane(vectors, base, READ_M, yM + tl.where(t == last, sum_MS, 0.0))
    store_plane(vectors, base, KEEP_M, tl.where(t == last, sum_MM, 0.0))
    store_plane(vectors, base, FORGET_S, rS)
    store_plane(vectors, base, FORGET_M, rM)
