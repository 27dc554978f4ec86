"""The scale c_t of each step's write, whose norm is taken over all channels, and its gradient.

The write is v_t B_t^T with v_t = dt_t x_t; `ops/triton/write.py` has the formulas. One program per step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...triton.write import TINY, write_scale, write_scale_backward


class Write(NamedTuple):
    """The write of a `Muon`, as compile-time constants."""

    STEPS: int  # of Newton-Schulz; 0 for the division by the norm only, -1 for no normalization
    INSIDE: float  # tau inside the normalization
    OUTSIDE: float  # tau outside it
    DELTA: float


class Norms(NamedTuple):
    """The scale and the norms of v and B for each step, float32 `[T]`."""

    scale: Any
    v: Any
    B: Any


class Rows(NamedTuple):
    """The final gradients, in the dtypes of the inputs; `dgamma` is float32 `[T]` or None."""

    dx: Any
    ddt: Any
    dB: Any
    dC: Any
    dgamma: Any


class Shape(NamedTuple):
    """Sizes, as compile-time constants."""

    D: int
    N: int
    BLOCK_D: int  # channels of a loop iteration
    BLOCK_N: int
    BLOCKS: int  # partial sums over channels
    BLOCK_PARTS: int  # partial sums of a loop iteration


@triton.jit
def scale_of(v_norm, B_norm, WRITE: tl.constexpr):
    """Compute c of a step."""
    return write_scale(B_norm, v_norm, v_norm * 0.0 + 1.0, WRITE.INSIDE, WRITE.OUTSIDE, WRITE.DELTA, WRITE.STEPS)


@triton.jit
def value_norm(x, dt, t, SHAPE: tl.constexpr):
    """Compute |dt_t x_t| over all channels, in units of the largest entry so far, so that no square overflows."""
    largest = tl.full([], TINY, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for first in range(0, SHAPE.D, SHAPE.BLOCK_D):
        d = first + tl.arange(0, SHAPE.BLOCK_D)
        mask = d < SHAPE.D
        v = tl.load(x + t * SHAPE.D + d, mask=mask, other=0.0).to(tl.float32)
        v *= tl.load(dt + t * SHAPE.D + d, mask=mask, other=0.0).to(tl.float32)
        now = tl.maximum(largest, tl.max(tl.abs(v), axis=0))
        ratio, part = largest / now, v / now
        total = total * ratio * ratio + tl.sum(part * part, axis=0)
        largest = now
    return largest * tl.sqrt(total)


@triton.jit
def vector_norm(v):
    """Compute |v|, in units of its largest entry."""
    largest = tl.maximum(tl.max(tl.abs(v), axis=0), TINY)
    part = v / largest
    return largest * tl.sqrt(tl.sum(part * part, axis=0))


@triton.jit
def write_scales(x, dt, B, norms, SHAPE: tl.constexpr, WRITE: tl.constexpr):
    """Compute the scale of every step's write and its two norms. Grid: steps."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SHAPE.BLOCK_N)
    v_norm = value_norm(x, dt, t, SHAPE)
    B_norm = vector_norm(tl.load(B + t * SHAPE.N + n, mask=n < SHAPE.N, other=0.0).to(tl.float32))
    tl.store(norms.scale + t, scale_of(v_norm, B_norm, WRITE))
    tl.store(norms.v + t, v_norm)
    tl.store(norms.B + t, B_norm)


@triton.jit
def narrow(value, pointer):
    """Cast `value` to the dtype of `pointer`; float16 saturates, because infinity times a zero mask is NaN."""
    if pointer.dtype.element_ty == tl.float16:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    return value.to(pointer.dtype.element_ty)


@triton.jit
def sum_of_numbers(parts, t, SHAPE: tl.constexpr):
    """Sum `[T, BLOCKS]` over the blocks of channels, at step t."""
    total = tl.full([SHAPE.BLOCK_PARTS], 0.0, tl.float32)
    for first in range(0, SHAPE.BLOCKS, SHAPE.BLOCK_PARTS):
        i = first + tl.arange(0, SHAPE.BLOCK_PARTS)
        total += tl.load(parts + t * SHAPE.BLOCKS + i, mask=i < SHAPE.BLOCKS, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def sum_of_rows(parts, t, SHAPE: tl.constexpr):
    """Sum `[T, BLOCKS, N]` over the blocks of channels, at step t."""
    n = tl.arange(0, SHAPE.BLOCK_N)
    total = tl.full([SHAPE.BLOCK_PARTS, SHAPE.BLOCK_N], 0.0, tl.float32)
    for first in range(0, SHAPE.BLOCKS, SHAPE.BLOCK_PARTS):
        i = first + tl.arange(0, SHAPE.BLOCK_PARTS)
        place = (t * SHAPE.BLOCKS + i[:, None]) * SHAPE.N + n[None, :]
        total += tl.load(parts + place, mask=(i < SHAPE.BLOCKS)[:, None] & (n < SHAPE.N)[None, :], other=0.0)
    return tl.sum(total, axis=0)


@triton.jit
def finish(inputs, norms, parts, out, SHAPE: tl.constexpr, WRITE: tl.constexpr):
    """Compute the gradients of x, dt, B, C and gamma from the partial ones, through u = c dt x and c. Grid: steps."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SHAPE.BLOCK_N)
    dB = sum_of_rows(parts.dB, t, SHAPE)
    scale = tl.load(norms.scale + (t if WRITE.STEPS >= 0 else 0))
    by_v = scale * 0.0
    if WRITE.STEPS >= 0:
        dscale = sum_of_numbers(parts.dscale, t, SHAPE)
        v_norm, B_norm = tl.load(norms.v + t), tl.load(norms.B + t)
        one = scale * 0.0 + 1.0
        _, by_B, by_v = write_scale_backward(
            dscale, B_norm, v_norm, one, WRITE.INSIDE, WRITE.OUTSIDE, WRITE.DELTA, WRITE.STEPS
        )
        dB += by_B * tl.load(inputs.B + t * SHAPE.N + n, mask=n < SHAPE.N, other=0.0).to(tl.float32)
    tl.store(out.dB + t * SHAPE.N + n, narrow(dB, out.dB), mask=n < SHAPE.N)
    tl.store(out.dC + t * SHAPE.N + n, narrow(sum_of_rows(parts.dC, t, SHAPE), out.dC), mask=n < SHAPE.N)
    if out.dgamma is not None:
        tl.store(out.dgamma + t, sum_of_numbers(parts.dgamma, t, SHAPE))
    for first in range(0, SHAPE.D, SHAPE.BLOCK_D):
        d = first + tl.arange(0, SHAPE.BLOCK_D)
        place, mask = t * SHAPE.D + d, d < SHAPE.D
        x = tl.load(inputs.x + place, mask=mask, other=0.0).to(tl.float32)
        dt = tl.load(inputs.dt + place, mask=mask, other=0.0).to(tl.float32)
        dv = scale * tl.load(parts.du + place, mask=mask, other=0.0) + by_v * (dt * x)
        ddt = tl.load(parts.ddt + place, mask=mask, other=0.0) + dv * x
        tl.store(out.dx + place, narrow(dv * dt, out.dx), mask=mask)
        tl.store(out.ddt + place, narrow(ddt, out.ddt), mask=mask)
