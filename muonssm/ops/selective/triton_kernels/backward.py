"""The adjoint recurrence, from the last step to the first (dS, dM are the gradients of S_t, M_t):

    dS_t = dy_t C_t^T + a_{t+1} dS_{t+1}             dM_t = dS_t + gamma_{t+1} dM_{t+1}

It needs S_{t-1}, S_t and M_{t-1} at every step. Each segment of 64 steps is walked forward once from its checkpoint,
leaving the states before every UNROLL steps in scratch memory (14 tiles a program, which stay in the second-level
cache), and then backward: UNROLL steps forward again with all their states in registers, and back. Running the
recurrence in reverse instead would divide by gates, which may be 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .common import _SEGMENT, gate, lanes, load_A, load_tile, next_momentum, numbers, rows, steps_of, store_tile
from .forward import advance

_LN_2 = tl.constexpr(0.6931471805599453)


class Gradients(NamedTuple):
    """What the backward kernel writes, float32. Sums over channels come in parts, one for each block of channels."""

    du: Any  # [T, D]            of u_t = c_t dt_t x_t
    ddt: Any  # [T, D]           of dt through the gate
    dB: Any  # [T, blocks, N]
    dC: Any  # [T, blocks, N]
    dscale: Any  # [T, blocks]   None where c does not depend on the inputs
    dgamma: Any  # [T, blocks]   None where nobody asked
    dA: Any  # [pieces, D, N]    None where A is


def scratch_tiles(unroll: int, segment: int = 64) -> int:
    """Room for the states before each run of `unroll` steps of a segment, and before each of the steps left over."""
    return max(segment // unroll, segment // unroll - 1 + unroll - 1)


@triton.jit
def states_between(inputs, t, S, M, A, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """S and M before step t and after each of COUNT steps, as two tuples of COUNT + 1."""
    d, n, d_mask, n_mask = lane
    all_S, all_M = (S,), (M,)
    for i in tl.static_range(COUNT):
        S, M = advance(inputs, None, t + i, S, M, A, lane, TILE, 1)
        all_S, all_M = all_S + (S,), all_M + (M,)  # noqa: RUF005
    return all_S, all_M


@triton.jit
def retreat(inputs, dy, out, t, states, adjoints, A, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """The adjoints before steps t to t + COUNT - 1, from those after them and the states before step t."""
    d, n, d_mask, n_mask = lane
    S, M = states_between(inputs, t, states[0], states[1], A, lane, TILE, COUNT)
    dS, dM, dA = adjoints
    for j in tl.static_range(COUNT):
        i = COUNT - 1 - j
        now = t + i
        x = rows(inputs.x, now, d, d_mask, TILE.D, 1)[0]
        dt = rows(inputs.dt, now, d, d_mask, TILE.D, 1)[0]
        g = rows(dy, now, d, d_mask, TILE.D, 1)[0]
        B = rows(inputs.B, now, n, n_mask, TILE.N, 1)[0]
        C = rows(inputs.C, now, n, n_mask, TILE.N, 1)[0]
        dS += g[:, None] * C[None, :]
        dM += dS
        dC = tl.sum(S[i + 1] * g[:, None], axis=0)
        if TILE.MOMENTUM:
            if out.dgamma is not None:
                part = now * tl.num_programs(1) + tl.program_id(1)
                tl.store(out.dgamma + part, tl.sum(tl.sum(dM * M[i], axis=1), axis=0))
        write_gradients(inputs, out, now, (dM, x, dt, B, dC), dS * S[i], A, lane, TILE)
        a = gate(dt, A, B)
        if A is not None:
            dA += dS * S[i] * a * dt[:, None]
        dS = a * dS
        if TILE.MOMENTUM:
            dM = dM * numbers(inputs.gamma, now, TILE.GAMMA_STEP, 1)[0]
        else:
            dM = tl.zeros_like(dM)
    return dS, dM, dA


@triton.jit
def write_gradients(inputs, out, t, step, da, A, lane, TILE: tl.constexpr):
    """What step t contributes to every gradient but gamma's and A's; `da` is the gradient of its gate."""
    d, n, d_mask, n_mask = lane
    dM, x, dt, B, dC = step
    du = tl.sum(dM * B[None, :], axis=1)
    v = dt * x
    dB = tl.sum(dM * v[:, None], axis=0) * numbers(inputs.scale, t, TILE.SCALE_STEP, 1)[0]
    if A is None:  # a = 1 - dt B^2
        ddt = -tl.sum(da * (B * B)[None, :], axis=1)
        dB -= 2.0 * B * tl.sum(da * dt[:, None], axis=0)
    else:  # a = exp2(dt A)
        ddt = tl.sum(da * gate(dt, A, B) * A, axis=1) * _LN_2
    part = t * tl.num_programs(1) + tl.program_id(1)
    tl.store(out.du + t * TILE.D + d, du, mask=d_mask)
    tl.store(out.ddt + t * TILE.D + d, ddt, mask=d_mask)
    tl.store(out.dB + part * TILE.N + n, dB, mask=n_mask)
    tl.store(out.dC + part * TILE.N + n, dC, mask=n_mask)
    if out.dscale is not None:
        tl.store(out.dscale + part, tl.sum(du * v, axis=0))


@triton.jit(do_not_specialize=["span"])
def backward(inputs, dy, end, start, saved, scratch, out, span, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """Every gradient, from dy `[T, D]` and those of the last states, `end`. Grid: pieces, blocks of channels.

    `start` receives the gradients of the first states, `scratch` is `[pieces, SLOTS, D, N]`.
    """
    lane = lanes(TILE)
    _, first, last, checkpoint = steps_of(span)
    A = load_A(inputs.A, lane, TILE)
    piece = tl.program_id(0).to(tl.int64)
    slot = piece * SLOTS
    dS = load_tile(end.S, piece, lane, TILE)
    dM = load_tile(end.M, piece, lane, TILE)
    dA = tl.zeros_like(dS)
    segments = (last - first + _SEGMENT - 1) // _SEGMENT
    for reverse in range(segments):
        index = segments - 1 - reverse
        t = first + index * _SEGMENT
        stop = tl.minimum(t + _SEGMENT, last)
        runs = (stop - t) // TILE.UNROLL
        whole = t + runs * TILE.UNROLL
        S = load_tile(saved.S, checkpoint + index, lane, TILE)
        M = load_tile(saved.M, checkpoint + index, lane, TILE)
        tl.debug_barrier()  # the segment before has been read back
        for i in range(runs):
            store_tile(scratch.S, slot + i, S, lane, TILE)
            store_tile(scratch.M, slot + i, M, lane, TILE)
            S, M = advance(inputs, None, t + i * TILE.UNROLL, S, M, A, lane, TILE, TILE.UNROLL)
        for i in range(stop - whole):
            store_tile(scratch.S, slot + runs + i, S, lane, TILE)
            store_tile(scratch.M, slot + runs + i, M, lane, TILE)
            S, M = advance(inputs, None, whole + i, S, M, A, lane, TILE, 1)
        tl.debug_barrier()
        for j in range(stop - whole):
            i = stop - whole - 1 - j
            states = (load_tile(scratch.S, slot + runs + i, lane, TILE), load_tile(scratch.M, slot + runs + i, lane, TILE))
            dS, dM, dA = retreat(inputs, dy, out, whole + i, states, (dS, dM, dA), A, lane, TILE, 1)
        for j in range(runs):
            i = runs - 1 - j
            states = (load_tile(scratch.S, slot + i, lane, TILE), load_tile(scratch.M, slot + i, lane, TILE))
            dS, dM, dA = retreat(inputs, dy, out, t + i * TILE.UNROLL, states, (dS, dM, dA), A, lane, TILE, TILE.UNROLL)
    store_tile(start.S, piece, dS, lane, TILE)
    store_tile(start.M, piece, dM, lane, TILE)
    store_tile(out.dA, piece, dA, lane, TILE)
