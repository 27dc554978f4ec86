"""The convolution by the C++ kernel in csrc/convolution.h: filters and activation in one pass.

x, y [B, L, C];  weight [C, K];  bias [C];  tail [N, K - 1, C];  offsets [N + 1], bounds of the sequences
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import cpu_library, launch
from ..custom_op import custom_op, offer_decompositions
from ..dtypes import widen


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, cu_seqlens: Tensor | None, activation: str | None
) -> Tensor:
    """Return y `[B, L, C]` in x's dtype. x can be a slice of wider rows: the kernel takes a row stride."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    B, L, C = x.shape
    if x.stride(2) != 1 or (B > 1 and x.stride(0) != L * x.stride(1)):
        x = x.contiguous()
    weight = widen(weight, dtype).reshape(C, -1).contiguous()
    bias = weight.new_zeros(C) if bias is None else widen(bias, dtype).contiguous()
    offsets = launch.sequence_offsets(B, L, cu_seqlens)
    tensors = [x, weight, bias, tail.contiguous()]
    recorded = launch.records_gradients(tensors)
    function = convolution_native if recorded or not launch.is_eager(x) else _forward
    return function(tensors, offsets, activation == "silu")


def _arguments(tensors: list[Tensor], offsets: Tensor, silu: bool) -> cpu_library.ConvolutionArguments:
    x, weight, bias, tail = tensors
    step = x.stride(1) if x.shape[1] > 1 else x.stride(0) if x.shape[0] > 1 else x.shape[2]
    a = cpu_library.ConvolutionArguments(
        launch.INPUT_TYPES[x.dtype], torch.get_num_threads(), offsets.numel() - 1, *weight.shape, step, silu
    )
    a.offsets, a.x, a.tail = offsets.data_ptr(), x.data_ptr(), launch.address(tail)
    a.weight, a.bias = weight.data_ptr(), bias.data_ptr()
    return a


def _forward(tensors: list[Tensor], offsets: Tensor, silu: bool) -> Tensor:
    y = launch.empty(tensors[0], tensors[0].shape)
    a = _arguments(tensors, offsets, silu)
    a.y = y.data_ptr()
    cpu_library.call("convolution_forward", a)
    return y


convolution_native = custom_op("muonssm::convolution_native", _forward)


@convolution_native.register_fake
def fake(tensors, offsets, silu):  # type: ignore[no-untyped-def]
    """Allocate the result of `convolution_native`."""
    offer_decompositions()
    return tensors[0].new_empty(tensors[0].shape)


@functools.partial(custom_op, "muonssm::convolution_native_backward")
def _convolution_native_backward(dy: Tensor, tensors: list[Tensor], offsets: Tensor, silu: bool) -> list[Tensor]:
    """Compute the gradients of x, weight, bias and tail."""
    dy = dy.contiguous()
    out = [launch.empty(t, t.shape) for t in tensors]
    a = _arguments(tensors, offsets, silu)
    a.dy, a.dx, a.dweight, a.dbias = (t.data_ptr() for t in (dy, *out[:3]))
    a.dtail = launch.address(out[3])
    cpu_library.call("convolution_backward", a)
    return out


@_convolution_native_backward.register_fake
def _(dy, tensors, offsets, silu):  # type: ignore[no-untyped-def]
    return [t.new_empty(t.shape) for t in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tensors, offsets, ctx.silu = inputs
    ctx.save_for_backward(*tensors, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    *tensors, offsets = ctx.saved_tensors
    return _convolution_native_backward(dy, tensors, offsets, ctx.silu), None, None


convolution_native.register_autograd(_backward, setup_context=_save)
