"""Casts: the dtype of computation, gradients that saturate, and autocast kept out.

Recurrent states are float32, or float64 if any input is. Outputs return in the dtype of the values.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of computation and state: float64 if any tensor is float64, otherwise float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def widen(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast x to the dtype of computation; gradients of float16 saturate on the way back.

    The derivative of a normalized write near zero is A tau beta / delta, beyond the range of float16. As infinity, a
    zero mask earlier in the network would turn it into NaN.
    """
    return _SaturatingCast.apply(x, dtype) if x.dtype == torch.float16 else x.to(dtype)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp x to the finite range of `dtype`."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest)


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast: the recurrence runs in the dtype it was given."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def gamma_tensor(gamma: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return gamma as `[B, L, H]` with size 1 on the axes along which it does not vary."""
    if not isinstance(gamma, Tensor):
        return torch.full((1, 1, 1), float(gamma), dtype=dtype, device=device)
    shape = gamma.shape if gamma.ndim == 3 else (1, 1, gamma.numel())
    return widen(gamma, dtype).reshape(shape)


class _SaturatingCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.source = x.dtype
        return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return saturate(grad, ctx.source).to(ctx.source), None
