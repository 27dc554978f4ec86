"""RMS norms with a gate, and unit vectors, over the last axis, in one pass.

x, gate, y   [..., heads, size]   x and gate can be slices of wider rows
weight       [size]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import cpu_library, launch
from ..dtypes import compute_dtype
from .support import computed_in, has_kernel

UNIT_EPS = 1e-6


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    gate: Tensor | None = None,
    gate_first: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight in float32, times silu(gate); with `gate_first` of x * silu(gate).

    The result has x's dtype, or `dtype`.
    """
    dtype = dtype or x.dtype
    if has_kernel(x) and weight.dtype == computed_in(x) and (gate is None or gate.dtype == x.dtype):
        rows, row_gate = _rows(x), None if gate is None else _rows(gate)
        if rows is not None and (gate is None or row_gate is not None):
            narrow = torch.bfloat16 if (x.dtype, dtype) == (torch.float32, torch.bfloat16) else x.dtype
            return _Norm.apply(rows, row_gate, weight.contiguous(), eps, gate_first, narrow).view(x.shape).to(dtype)
    computed = compute_dtype(x)
    wide = x.to(computed)
    if gate is not None and gate_first:
        wide = wide * F.silu(gate.to(computed))
    wide = F.rms_norm(wide, (x.shape[-1],), weight.to(computed), eps)
    if gate is not None and not gate_first:
        wide = wide * F.silu(gate.to(computed))
    return wide.to(dtype)


def unit(x: Tensor, scale: float = 1.0) -> Tensor:
    """Scale the last axis to length `scale`, in float32: x scale / sqrt(x.x + 1e-6), finite at zero."""
    if has_kernel(x):
        rows = _rows(x)
        if rows is not None:
            return _Unit.apply(rows, scale).view(x.shape)
    wide = x.to(compute_dtype(x))
    return (wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + UNIT_EPS) * scale)).to(x.dtype)


def _rows(x: Tensor) -> Tensor | None:
    """View x as rows `[rows, heads, size]` whose heads follow each other; None if its strides do not allow it."""
    if x.ndim < 3:
        return x.reshape(-1, 1, x.shape[-1]) if x.is_contiguous() else None
    heads, size = x.shape[-2:]
    try:
        rows = x.view(-1, heads, size)
    except RuntimeError:
        return None
    return rows if rows.stride(2) == 1 and (rows.stride(1) == size or heads == 1) else None


def _arguments(x: Tensor, gate: Tensor | None, eps: float, unit: bool) -> cpu_library.NormArguments:
    kind, (rows, heads, size) = launch.INPUT_TYPES[x.dtype], x.shape
    a = cpu_library.NormArguments(kind, kind, torch.get_num_threads(), rows, heads, size, x.stride(0))
    a.gate_step, a.unit, a.eps, a.scale = 0 if gate is None else gate.stride(0), unit, eps, 1.0
    a.x, a.gate = x.data_ptr(), launch.address(gate)
    return a


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, gate_first: bool, dtype: torch.dtype
    ) -> Tensor:
        a = _arguments(x, gate, eps, unit=False)
        y = launch.empty(x, x.shape) if dtype == x.dtype else x.new_empty(x.shape, dtype=dtype)
        a.output, a.gate_first, a.weight, a.y = launch.INPUT_TYPES[dtype], gate_first, weight.data_ptr(), y.data_ptr()
        cpu_library.call("norm_forward", a)
        ctx.save_for_backward(x, gate, weight)
        ctx.settings = eps, gate_first
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        eps, gate_first = ctx.settings
        a, dy = _arguments(x, gate, eps, unit=False), dy.contiguous()
        dx, dgate = launch.empty(x, x.shape), None if gate is None else launch.empty(gate, gate.shape)
        dweight = torch.empty_like(weight)
        a.output, a.gate_first, a.weight = launch.INPUT_TYPES[dy.dtype], gate_first, weight.data_ptr()
        a.dy, a.dx, a.dgate, a.dweight = dy.data_ptr(), dx.data_ptr(), launch.address(dgate), dweight.data_ptr()
        cpu_library.call("norm_backward", a)
        return dx, dgate, dweight, None, None, None


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        a, y = _arguments(x, None, UNIT_EPS, unit=True), launch.empty(x, x.shape)
        a.scale, a.y = scale, y.data_ptr()
        cpu_library.call("norm_forward", a)
        ctx.save_for_backward(x)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        a, dy, dx = _arguments(x, None, UNIT_EPS, unit=True), dy.contiguous(), launch.empty(x, x.shape)
        a.scale, a.dy, a.dx = ctx.scale, dy.data_ptr(), dx.data_ptr()
        cpu_library.call("norm_backward", a)
        return dx, None
