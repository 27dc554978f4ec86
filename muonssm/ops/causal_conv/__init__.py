"""`causal_convolution`: the short depthwise convolution that mixers put before their memory.

x, y     [B, L, C]       C channels
weight   [C, 1, K]       one filter of K taps per channel
bias     [C]
tail     [B, K - 1, C]   the inputs before the sequence; `[N, K - 1, C]` for N packed sequences
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import cpu_library, split, validate
from ..decoding import is_one_step
from ..dtypes import compute_dtype, full_precision
from ..tracing import is_transformed
from . import shifts


class Convolved(NamedTuple):
    """The outputs y, and the last K - 1 inputs of every sequence, which continue it as its next tail."""

    y: Tensor
    tail: Tensor


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tail: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    activation: str | None = "silu",
    impl: str = "auto",
) -> Convolved:
    """Apply one causal filter per channel, then the activation.

        y_t = silu(bias + sum_j weight_j x_{t-K+1+j}),     j = 0 .. K-1

    Args:
        x: inputs `[B, L, C]`.
        weight: `[C, 1, K]`, the layout of `nn.Conv1d`.
        bias: `[C]` or None.
        tail: inputs before each sequence, `[B, K - 1, C]` (`[N, K - 1, C]` for N packed sequences); None for zeros.
        cu_seqlens: bounds of packed sequences, as in `muon_memory`; no filter reaches across a bound.
        activation: `"silu"` or None.
        impl: `"auto"` and `"native"` use the C++ kernel if it supports the call; every other name uses torch.

    Returns:
        y `[B, L, C]` and the new tail, in x's dtype. Sums are in float32, or float64 if x or weight is.
    """
    context = split.current()
    packed, tail_shape = _check(x, weight, activation, tail, cu_seqlens, is_piece=context is not None)
    if context is not None:
        settings = {"activation": activation, "impl": impl}
        return context.convolution(x, weight, bias, tail=tail, cu_seqlens=cu_seqlens, **settings)
    cu_seqlens = None if packed is None else packed.cu_seqlens
    tail = x.new_zeros(tail_shape) if tail is None else tail.to(x.dtype)
    if is_one_step(x.shape[1], cu_seqlens is not None) and x.dtype == weight.dtype in (torch.float32, torch.float64):
        return Convolved(*shifts.step(x, weight, bias, tail, activation))
    with full_precision(x.device):
        if impl in ("auto", "native") and _has_kernel(x, weight):
            from .native import convolve

            y = convolve(x, weight, bias, tail, cu_seqlens, activation)
        else:
            dtype = compute_dtype(x, weight)
            y = shifts.convolve(x.to(dtype), weight.to(dtype), bias, tail.to(dtype), cu_seqlens, activation).to(x.dtype)
    return Convolved(y, shifts.last_rows(x, tail, cu_seqlens))


def _check(
    x: Tensor, weight: Tensor, activation: str | None, tail: Tensor | None, cu_seqlens: Tensor | None, is_piece: bool
) -> tuple[validate.Packed | None, tuple[int, ...]]:
    """Check all arguments; return the packing and the shape of a tail. A piece has the `cu_seqlens` of a longer row."""
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
    validate.check_dense("x", x)
    channels, _, K = weight.shape
    if x.ndim != 3 or x.shape[2] != channels:
        raise ValueError(f"x must have shape [B, L, {channels}] for {channels} filters, got {list(x.shape)}")
    packed = validate.check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1], is_piece)
    tail_shape = (x.shape[0] if packed is None else packed.sequences, K - 1, channels)
    if tail is not None and tuple(tail.shape) != tail_shape:
        raise ValueError(f"tail must have shape {list(tail_shape)}, got {list(tail.shape)}")
    return packed, tail_shape


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether the C++ kernel supports the call; otherwise shifted products compute it, on any device."""
    if x.device.type != "cpu" or weight.shape[2] > cpu_library.LONGEST_FILTER or is_transformed() or not x.numel():
        return False
    return cpu_library.unavailable() is None and (x.dtype == torch.float64) == (
        compute_dtype(x, weight) == torch.float64
    )
