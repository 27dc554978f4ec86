"""Shared by the kernels: arguments as tuples, the steps of a program, loading inputs, and the recurrence."""

# Triton's compiler does not support starred tuples, removes only branches of this form, and lets tuples grow.
# ruff: noqa: RUF005, RET505, SIM108
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LENGTHS = ["length", "piece", "pieces"]  # arguments that do not trigger a recompilation
_LOG2_E = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """Per-step inputs in the caller's dtypes, and A `[D, N]`, or None for LongHorn's gate."""

    x: Any
    dt: Any
    B: Any
    C: Any
    A: Any
    gamma: Any  # float32
    scale: Any  # float32; None if the kernel computes it


class States(NamedTuple):
    """S and M, float32: `[sequences, D, N]`, or one per checkpoint or piece. Each can be None."""

    S: Any
    M: Any


class Span(NamedTuple):
    """How steps are divided into sequences and pieces. The kernels take these as separate arguments: in a tuple,
    Triton would recompile for a number that is 1 or a multiple of 16."""

    offsets: Any  # [sequences + 1], int64: starts of packed sequences; None for a batch of equal lengths
    length: Any  # steps of a sequence of the batch
    piece: Any  # steps of a piece, a multiple of the segment
    pieces: Any  # per sequence


class Tile(NamedTuple):
    """Sizes and options, as compile-time constants."""

    D: int
    N: int
    BLOCK_D: int
    BLOCK_N: int  # N or the next power of two
    SEGMENT: int  # steps between two checkpoints
    UNROLL: int  # steps whose inputs are loaded together (and whose states are held, backward)
    GAMMA_STEP: int  # 0 if gamma is one number
    SCALE_STEP: int  # 0 if the scale is one number
    MOMENTUM: bool  # False: gamma is 0, and M is the last write


@triton.jit
def lanes(TILE: tl.constexpr):
    """Return the channels and states of this program and their masks: d `[BLOCK_D]`, n `[BLOCK_N]`, two masks."""
    d = tl.program_id(1) * TILE.BLOCK_D + tl.arange(0, TILE.BLOCK_D)
    n = tl.arange(0, TILE.BLOCK_N)
    return d, n, d < TILE.D, n < TILE.N


@triton.jit
def steps_of(offsets, length, piece, pieces, TILE: tl.constexpr):
    """Return the sequence of this program, its first step and end, and the number of its first checkpoint.

    Checkpoints need no table: sequence i, starting at step s, has its first checkpoint at s / SEGMENT + i, which leaves
    room for all segments of the sequences before it.
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
    """Load dt, v = dt x, scale, gamma, B, C of steps t to t + COUNT - 1 in float32: tuples with an entry per step.

    All loads are issued before the first is used. The compiler removes loads of unused results.
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
    """Load tile number `index` of `[..., D, N]`; zeros beyond its edges, or if `pointer` is None."""
    d, n, d_mask, n_mask = lane
    if pointer is None:
        return tl.full([TILE.BLOCK_D, TILE.BLOCK_N], 0.0, tl.float32)
    else:
        place = index * TILE.D * TILE.N + d[:, None] * TILE.N + n[None, :]
        return tl.load(pointer + place, mask=d_mask[:, None] & n_mask[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_tile(pointer, index, value, lane, TILE: tl.constexpr):
    """Store `value` as tile number `index` of `[..., D, N]`; do nothing if `pointer` is None."""
    d, n, d_mask, n_mask = lane
    if pointer is not None:
        place = index * TILE.D * TILE.N + d[:, None] * TILE.N + n[None, :]
        tl.store(pointer + place, value, mask=d_mask[:, None] & n_mask[None, :])


@triton.jit
def load_exponent(pointer, lane, TILE: tl.constexpr):
    """Load A log2(e), because hardware exponentials have base 2; None for LongHorn's gate."""
    if pointer is None:
        return None
    else:
        return load_tile(pointer, 0, lane, TILE) * _LOG2_E


@triton.jit
def advance(steps, S, M, A, TILE: tl.constexpr, COUNT: tl.constexpr):
    """Run COUNT steps: return S and M before the first and after each (COUNT + 1 entries), and the gates (COUNT).

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
