"""First kernels: everything in a chunk that does not depend on the states.

`measure` computes the scale of every write from the norms of its key and value, and the decays from the start of the
chunk and to its end. `solve` solves, if there is a correction,

    (I + e LA * G) W = -e [ A K S0^T + (g - mu Gam) K M0^T + (N * G) U ],   N = Cm - mu LG,  G = K K^T, strictly lower

With T the inverse, W = WU + WS S0^T + WM M0^T. The backward pass solves the transposed system for R, the gradient of
the right-hand side: R = T^T [ (LA * Q K^T)^T dY + LA[last,:] K dS1^T ] = RU + RS dS1^T.

RESIDUAL puts W into M: N replaces LA in the system, Cm replaces LA in R, and R has one more part, RM dM1^T with
RM = T^T (LG[last,:] K).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...triton.write import add_to_norm, write_scale
from .common import (
    A_,
    CM_END,
    ERASE_,
    G_,
    GAM,
    LA_END,
    LG_END,
    NORM_K,
    NORM_V,
    RECALL_,
    SCALE,
    C,
    chunk_rows,
    decay_matrix,
    decay_vector,
    decays,
    load_log_alpha,
    load_log_gamma,
    load_mu,
    load_plane,
    load_rows,
    product,
    store_plane,
    store_tile,
    unit_lower_inverse,
)


@triton.jit
def norm(x, rows, live, width: tl.constexpr, B: tl.constexpr):
    """Compute |x| of every row."""
    largest = tl.zeros((C,), dtype=tl.float32)
    total = tl.zeros((C,), dtype=tl.float32)
    for j in range(0, width, B):
        largest, total = add_to_norm(largest, total, load_rows(x, rows, live, j, width, B).to(tl.float32))
    return largest * tl.sqrt(total)


@triton.jit
def measure(
    k, v, log_alpha, beta, gamma, inject, chunks, vectors, H, gamma_step, gamma_head, eta, inside, outside, delta,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, STEPS: tl.constexpr, MOMENTUM: tl.constexpr,
    INJECT: tl.constexpr, BETA_OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Fill the first planes of `vectors`."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, last = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    b = tl.load(beta + rows, mask=live, other=0.0)
    norm_k = tl.zeros((C,), dtype=tl.float32)
    norm_v = tl.zeros((C,), dtype=tl.float32)
    if STEPS >= 0:
        norm_k = norm(k, rows, live, m, BM)
        norm_v = norm(v, rows, live, d, BD)
    store_plane(vectors, base, SCALE, write_scale(norm_k, norm_v, b, inside, outside, delta, STEPS, BETA_OUTSIDE))
    store_plane(vectors, base, ERASE_, eta * b)
    store_plane(vectors, base, NORM_K, norm_k)
    store_plane(vectors, base, NORM_V, norm_v)

    la = load_log_alpha(log_alpha, rows, live)
    LA = decay_matrix(la)
    LA_end = tl.sum(tl.where((t == last)[:, None], LA, 0.0), axis=0)
    store_plane(vectors, base, A_, decay_vector(la))
    store_plane(vectors, base, LA_END, LA_end)
    if MOMENTUM:
        lg = load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head)
        LG = decay_matrix(lg)
        Gam = decay_vector(lg)
        mu = load_mu(inject, rows, live, INJECT)
        g = tl.sum(LA * (mu * Gam)[None, :], axis=1)
        store_plane(vectors, base, G_, g)
        store_plane(vectors, base, GAM, Gam)
        store_plane(vectors, base, RECALL_, g - mu * Gam)
        store_plane(vectors, base, CM_END, tl.sum((LA_end * mu)[:, None] * LG, axis=0))
        store_plane(vectors, base, LG_END, tl.sum(tl.where((t == last)[:, None], LG, 0.0), axis=0))
    else:
        store_plane(vectors, base, G_, tl.zeros((C,), dtype=tl.float32))
        store_plane(vectors, base, GAM, tl.zeros((C,), dtype=tl.float32))
        store_plane(vectors, base, CM_END, LA_end)
        store_plane(vectors, base, LG_END, tl.where(t == last, 1.0, 0.0))


@triton.jit
def solve(
    q, k, v, log_alpha, gamma, inject, dy, chunks, vectors, WS, WM, WU, RS, RM, RU, H, gamma_step, gamma_head,
    m: tl.constexpr, d: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, MOMENTUM: tl.constexpr,
    RESIDUAL: tl.constexpr, INJECT: tl.constexpr, BACKWARD: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute WS, WM `[n, H, C, m]` and WU `[n, H, C, d]`; with BACKWARD also RS, RU and, with RESIDUAL, RM."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, _ = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    la = load_log_alpha(log_alpha, rows, live)
    lg = load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head)
    LA, LG, Cm = decays(la, lg, load_mu(inject, rows, live, INJECT), MOMENTUM, INJECT, PRECISION)
    Cm -= LG
    G = tl.zeros((C, C), dtype=tl.float32)
    for j in range(0, m, BM):
        K = load_rows(k, rows, live, j, m, BM)
        G += product(K, tl.trans(K), OPERAND, PRECISION)
    G = tl.where(t[:, None] > t[None, :], load_plane(vectors, base, ERASE_)[:, None] * G, 0.0)
    lost = (-load_plane(vectors, base, SCALE)[None, :] * Cm * G).to(OPERAND)
    if RESIDUAL:
        LA = Cm
    T = unit_lower_inverse(LA * G, PRECISION).to(OPERAND)

    TL = product(T, lost, OPERAND, PRECISION).to(OPERAND)
    for j in range(0, d, BD):
        V = load_rows(v, rows, live, j, d, BD)
        store_tile(WU, base, C, t, d, j + tl.arange(0, BD), product(TL, V, OPERAND, PRECISION))
    for j in range(0, m, BM):
        column = j + tl.arange(0, BM)
        e = load_plane(vectors, base, ERASE_)
        K = load_rows(k, rows, live, j, m, BM).to(tl.float32)
        X = (-e * load_plane(vectors, base, A_))[:, None] * K
        store_tile(WS, base, C, t, m, column, product(T, X, OPERAND, PRECISION))
        if MOMENTUM:
            X = (-e * load_plane(vectors, base, RECALL_))[:, None] * K
            store_tile(WM, base, C, t, m, column, product(T, X, OPERAND, PRECISION))
        if BACKWARD:
            X = load_plane(vectors, base, CM_END if RESIDUAL else LA_END)[:, None] * K
            store_tile(RS, base, C, t, m, column, product(tl.trans(T), X, OPERAND, PRECISION))
            if RESIDUAL:
                X = load_plane(vectors, base, LG_END)[:, None] * K
                store_tile(RM, base, C, t, m, column, product(tl.trans(T), X, OPERAND, PRECISION))
    if BACKWARD:
        QK = tl.zeros((C, C), dtype=tl.float32)
        for j in range(0, m, BM):
            K = tl.trans(load_rows(k, rows, live, j, m, BM))
            QK += product(load_rows(q, rows, live, j, m, BM), K, OPERAND, PRECISION)
        la = load_log_alpha(log_alpha, rows, live)  # decays are computed again, to save registers
        if RESIDUAL:
            lg = load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head)
            _, _, Cm = decays(la, lg, load_mu(inject, rows, live, INJECT), MOMENTUM, INJECT, PRECISION)
            QK *= Cm
        else:
            QK *= decay_matrix(la)
        reads = tl.trans(product(QK, T, OPERAND, PRECISION)).to(OPERAND)
        for j in range(0, d, BD):
            dY = load_rows(dy, rows, live, j, d, BD)
            store_tile(RU, base, C, t, d, j + tl.arange(0, BD), product(reads, dY, OPERAND, PRECISION))
