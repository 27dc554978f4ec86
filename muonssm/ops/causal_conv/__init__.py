"""`causal_convolution`: the short depthwise convolution that mixers put before their memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import cpu_library, validate
from ..decoding import is_one_step
from ..dtypes import compute_dtype, full_precision
from ..tracing import is_transformed
from . import shifts


class Convolved(NamedTuple):
    """Outputs `[B, L, C]`, and the last K - 1 inputs of every sequence `[B, K - 1, C]` for its continuation."""

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
    """One causal filter a channel, then the activation.

        y_t = silu(bias + sum_j weight_j x_{t-K+1+j}),     j = 0 .. K-1

    Args:
        x: `[B, L, C]`.
        weight: `[C, 1, K]`, as `nn.Conv1d` has it; bias `[C]` or None.
        tail: what stands before each sequence, `[B, K - 1, C]` (`[N, ...]` for N packed ones); None is zeros.
        cu_seqlens: bounds of sequences packed into one row, as in `muon_memory`; no filter reaches across one.
        activation: `"silu"` or None.
        impl: `"auto"` and `"native"` use the C++ kernel where it serves; every other name is torch, for any derivative.

    Sums are in float32 (float64 if x or weight is); y and the new tail have x's dtype.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation is {activation!r}; it may be 'silu' or None")
    channels, _, K = weight.shape
    if x.ndim != 3 or x.shape[2] != channels:
        raise ValueError(f"x has shape {list(x.shape)}; it may be [B, L, {channels}] for {channels} filters")
    lengths = validate.check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1])
    sequences = x.shape[0] if lengths is None else len(lengths)
    if tail is None:
        tail = x.new_zeros(sequences, K - 1, channels)
    elif tuple(tail.shape) != (sequences, K - 1, channels):
        raise ValueError(f"tail has shape {list(tail.shape)}; it may be {[sequences, K - 1, channels]}")
    tail = tail.to(x.dtype)
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


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the C++ kernel serves this call: otherwise shifted products do, on any device."""
    if x.device.type != "cpu" or weight.shape[2] > cpu_library.LONGEST_FILTER or is_transformed() or not x.numel():
        return False
    return cpu_library.unavailable() is None and (x.dtype == torch.float64) == (
        compute_dtype(x, weight) == torch.float64
    )
