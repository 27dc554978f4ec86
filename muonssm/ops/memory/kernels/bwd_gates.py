"""Last kernel of the backward pass: gradients of values and gates.

LA[t, s] is the product of the gates between two steps, so dlog_alpha_j is the sum of LA dLA over all t >= j > s, and
dgamma_j = (LG^T dLG LG^T)[j, j-1], without a division by a gate. A_t is LA[t, s] for s before the chunk.
Cm = LA diag(mu) LG, g = LA (mu Gam), N = Cm - diag(mu) LG.

    dA_t = q_t.(dY S0)_t - e_t k_t.(R S0)_t,   at the last step + <S0, dS1>;    likewise dg and dGam
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    A_,
    BY_V,
    D_BETA,
    D_CM_END,
    D_ERASE,
    D_LA_END,
    D_LG_END,
    ERASE_,
    FORGET_M,
    FORGET_S,
    GAM,
    KEEP_M,
    READ_M,
    READ_S,
    RECALL_,
    SCALE,
    C,
    chunk_rows,
    cumulate,
    decay_matrix,
    decay_vector,
    load_log_alpha,
    load_log_gamma,
    load_mu,
    load_plane,
    load_rows,
    load_tile,
    store_rows,
)


@triton.jit
def spread(P, PRECISION: tl.constexpr):
    """Compute x_j = sum of P[t, s] over t >= j > s: everything that passes gate j."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    later = tl.where(s >= t, 1.0, 0.0)
    return tl.sum(tl.where(s < t, tl.dot(later, P, input_precision=PRECISION), 0.0), axis=1)


@triton.jit
def load_gradient_of_cm(vectors, by_YU, by_RU, base, last, ERASE: tl.constexpr):
    """Load the gradient of Cm, with that of its last row through the states."""
    t = tl.arange(0, C)
    dCm = load_tile(by_YU, base, C, t, C, t).to(tl.float32)
    if ERASE:
        dCm += load_tile(by_RU, base, C, t, C, t)
    return dCm + tl.where((t == last)[:, None], load_plane(vectors, base, D_CM_END)[None, :], 0.0)


@triton.jit
def gates(
    v, log_alpha, gamma, inject, chunks, vectors, du, by_YW, by_YU, by_RW, by_RU,
    dv, dlog_alpha, dbeta, dgamma, dinject, H, gamma_step, gamma_head, eta,
    d: tl.constexpr, BD: tl.constexpr, MOMENTUM: tl.constexpr, ERASE: tl.constexpr,
    RESIDUAL: tl.constexpr, INJECT: tl.constexpr, DGAMMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dv `[steps, H, d]`, through the write and its scale, and the gradients of the gates `[steps, H]`."""
    base = tl.program_id(0).to(tl.int64)
    h = base % H
    rows, live, start, last = chunk_rows(chunks, base // H, h, H)
    t = tl.arange(0, C)
    for i in range(0, d, BD):
        dV = load_plane(vectors, base, SCALE)[:, None] * load_tile(du, base, C, t, d, i + tl.arange(0, BD))
        dV += load_plane(vectors, base, BY_V)[:, None] * load_rows(v, rows, live, i, d, BD)
        store_rows(dv, rows, live, i, dV, d, BD)

    # 1. Gates through the states. (Vectors are loaded again below, to save registers.)
    e = load_plane(vectors, base, ERASE_)
    A = load_plane(vectors, base, A_)
    rS = load_plane(vectors, base, FORGET_S)
    before = tl.cumsum(A * (load_plane(vectors, base, READ_S) - e * rS), axis=0, reverse=True)
    db = load_plane(vectors, base, D_BETA)
    if ERASE:
        db += eta * (load_plane(vectors, base, D_ERASE) - A * rS)
        if MOMENTUM:
            db -= eta * load_plane(vectors, base, RECALL_) * load_plane(vectors, base, FORGET_M)
    tl.store(dbeta + rows, db, mask=live)

    # 2. alpha: decays between two steps, and from the start of the chunk.
    at_end = (t == last)[:, None]  # the last rows of LA, Cm and LG enter the states
    dCm = load_gradient_of_cm(vectors, by_YU, by_RU, base, last, ERASE)
    dLA = tl.where(at_end, load_plane(vectors, base, D_LA_END)[None, :], 0.0)
    if ERASE and not RESIDUAL:
        dLA += load_tile(by_YW, base, C, t, C, t)
        dLA += load_tile(by_RW, base, C, t, C, t)
    if MOMENTUM:
        LG = decay_matrix(load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head))
        dg = load_plane(vectors, base, READ_M) - load_plane(vectors, base, ERASE_) * load_plane(vectors, base, FORGET_M)
        through = (
            tl.dot(dCm, tl.trans(LG), input_precision=PRECISION) + dg[:, None] * load_plane(vectors, base, GAM)[None, :]
        )
        dLA += through * load_mu(inject, rows, live, INJECT)[None, :]
    else:
        dLA += dCm
    LA = decay_matrix(load_log_alpha(log_alpha, rows, live))
    tl.store(dlog_alpha + rows, spread(LA * dLA, PRECISION) + before, mask=live)

    # 3. gamma and mu, in the same way: first the gradients of diag(mu) LG and of mu Gam.
    if DGAMMA:
        forgotten = load_plane(vectors, base, ERASE_) * load_plane(vectors, base, FORGET_M)
        dg = load_plane(vectors, base, READ_M) - forgotten
        dGam = forgotten + tl.sum(LA * dg[:, None], axis=0)
        dCm = load_gradient_of_cm(vectors, by_YU, by_RU, base, last, ERASE)
        dLG = tl.dot(tl.trans(LA), dCm, input_precision=PRECISION)
        if ERASE:
            dLG -= load_tile(by_RU, base, C, t, C, t)
        dLG = tl.where(t[:, None] >= t[None, :], dLG, 0.0)
        if INJECT:
            dmu = tl.sum(dLG * LG, axis=1) + dGam * load_plane(vectors, base, GAM)
            tl.store(dinject + rows, dmu, mask=live)
            mu = load_mu(inject, rows, live, INJECT)
            dLG = mu[:, None] * dLG
            dGam = mu * dGam
        dGam += load_plane(vectors, base, KEEP_M)
        dLG += tl.where(at_end, load_plane(vectors, base, D_LG_END)[None, :], 0.0)
        X = tl.dot(tl.trans(LG), dLG, input_precision=PRECISION)
        lg_1 = load_log_gamma(gamma, start, t - 1, live & (t > 0), h, gamma_step, gamma_head)
        high, low, zeros = cumulate(load_log_gamma(gamma, start, t, live, h, gamma_step, gamma_head))
        high_1, low_1, zeros_1 = cumulate(lg_1)
        shifted = tl.exp(tl.minimum((high_1[:, None] - high[None, :]) + (low_1[:, None] - low[None, :]), 0.0))
        passed = (t[:, None] > t[None, :]) & (zeros_1[:, None] == zeros[None, :])  # shifted is LG[j - 1, s] there
        dgam = tl.sum(tl.where(passed, X * shifted, 0.0), axis=1)
        dgam += decay_vector(lg_1) * tl.sum(LG * dGam[:, None], axis=0)
        tl.store(dgamma + rows, dgam, mask=live)
