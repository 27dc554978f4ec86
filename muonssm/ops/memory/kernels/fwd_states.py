"""Second kernel: the states, chunk by chunk, and in the backward pass their gradients, from last chunk to first.

A program holds its columns of S^T and M^T `[m, BD]` in float32 and processes one head of one sequence.

    W  = WU + WS S0^T + WM M0^T
    S1 = A S0 + g M0 + (LA[last,:] W + Cm[last,:] U)^T K          M1 = Gam M0 + (LG[last,:] U)^T K

    R   = RU + RS dS1^T
    dS0 = A dS1 + dY^T (A Q) - R^T (e A K)
    dM0 = g dS1 + Gam dM1 + dY^T (g Q) - R^T (e (g - mu Gam) K)

With RESIDUAL the correction is a part of the write: U + W replaces U, LA[last,:] W goes, and R has RM dM1^T too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import (
    A_,
    CM_END,
    ERASE_,
    G_,
    GAM,
    LA_END,
    LG_END,
    RECALL_,
    SCALE,
    C,
    chunk_rows,
    load_number,
    load_plane,
    load_rows,
    load_tile,
    load_tile_transposed,
    product,
    store_tile,
)


@triton.jit
def load_rows_transposed(x, rows, live, width: tl.constexpr, B: tl.constexpr):
    """Load the rows `[steps H, width]` of a chunk as columns."""
    column = tl.arange(0, B)
    mask = live[None, :] & (column < width)[:, None]
    return tl.load(x + rows[None, :] * width + column[:, None], mask=mask, other=0.0)


@triton.jit
def store_transposed(x, base, height: tl.constexpr, row, width: tl.constexpr, column, tile):
    """Store a tile `[column, row]` in the matrix `[height, width]` number `base`."""
    offsets = base * (height * width) + row[None, :] * width + column[:, None]
    mask = (row < height)[None, :] & (column < width)[:, None]
    tl.store(x + offsets, tile.to(x.dtype.element_ty), mask=mask)


@triton.jit
def forward_states(
    k, v, chunks, first_chunk, vectors, WS, WM, W, S0, M0, S_all, M_all, S_end, M_end, H,
    m: tl.constexpr, d: tl.constexpr, MP: tl.constexpr, BD: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, RESIDUAL: tl.constexpr, STATE: tl.constexpr, ENDS: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store S, M before every chunk in S_all, M_all `[n, H, m, d]`, the last in S_end, M_end; W replaces WU."""
    head = tl.program_id(0).to(tl.int64)
    h = head % H
    t = tl.arange(0, C)
    key = tl.arange(0, MP)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    S = tl.zeros((MP, BD), dtype=tl.float32)
    M = tl.zeros((MP, BD), dtype=tl.float32)
    if STATE:
        S += load_tile_transposed(S0, head, d, column, m, key)
        M += load_tile_transposed(M0, head, d, column, m, key)
    first = tl.load(first_chunk + head // H)
    stop = tl.load(first_chunk + head // H + 1)
    for chunk in range(first, stop):
        base = chunk * H + h  # int64, like h
        rows, live, _, last = chunk_rows(chunks, chunk, h, H)
        store_tile(S_all, base, m, key, d, column, S)
        V = load_rows(v, rows, live, tl.program_id(1) * BD, d, BD).to(tl.float32)
        U = load_plane(vectors, base, SCALE)[:, None] * V
        if ERASE:
            w = load_tile(W, base, C, t, d, column).to(tl.float32)
            w += product(load_tile(WS, base, C, t, m, key), S, OPERAND, PRECISION)
            if MOMENTUM:
                w += product(load_tile(WM, base, C, t, m, key), M, OPERAND, PRECISION)
            store_tile(W, base, C, t, d, column, w)
            if RESIDUAL:
                U += w
        X = load_plane(vectors, base, CM_END)[:, None] * U
        if ERASE and not RESIDUAL:
            X += load_plane(vectors, base, LA_END)[:, None] * w
        K = load_rows_transposed(k, rows, live, m, MP).to(OPERAND)
        S = load_number(vectors, base, A_, last) * S + product(K, X, OPERAND, PRECISION)
        if MOMENTUM:
            store_tile(M_all, base, m, key, d, column, M)
            S += load_number(vectors, base, G_, last) * M
            U = load_plane(vectors, base, LG_END)[:, None] * U
            M = load_number(vectors, base, GAM, last) * M + product(K, U, OPERAND, PRECISION)
        elif ENDS:  # noqa: SIM102  ENDS is known at compile time, the other is not
            if chunk == stop - 1:  # without momentum, M is the last write
                M = product(K, load_plane(vectors, base, LG_END)[:, None] * U, OPERAND, PRECISION)
    if ENDS:
        store_transposed(S_end, head, d, column, m, key, S)
        store_transposed(M_end, head, d, column, m, key, M)


@triton.jit
def backward_states(
    q, k, dy, chunks, first_chunk, vectors, RS, RM, R, dS_end, dM_end, dS_all, dM_all, dS0, dM0, H,
    m: tl.constexpr, d: tl.constexpr, MP: tl.constexpr, BD: tl.constexpr,
    MOMENTUM: tl.constexpr, ERASE: tl.constexpr, RESIDUAL: tl.constexpr, STATE: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of S, M after every chunk in dS_all, dM_all `[n, H, m, d]`; R replaces RU."""
    head = tl.program_id(0).to(tl.int64)
    h = head % H
    t = tl.arange(0, C)
    key = tl.arange(0, MP)
    column = tl.program_id(1) * BD + tl.arange(0, BD)
    dS = load_tile_transposed(dS_end, head, d, column, m, key).to(tl.float32)
    dM = load_tile_transposed(dM_end, head, d, column, m, key).to(tl.float32)
    first = tl.load(first_chunk + head // H)
    count = tl.load(first_chunk + head // H + 1) - first
    for i in range(0, count):
        chunk = first + count - 1 - i
        base = chunk * H + h  # int64, like h
        rows, live, _, last = chunk_rows(chunks, chunk, h, H)
        store_tile(dS_all, base, m, key, d, column, dS)
        A = load_plane(vectors, base, A_)
        g = load_plane(vectors, base, G_)
        dY = load_rows(dy, rows, live, tl.program_id(1) * BD, d, BD).to(tl.float32)
        Q = load_rows_transposed(q, rows, live, m, MP).to(OPERAND)
        if ERASE:
            r = load_tile(R, base, C, t, d, column).to(tl.float32)
            r += product(load_tile(RS, base, C, t, m, key), dS, OPERAND, PRECISION)
            if RESIDUAL:
                r += product(load_tile(RM, base, C, t, m, key), dM, OPERAND, PRECISION)
            store_tile(R, base, C, t, d, column, r)
            r = load_plane(vectors, base, ERASE_)[:, None] * r
            K = load_rows_transposed(k, rows, live, m, MP).to(OPERAND)
        if MOMENTUM:
            store_tile(dM_all, base, m, key, d, column, dM)
            dM = load_number(vectors, base, G_, last) * dS + load_number(vectors, base, GAM, last) * dM
            dM += product(Q, g[:, None] * dY, OPERAND, PRECISION)
        dS = load_number(vectors, base, A_, last) * dS + product(Q, A[:, None] * dY, OPERAND, PRECISION)
        if ERASE:
            dS -= product(K, A[:, None] * r, OPERAND, PRECISION)
            if MOMENTUM:
                dM -= product(K, load_plane(vectors, base, RECALL_)[:, None] * r, OPERAND, PRECISION)
    if STATE:
        store_transposed(dS0, head, d, column, m, key, dS)
        store_transposed(dM0, head, d, column, m, key, dM)
