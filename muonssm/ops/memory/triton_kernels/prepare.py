"""First kernel: all of a chunk that does not depend on the states.

    (I + e LA * G) W = -e [ A K S0^T + (g - Gam) K M0^T + ((Cm - LG) * G) U ],   G = K K^T, strictly lower parts

With T the inverse, W = WU + WS S0^T + WM M0^T. The backward pass solves the transposed system for R, the gradient of
the right-hand side: R = T^T [ (LA * Q K^T)^T dY + LA[last,:] K dS1^T ] = RU + RS dS1^T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.write import add_to_norm, write_scale
from .common import (
    A_,
    C,
    CM_END,
    ERASE_,
    G_,
    GAM,
    LA_END,
    LG_END,
    NORM_K,
    NORM_V,
    SCALE,
    chunk_rows,
    decays,
    load_gates,
    load_rows,
    product,
    store_plane,
    store_tile,
    unit_lower_inverse,
)


@triton.jit
def prepare(
    q, k, v, log_alpha, beta, gamma, dy, chunks, vectors, WS, WM, WU, RS, RU,
    H, gamma_step, gamma_head, eta, inside, outside, delta,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, BACKWARD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`vectors`, and where there is an erase WS, WM `[n, H, C, m]` and WU `[n, H, C, d]`; BACKWARD: RS and RU, too."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, last = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    alpha, gam = load_gates(log_alpha, gamma, rows, live, start, h, gamma_step, gamma_head, MOMENTUM)
    b = tl.load(beta + rows, mask=live, other=0.0)
    e = eta * b

    # 1. The scale of every write, from the norms of its key and value.
    G = tl.zeros((C, C), dtype=tl.float32)
    QK = tl.zeros((C, C), dtype=tl.float32)
    largest = tl.zeros((C,), dtype=tl.float32)
    total = tl.zeros((C,), dtype=tl.float32)
    for j in range(0, m, BM):
        K = load_rows(k, rows, live, j, m, BM)
        if STEPS >= 0:
            largest, total = add_to_norm(largest, total, K.to(tl.float32))
        if ERASE:
            G += product(K, tl.trans(K), OPERAND, PRECISION)
            if BACKWARD:
                QK += product(load_rows(q, rows, live, j, m, BM), tl.trans(K), OPERAND, PRECISION)
    norm_k = largest * tl.sqrt(total)
    largest = tl.zeros((C,), dtype=tl.float32)
    total = tl.zeros((C,), dtype=tl.float32)
    if STEPS >= 0:
        for j in range(0, d, BD):
            largest, total = add_to_norm(largest, total, load_rows(v, rows, live, j, d, BD).to(tl.float32))
    norm_v = largest * tl.sqrt(total)
    c = tl.where(live, write_scale(norm_k, norm_v, b, inside, outside, delta, STEPS), 0.0)

    # 2. Decays: between two steps, from the start to a step, and from a step to the end.
    LA, LG, Cm = decays(alpha, gam, MOMENTUM, PRECISION)
    A = tl.cumprod(alpha, axis=0)
    Gam = tl.cumprod(gam, axis=0)
    g = tl.sum(LA * Gam[None, :], axis=1)
    LA_end = tl.sum(tl.where((t == last)[:, None], LA, 0.0), axis=0)
    LG_end = tl.sum(tl.where((t == last)[:, None], LG, 0.0), axis=0)
    store_plane(vectors, base, SCALE, c)
    store_plane(vectors, base, A_, A)
    store_plane(vectors, base, G_, g)
    store_plane(vectors, base, GAM, Gam)
    store_plane(vectors, base, LA_END, LA_end)
    store_plane(vectors, base, CM_END, tl.sum(LA_end[:, None] * LG, axis=0))
    store_plane(vectors, base, LG_END, LG_end)
    store_plane(vectors, base, ERASE_, e)
    if BACKWARD:
        store_plane(vectors, base, NORM_K, norm_k)
        store_plane(vectors, base, NORM_V, norm_v)

    # 3. The erase.
    if ERASE:
        below = t[:, None] > t[None, :]
        T = unit_lower_inverse(tl.where(below, e[:, None] * LA * G, 0.0), PRECISION)
        lost = tl.where(below, (Cm - LG) * G, 0.0) * (-e)[:, None] * c[None, :]
        TL = tl.dot(T, lost, input_precision=PRECISION).to(OPERAND)
        for j in range(0, d, BD):
            column = j + tl.arange(0, BD)
            store_tile(WU, base, C, t, d, column, product(TL, load_rows(v, rows, live, j, d, BD), OPERAND, PRECISION))
        if BACKWARD:
            QT = tl.trans(tl.dot(LA * QK, T, input_precision=PRECISION)).to(OPERAND)
            for j in range(0, d, BD):
                dY = load_rows(dy, rows, live, j, d, BD)
                store_tile(RU, base, C, t, d, j + tl.arange(0, BD), product(QT, dY, OPERAND, PRECISION))
        for j in range(0, m, BM):
            column = j + tl.arange(0, BM)
            K = load_rows(k, rows, live, j, m, BM).to(tl.float32)
            store_tile(WS, base, C, t, m, column, product(T, (-e * A)[:, None] * K, OPERAND, PRECISION))
            if MOMENTUM:
                store_tile(WM, base, C, t, m, column, product(T, (-e * (g - Gam))[:, None] * K, OPERAND, PRECISION))
            if BACKWARD:
                store_tile(RS, base, C, t, m, column, product(tl.trans(T), LA_end[:, None] * K, OPERAND, PRECISION))
