"""The scale of a normalized write and its derivatives, for kernels: see `newton_schulz.write_scale`.

    sigma = inside |beta| |v| |k|,  s = sigma / max(sigma, delta),  c = outside inside beta gain(s) / max(sigma, delta)

STEPS is the number of Newton-Schulz steps, 0 for the division by the norm only, and -1 for no normalization
(c = inside outside beta). With BETA_OUTSIDE, sigma = inside |v| |k|.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..newton_schulz import A, B, C

NS_A, NS_B, NS_C = tl.constexpr(A), tl.constexpr(B), tl.constexpr(C)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def add_to_norm(largest, total, x):
    """Add x to a running norm over columns, largest * sqrt(total), in which squares of huge values do not overflow."""
    new = tl.maximum(largest, tl.max(tl.abs(x), axis=1))
    scale = 1.0 / tl.maximum(new, TINY)
    x = x * scale[:, None]
    keep = largest * scale
    return new, total * keep * keep + tl.sum(x * x, axis=1)


@triton.jit
def gain(x, STEPS: tl.constexpr):
    """Compute rho^STEPS(s) / s and its derivative, both as functions of x = s^2."""
    f = x * 0.0 + 1.0
    df = x * 0.0
    for _ in tl.static_range(STEPS):
        square = f * f * x
        dsquare = 2.0 * f * df * x + f * f
        p = NS_A + square * (NS_B + square * NS_C)
        df = df * p + f * (NS_B + 2.0 * NS_C * square) * dsquare
        f = f * p
    return f, df


@triton.jit
def write_scale(norm_k, norm_v, beta, inside, outside, delta, STEPS: tl.constexpr, BETA_OUTSIDE: tl.constexpr = False):
    """Compute c of the normalized write c v k^T."""
    c = inside * outside * beta
    if STEPS >= 0:
        sigma = inside * norm_v * norm_k
        if not BETA_OUTSIDE:
            sigma = sigma * tl.abs(beta)
        floor = tl.maximum(sigma, delta)
        s = sigma / floor
        f, _ = gain(s * s, STEPS)
        c = c * f / floor
    return c


@triton.jit
def write_scale_backward(
    dc, norm_k, norm_v, beta, inside, outside, delta, STEPS: tl.constexpr, BETA_OUTSIDE: tl.constexpr = False
):
    """Compute dbeta, and the factors by_k, by_v with dk = by_k k, dv = by_v v.

    Above delta, c = outside rho(1) sign(beta) / (|v| |k|), with BETA_OUTSIDE beta for its sign. Below delta
    nothing is divided by a norm, which can be 0.
    """
    dbeta = dc * inside * outside
    by_k = dc * 0.0
    by_v = dc * 0.0
    if STEPS >= 0:
        within = inside * tl.abs(beta)
        if BETA_OUTSIDE:
            within = inside + beta * 0.0
        sigma = within * norm_v * norm_k
        floor = tl.maximum(sigma, delta)
        s = sigma / floor
        f, df = gain(s * s, STEPS)
        above = sigma > delta
        unit = outside * inside / floor  # c = unit beta f
        dunit = dc * unit
        if BETA_OUTSIDE:  # noqa: SIM108  a branch at compile time
            dbeta = dunit * f
        else:
            dbeta = tl.where(above, 0.0, dunit * (f + 2.0 * df * s * s))
        dc_c = dunit * beta * f
        scale = within / floor
        below = dunit * beta * 2.0 * df
        safe_k = tl.where(above, norm_k, 1.0)
        safe_v = tl.where(above, norm_v, 1.0)
        by_k = tl.where(above, -dc_c / safe_k / safe_k, below * (scale * norm_v) * (scale * norm_v))
        by_v = tl.where(above, -dc_c / safe_v / safe_v, below * (scale * norm_k) * (scale * norm_k))
    return dbeta, by_k, by_v
