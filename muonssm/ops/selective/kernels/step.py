"""One decoding step of every sequence, in a single launch that reads and writes S and M once."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import advance, lanes, load_exponent, load_steps, load_tile, store_tile
from .write_scale import scale_of, value_norm, vector_norm


@triton.jit
def step(inputs, before, y, after, TILE: tl.constexpr, SHAPE: tl.constexpr, WRITE: tl.constexpr):
    """Compute y `[sequences, D]` and the states after a step. Grid: sequences, blocks of channels.

    Every program computes the norm over all channels itself: 4 D bytes from the cache, less than its states.
    """
    lane = lanes(TILE)
    t = tl.program_id(0).to(tl.int64)
    dt, v, _, gamma, B, C = load_steps(inputs, t, lane, TILE, 1)
    if WRITE.STEPS >= 0:
        scale = scale_of(value_norm(inputs.x, inputs.dt, t, SHAPE), vector_norm(B[0]), WRITE)
    else:
        scale = WRITE.INSIDE * WRITE.OUTSIDE
    S, M = load_tile(before.S, t, lane, TILE), load_tile(before.M, t, lane, TILE)
    S, M, _ = advance((dt, v, (scale,), gamma, B, C), S, M, load_exponent(inputs.A, lane, TILE), TILE, 1)
    store_tile(after.S, t, S[1], lane, TILE)
    store_tile(after.M, t, M[1], lane, TILE)
    y += t * TILE.D
    tl.store(y + lane[0], tl.sum(S[1] * C[0][None, :], axis=1).to(y.dtype.element_ty), mask=lane[2])
