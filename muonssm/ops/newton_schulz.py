"""Newton-Schulz normalization: the dense operator of Definition 1, and its closed form for rank-one writes.

X        [..., d, m]   any batch of matrices
k        [..., m]      key of a write X = tau beta v k^T
v        [..., d]      value of the write
beta     [...]         write gate
sigma    [...]         |X|_F = tau |beta| |v| |k|, the only nonzero singular value of the write
s        [...]         sigma / max(sigma, delta), in [0, 1]
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonssm.checks import check_int, check_number

from .dtypes import full_precision
from .muon import Muon
from .validate import check_dense

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of Definition 1: rho(s) = A s + B s^3 + C s^5."""


def rho(s: Tensor, steps: int = 1) -> Tensor:
    """Apply rho(s) = A s + B s^3 + C s^5 `steps` times: the effect on a singular value s (Corollary 1)."""
    return s * _gain(s, steps)


def newton_schulz(X: Tensor, steps: int = 1, delta: float = 1e-6) -> Tensor:
    """Compute NS(X) of Definition 1: divide by the Frobenius norm, then apply `rho` to every singular value.

        X <- X / max(|X|_F, delta);    X <- (A I + B X X^T + C (X X^T)^2) X,  `steps` times

    X and the result are `[..., d, m]` in the same dtype; half precision is computed in float32. `steps=0` only divides.
    """
    if not isinstance(X, Tensor) or not X.is_floating_point():
        got = f"a tensor of {X.dtype}" if isinstance(X, Tensor) else f"a value of type {type(X).__name__}"
        raise TypeError(f"X must be a floating-point tensor [..., d, m], got {got}")
    check_dense("X", X)
    if X.ndim < 2:
        raise ValueError(f"X must have shape [..., d, m], got {list(X.shape)}")
    check_int("steps", steps, least=0)
    check_number("delta", delta, low=0, open_low=True)
    wide = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
    wide = wide / _norm(wide.flatten(-2))[..., None, None].clamp(min=delta)
    transposed = X.shape[-2] > X.shape[-1]  # work on the smaller of X X^T and X^T X
    wide = wide.mT if transposed else wide
    with full_precision(X.device):
        for _ in range(steps):
            gram = wide @ wide.mT
            wide = A * wide + (B * gram + C * gram @ gram) @ wide
    return (wide.mT if transposed else wide).to(X.dtype)


def write_scale(k: Tensor, v: Tensor, beta: Tensor, muon: Muon) -> Tensor:
    """Compute c `[...]` with N(tau beta v k^T) = c v k^T: the normalized write, without forming a matrix.

    A rank-one matrix has one singular value. With s = sigma / max(sigma, delta) and rho(s) = s gain(s),

        NS(tau beta v k^T) = rho(s) v_hat k_hat^T = [tau beta gain(s) / max(sigma, delta)] v k^T

    The second form never divides by zero: a zero key or value gives an exactly zero write and the exact, finite
    gradient. For sigma >= delta, gain(s) is the constant 0.701 (one step); see docs/design/operator.md. With
    `beta_position="outside"` sigma does not contain beta, and the write is beta NS(tau v k^T).
    """
    if muon.normalization is None:
        return muon.tau * beta
    inside, outside = (muon.tau, 1.0) if muon.tau_position == "inside" else (1.0, muon.tau)
    sigma = inside * _norm(v) * _norm(k)
    if muon.beta_position == "inside":
        sigma = sigma * beta.abs()
    floor = sigma.clamp(min=muon.delta)
    steps = muon.ns_steps if muon.normalization == "newton_schulz" else 0
    return outside * inside * beta * _gain(sigma / floor, steps) / floor


def _norm(x: Tensor) -> Tensor:
    """Compute |x| over the last axis, scaled by the largest entry so that squares of huge values do not overflow."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return largest.squeeze(-1) * torch.linalg.vector_norm(x / largest, dim=-1)


def _gain(s: Tensor, steps: int) -> Tensor:
    """Compute rho^steps(s) / s, which is finite at s = 0."""
    gain = torch.ones_like(s)
    for _ in range(steps):
        square = (gain * s) ** 2
        gain = gain * (A + square * (B + square * C))
    return gain
