"""The recurrence forward: outputs, last states, and checkpoints for the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import LENGTHS, advance, lanes, load_exponent, load_steps, load_tile, steps_of, store_tile


@triton.jit
def read(inputs, y, t, S, M, A, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Run steps t to t + COUNT - 1: store their outputs in y, return S and M."""
    steps = load_steps(inputs, t, lane, TILE, COUNT)
    S, M, _ = advance(steps, S, M, A, TILE, COUNT)
    d, _, d_mask, _ = lane
    for i in tl.static_range(COUNT):
        out = tl.sum(S[i + 1] * steps[5][i][None, :], axis=1)
        tl.store(y + (t + i) * TILE.D + d, out.to(y.dtype.element_ty), mask=d_mask)
    return S[COUNT], M[COUNT]


@triton.jit(do_not_specialize=LENGTHS)
def forward(inputs, start, y, end, saved, offsets, length, piece, pieces, TILE: tl.constexpr):
    """Compute y `[T, D]`, the last states, and the states `saved` before every segment.

    `start` and `end` hold one S and M per piece; `saved.M` is None without momentum. Grid: pieces, blocks of
    channels.
    """
    lane = lanes(TILE)
    _, first, last, checkpoint = steps_of(offsets, length, piece, pieces, TILE)
    A = load_exponent(inputs.A, lane, TILE)
    own = tl.program_id(0).to(tl.int64)
    S = load_tile(start.S, own, lane, TILE)
    M = load_tile(start.M, own, lane, TILE)
    for t in range(first, last, TILE.SEGMENT):
        store_tile(saved.S, checkpoint, S, lane, TILE)
        store_tile(saved.M, checkpoint, M, lane, TILE)
        checkpoint += 1
        stop = tl.minimum(t + TILE.SEGMENT, last)
        whole = t + (stop - t) // TILE.UNROLL * TILE.UNROLL
        for s in range(t, whole, TILE.UNROLL):
            S, M = read(inputs, y, s, S, M, A, lane, TILE, TILE.UNROLL)
        for s in range(whole, stop):
            S, M = read(inputs, y, s, S, M, A, lane, TILE, 1)
    store_tile(end.S, own, S, lane, TILE)
    store_tile(end.M, own, M, lane, TILE)
