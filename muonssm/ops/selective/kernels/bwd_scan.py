"""The adjoint recurrence, from the last step to the first (dS, dM are the gradients of S_t, M_t):

    dS_t = dy_t C_t^T + a_{t+1} dS_{t+1}             dM_t = dS_t + gamma_{t+1} dM_{t+1}

It needs S_{t-1}, S_t and M_{t-1} at every step. Each segment first runs forward from its checkpoint and stores the
states before every UNROLL steps in scratch memory: 18 to 32 tiles per program, which a level-2 cache of 40 to 50 MB
holds for most active programs. Then, backward, UNROLL steps at a time run forward again with all states and gates in
registers, and back. Inverting the recurrence instead would divide by gates, which can be 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common import LENGTHS, advance, lanes, load_exponent, load_steps, load_tile, steps_of, store_tile

_LN_2 = tl.constexpr(0.6931471805599453)


class Gradients(NamedTuple):
    """Outputs of the backward kernel, float32. Sums over channels are partial sums, one per block of channels."""

    du: Any  # [T, D]            of u_t = c_t dt_t x_t
    ddt: Any  # [T, D]           of dt through the gate
    dB: Any  # [T, blocks, N]
    dC: Any  # [T, blocks, N]
    dscale: Any  # [T, blocks]   None if c does not depend on the inputs
    dgamma: Any  # [T, blocks]   None if not needed
    dA: Any  # [pieces, D, N]    None if A is None


def scratch_tiles(segment: int, unroll: int) -> int:
    """Count the tiles for the states before each run of `unroll` steps of a segment and each remaining step."""
    return max(segment // unroll, segment // unroll - 1 + unroll - 1)


@triton.jit
def skip(inputs, t, S, M, A, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Compute S and M after steps t to t + COUNT - 1."""
    S, M, _ = advance(load_steps(inputs, t, lane, TILE, COUNT), S, M, A, TILE, COUNT)
    return S[COUNT], M[COUNT]


@triton.jit
def retreat(inputs, dy, out, t, states, adjoints, A, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Compute the adjoints before steps t to t + COUNT - 1 from those after them and the states before step t."""
    d, n, d_mask, n_mask = lane
    steps = load_steps(inputs, t, lane, TILE, COUNT)
    all_dt, all_v, all_scale, all_gamma, all_B, all_C = steps
    S, M, a = advance(steps, states[0], states[1], A, TILE, COUNT)
    dS, dM, dA = adjoints
    for i in tl.static_range(COUNT - 1, -1, -1):
        now = t + i
        part = now * tl.num_programs(1) + tl.program_id(1)
        dt, v, B = all_dt[i], all_v[i], all_B[i]
        g = tl.load(dy + now * TILE.D + d, mask=d_mask, other=0.0).to(tl.float32)
        dS += g[:, None] * all_C[i][None, :]
        dM += dS
        tl.store(out.dC + part * TILE.N + n, tl.sum(S[i + 1] * g[:, None], axis=0), mask=n_mask)
        du = tl.sum(dM * B[None, :], axis=1)
        dB = tl.sum(dM * v[:, None], axis=0) * all_scale[i]
        if out.dscale is not None:
            tl.store(out.dscale + part, tl.sum(du * v, axis=0))
        if out.dgamma is not None:
            tl.store(out.dgamma + part, tl.sum(dM * M[i]))
        da = dS * S[i]
        if A is None:  # a = 1 - dt B^2
            ddt = -tl.sum(da * (B * B)[None, :], axis=1)
            dB -= 2.0 * B * tl.sum(da * dt[:, None], axis=0)
        else:  # a = 2^(dt A)
            da *= a[i]
            ddt = tl.sum(da * A, axis=1) * _LN_2
            dA += da * dt[:, None]
        tl.store(out.du + now * TILE.D + d, du, mask=d_mask)
        tl.store(out.ddt + now * TILE.D + d, ddt, mask=d_mask)
        tl.store(out.dB + part * TILE.N + n, dB, mask=n_mask)
        dS = a[i] * dS
        dM = all_gamma[i] * dM if TILE.MOMENTUM else dM * 0.0
    return dS, dM, dA


@triton.jit(do_not_specialize=LENGTHS)
def backward(
    inputs, dy, end, start, saved, scratch, out, offsets, length, piece, pieces, TILE: tl.constexpr, SLOTS: tl.constexpr
):
    """Compute all gradients from dy `[T, D]` and those of the last states, `end`. Grid: pieces, blocks of channels.

    `start` receives the gradients of the first states, `scratch` is `[pieces, SLOTS, D, N]`.
    """
    lane = lanes(TILE)
    _, first, last, checkpoint = steps_of(offsets, length, piece, pieces, TILE)
    A = load_exponent(inputs.A, lane, TILE)
    own = tl.program_id(0).to(tl.int64)
    slot = own * SLOTS
    dS = load_tile(end.S, own, lane, TILE)
    dM = load_tile(end.M, own, lane, TILE)
    dA = tl.full([TILE.BLOCK_D, TILE.BLOCK_N], 0.0, tl.float32)
    segments = (last - first + TILE.SEGMENT - 1) // TILE.SEGMENT
    for reverse in range(segments):
        index = segments - 1 - reverse
        t = first + index * TILE.SEGMENT
        stop = tl.minimum(t + TILE.SEGMENT, last)
        runs = (stop - t) // TILE.UNROLL
        whole = t + runs * TILE.UNROLL
        S = load_tile(saved.S, checkpoint + index, lane, TILE)
        M = load_tile(saved.M, checkpoint + index, lane, TILE)
        tl.debug_barrier()  # all reads of the previous segment are done
        for i in range(runs):
            store_tile(scratch.S, slot + i, S, lane, TILE)
            store_tile(scratch.M, slot + i, M, lane, TILE)
            S, M = skip(inputs, t + i * TILE.UNROLL, S, M, A, lane, TILE, TILE.UNROLL)
        for i in range(stop - whole):
            store_tile(scratch.S, slot + runs + i, S, lane, TILE)
            store_tile(scratch.M, slot + runs + i, M, lane, TILE)
            S, M = skip(inputs, whole + i, S, M, A, lane, TILE, 1)
        tl.debug_barrier()
        for j in range(stop - whole):
            i = stop - whole - 1 - j
            states = (
                load_tile(scratch.S, slot + runs + i, lane, TILE),
                load_tile(scratch.M, slot + runs + i, lane, TILE),
            )
            dS, dM, dA = retreat(inputs, dy, out, whole + i, states, (dS, dM, dA), A, lane, TILE, 1)
        for j in range(runs):
            i = runs - 1 - j
            states = (load_tile(scratch.S, slot + i, lane, TILE), load_tile(scratch.M, slot + i, lane, TILE))
            dS, dM, dA = retreat(inputs, dy, out, t + i * TILE.UNROLL, states, (dS, dM, dA), A, lane, TILE, TILE.UNROLL)
    store_tile(start.S, own, dS, lane, TILE)
    store_tile(start.M, own, dM, lane, TILE)
    store_tile(out.dA, own, dA, lane, TILE)
