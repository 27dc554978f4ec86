"""For sequences too few to fill the device: the states before pieces of a sequence, and their adjoints.

A piece maps the states before it to those after it, elementwise and affinely:

    S <- P * S + X * M + S',   M <- g M + M'         P = prod a_t,  g = prod gamma_t,  X: the share of M in S

One pass computes P, X, g and S', M' (the states after the piece from zero states) of all pieces at once; a short second
pass carries the states across pieces. The adjoints go backward with the same P, X and g. This computes every gate once
more, so it pays off from three pieces on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common import LENGTHS, advance, lanes, load_exponent, load_steps, load_tile, steps_of, store_tile


class Summary(NamedTuple):
    """The map of each piece, float32: g `[pieces]`, the others `[pieces, D, N]`; backward, S and M are adjoints."""

    S: Any
    M: Any
    P: Any
    X: Any
    g: Any


@triton.jit
def forward_turn(inputs, t, sums, A, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Extend the summary of a piece by COUNT steps after it."""
    S, M, P, X, g = sums
    steps = load_steps(inputs, t, lane, TILE, COUNT)
    S, M, a = advance(steps, S, M, A, TILE, COUNT)
    for i in tl.static_range(COUNT):
        g *= steps[3][i]
        X = a[i] * X + g
        P *= a[i]
    return S[COUNT], M[COUNT], P, X, g


@triton.jit
def backward_turn(inputs, dy, t, sums, A, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Extend the summary of a piece by COUNT steps before it."""
    dS, dM, P, X, g = sums
    d, _, d_mask, _ = lane
    steps = load_steps(inputs, t, lane, TILE, COUNT)
    _, _, a = advance(steps, dS, dM, A, TILE, COUNT)  # for the gates only
    for i in tl.static_range(COUNT - 1, -1, -1):
        gamma = steps[3][i]
        by_y = tl.load(dy + (t + i) * TILE.D + d, mask=d_mask, other=0.0).to(tl.float32)
        dS += by_y[:, None] * steps[5][i][None, :]
        dM = gamma * (dM + dS)
        dS *= a[i]
        X = gamma * (X + P)
        P *= a[i]
        g *= gamma
    return dS, dM, P, X, g


@triton.jit
def store_summary(summary, sums, lane, TILE: tl.constexpr):
    """Store `sums` as this program's part of `summary`."""
    piece = tl.program_id(0).to(tl.int64)
    store_tile(summary.S, piece, sums[0], lane, TILE)
    store_tile(summary.M, piece, sums[1], lane, TILE)
    store_tile(summary.P, piece, sums[2], lane, TILE)
    store_tile(summary.X, piece, sums[3], lane, TILE)
    tl.store(summary.g + piece, sums[4], mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=LENGTHS)
def summarize(inputs, dy, summary, offsets, length, piece, pieces, TILE: tl.constexpr):
    """Compute the summary of every piece; with dy, that of the adjoints. Grid: pieces, blocks of channels."""
    lane = lanes(TILE)
    _, first, last, _ = steps_of(offsets, length, piece, pieces, TILE)
    A = load_exponent(inputs.A, lane, TILE)
    S = tl.full([TILE.BLOCK_D, TILE.BLOCK_N], 0.0, tl.float32)
    M, X = S, S
    P = S + 1.0
    g = tl.full([], 1.0, tl.float32)
    whole = (last - first) // TILE.UNROLL * TILE.UNROLL
    if dy is None:
        for t in range(first, first + whole, TILE.UNROLL):
            S, M, P, X, g = forward_turn(inputs, t, (S, M, P, X, g), A, lane, TILE, TILE.UNROLL)
        for t in range(first + whole, last):
            S, M, P, X, g = forward_turn(inputs, t, (S, M, P, X, g), A, lane, TILE, 1)
    else:
        for back in range(last - first - whole):
            S, M, P, X, g = backward_turn(inputs, dy, last - 1 - back, (S, M, P, X, g), A, lane, TILE, 1)
        for back in range(0, whole, TILE.UNROLL):
            t = first + whole - TILE.UNROLL - back
            S, M, P, X, g = backward_turn(inputs, dy, t, (S, M, P, X, g), A, lane, TILE, TILE.UNROLL)
    store_summary(summary, (S, M, P, X, g), lane, TILE)


@triton.jit(do_not_specialize=["pieces"])
def carry(outer, summary, inner, pieces, TILE: tl.constexpr, REVERSE: tl.constexpr):
    """Compute the states before each piece from those of its sequence; with REVERSE, the adjoints after each piece.

    Grid: sequences, blocks of channels.
    """
    lane = lanes(TILE)
    sequence = tl.program_id(0).to(tl.int64)
    S = load_tile(outer.S, sequence, lane, TILE)
    M = load_tile(outer.M, sequence, lane, TILE)
    for i in range(pieces):
        piece = sequence * pieces + (pieces - 1 - i if REVERSE else i)
        store_tile(inner.S, piece, S, lane, TILE)
        store_tile(inner.M, piece, M, lane, TILE)
        P = load_tile(summary.P, piece, lane, TILE)
        X = load_tile(summary.X, piece, lane, TILE)
        g = tl.load(summary.g + piece)
        if REVERSE:
            M = g * M + X * S + load_tile(summary.M, piece, lane, TILE)
            S = P * S + load_tile(summary.S, piece, lane, TILE)
        else:
            S = P * S + X * M + load_tile(summary.S, piece, lane, TILE)
            M = g * M + load_tile(summary.M, piece, lane, TILE)
