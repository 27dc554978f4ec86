"""One step of every sequence, for decoding: S and M are read and written once, in a single launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import gate, lanes, load_A, load_tile, next_momentum, numbers, rows, store_tile
from .write import scale_and_slope, value_norm, vector_norm


@triton.jit
def step(inputs, before, y, after, TILE: tl.constexpr, SHAPE: tl.constexpr, WRITE: tl.constexpr):
    """y `[sequences, D]` and the states after a step. Grid: sequences, blocks of channels.

    Every program takes the norm over all channels by itself: 4 D bytes from the cache, a fraction of its states.
    """
    lane = lanes(TILE)
    d, n, d_mask, n_mask = lane
    t = tl.program_id(0).to(tl.int64)
    B = rows(inputs.B, t, n, n_mask, TILE.N, 1)[0]
    C = rows(inputs.C, t, n, n_mask, TILE.N, 1)[0]
    dt = rows(inputs.dt, t, d, d_mask, TILE.D, 1)[0]
    u = dt * rows(inputs.x, t, d, d_mask, TILE.D, 1)[0]
    if WRITE.STEPS >= 0:
        scale, _ = scale_and_slope(value_norm(inputs.x, inputs.dt, t, SHAPE), vector_norm(B), WRITE)
        u *= scale
    else:
        u *= WRITE.INSIDE * WRITE.OUTSIDE
    gamma = numbers(inputs.gamma, t, TILE.GAMMA_STEP, 1)[0]
    M = next_momentum(load_tile(before.M, t, lane, TILE), gamma, u, B, TILE)
    S = gate(dt, load_A(inputs.A, lane, TILE), B) * load_tile(before.S, t, lane, TILE) + M
    store_tile(after.M, t, M, lane, TILE)
    store_tile(after.S, t, S, lane, TILE)
    tl.store(y + t * TILE.D + d, tl.sum(S * C[None, :], axis=1).to(y.dtype.element_ty), mask=d_mask)
