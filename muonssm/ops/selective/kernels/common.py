"""What the kernels share: their arguments as tuples, where a program's steps lie, rows of inputs, and the gate."""

# Triton's compiler knows no starred tuples, drops branches in this form only, and has tuples grow.
# ruff: noqa: RUF005, RET505, SIM108
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LENGTHS = ["length", "piece", "pieces"]  # arguments that are no reason to compile again
_LOG2_E = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """Per-step inputs in the dtypes they came in, and A `[D, N]`, or None for LongHorn's gate."""

    x: Any
    dt: Any
    B: Any
    C: Any
    A: Any
    gamma: Any  # float32
    scale: Any  # float32; None where a kernel finds it by itself


class States(NamedTuple):
    """S and M, float32: `[sequences, D, N]`, or one for each checkpoint or piece. Each may be None."""

    S: Any
    M: Any


class Span(NamedTuple):
    """How steps fall into sequences and pieces. The kernels take these one by one: in a tuple, Triton would compile
    again for a number that is 1 or a multiple of 16."""

    offsets: Any  # [sequences + 1], int64: where packed sequences begin; None for rows of equal length
    length: Any  # steps of a row
    piece: Any  # steps of a piece, a multiple of the segment
    pieces: Any  # of each sequence


class Tile(NamedTuple):
    """What a kernel is compiled for."""

    D: int
    N: int
    BLOCK_D: int
    BLOCK_N: int  # N or the next power of two
    SEGMENT: int  # steps between two checkpoints
    UNROLL: int  # steps whose inputs are loaded, and in the backward pass whose states are held, at once
    GAMMA_STEP: int  # 0 where gamma is one number
    SCALE_STEP: int  # 0 where the scale is
    MOMENTUM: bool  # False: gamma is 0, and M is the last write


@triton.jit
def lanes(TILE: tl.constexpr):
    """The channels and states of this program, and which of them exist: d `[BLOCK_D]`, n `[BLOCK_N]`, masks."""
    d = tl.program_id(1) * TILE.BLOCK_D + tl.arange(0, TILE.BLOCK_D)
    n = tl.arange(0, TILE.BLOCK_N)
    return d, n, d < TILE.D, n < TILE.N


@triton.jit
def steps_of(offsets, length, piece, pieces, TILE: tl.constexpr):
    """This program's sequence, its first step and end, and the number of its first checkpoint.

    Checkpoints lie one behind the other with no table: a sequence that begins at step s has the first at s / SEGMENT
    plus its own number, which leaves room for every segment begun before it.
    """
    program = tl.program_id(0).to(tl.int64)
    sequence = program // pieces
    if offsets is None:
        start = sequence * length
        end = start + length
    else:
        start = tl.load(offsets + sequence)
        end = tl.load(offsets + sequence + 1)
    before = (program % pieces) * piece
    first = tl.minimum(start + before, end)
    last = tl.minimum(first + piece, end)
    return sequence, first, last, start // TILE.SEGMENT + sequence + before // TILE.SEGMENT


@triton.jit
def load_steps(inputs, t, lane, TILE: tl.constexpr, COUNT: tl.constexpr):
    """dt, v = dt x, scale, gamma, B, C of steps t to t + COUNT - 1 in float32, each a tuple with one entry a step.

    All loads are under way before the first is used. What a caller does not use, the compiler does not load.
    """
    d, n, d_mask, n_mask = lane
    all_dt, all_v, all_scale, all_gamma, all_B, all_C = (), (), (), (), (), ()
    for i in tl.static_range(COUNT):
        now = t + i
        x = tl.load(inputs.x + now * TILE.D + d, mask=d_mask, other=0.0).to(tl.float32)
        dt = tl.load(inputs.dt + now * TILE.D + d, mask=d_mask, other=0.0).to(tl.float32)
        all_dt = all_dt + (dt,)
        all_v = all_v + (dt * x,)
        if inputs.scale is not None:
            all_scale = all_scale + (tl.load(inputs.scale + now * TILE.SCALE_STEP),)
        all_gamma = all_gamma + (tl.load(inputs.gamma + now * TILE.GAMMA_STEP),)
        all_B = all_B + (tl.load(inputs.B + now * TILE.N + n, mask=n_mask, other=0.0).to(tl.float32),)
        all_C = all_C + (tl.load(inputs.C + now * TILE.N + n, mask=n_mask, other=0.0).to(tl.float32),)
    return all_dt, all_v, all_scale, all_gamma, all_B, all_C


@triton.jit
def load_tile(pointer, index, lane, TILE: tl.constexpr):
    """Tile number `index` of `[..., D, N]`, zeros beyond its edge; all zeros where there is no such tensor."""
    d, n, d_mask, n_mask = lane
    if pointer is None:
        return tl.full([TILE.BLOCK_D, TILE.BLOCK_N], 0.0, tl.float32)
    else:
        place = index * TILE.D * TILE.N + d[:, None] * TILE.N + n[None, :]
        return tl.load(pointer + place, mask=d_mask[:, None] & n_mask[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, index, value, lane, TILE: tl.constexpr):
    """`value` as tile number `index` of `[..., D, N]`; nothing where there is no such tensor."""
    d, n, d_mask, n_mask = lane
    if pointer is not None:
        place = index * TILE.D * TILE.N + d[:, None] * TILE.N + n[None, :]
        tl.store(pointer + place, value, mask=d_mask[:, None] & n_mask[None, :])


@triton.jit
def load_exponent(pointer, lane, TILE: tl.constexpr):
    """A log2(e), since the hardware's exponential is to base 2; None for LongHorn's gate."""
    if pointer is None:
        return None
    else:
        return load_tile(pointer, 0, lane, TILE) * _LOG2_E


@triton.jit
def advance(steps, S, M, A, TILE: tl.constexpr, COUNT: tl.constexpr):
    """S and M before the first of COUNT steps and after each of them, and the gates: tuples of COUNT + 1, and COUNT.

    Channels and states that do not exist have gate 1 and write 0.
    """
    dt, v, scale, gamma, B, _ = steps
    all_S, all_M, all_a = (S,), (M,), ()
    for i in tl.static_range(COUNT):
        write = (scale[i] * v[i])[:, None] * B[i][None, :]
        if TILE.MOMENTUM:
            M = gamma[i] * M + write
        else:
            M = write
        if A is None:
            a = 1.0 - dt[i][:, None] * (B[i] * B[i])[None, :]
        else:
            a = tl.exp2(dt[i][:, None] * A)
        S = a * S + M
        all_S, all_M, all_a = all_S + (S,), all_M + (M,), all_a + (a,)
    return all_S, all_M, all_a
