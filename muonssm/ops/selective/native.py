"""The diagonal recurrence by the C++ kernels in `csrc/`: forward, backward and single step, on raw inputs.

The kernels do casts, the scale of the write and packed sequences themselves: see csrc/selective.h.

    inputs           x, dt [B, L, D];  B, C [B, L, N];  gamma [B, L, 1] with ones
    A                [D, N], or None for LongHorn's gate
    S0, M0, S, M     [sequences, D, N]
    S_saved, M_saved [segments, padded D * padded N], states before every 64 steps, for the backward pass
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import cpu_library, launch
from ..cpu_library import CHANNEL_GROUP
from ..custom_op import custom_op, offer_decompositions
from ..dtypes import widen
from ..muon import Muon


def run_raw(
    inputs: tuple[Tensor, ...],
    A: Tensor | None,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, D]` in x's dtype and the last S, M in `dtype`, from the caller's x, dt, B, C."""
    x = inputs[0]
    vectors, wide_A = launch.common_dtype(inputs, dtype), None if A is None else widen(A, dtype)
    call = launch.prepare_selective(vectors, wide_A, muon, state, cu_seqlens is not None, dtype)
    offsets = launch.sequence_offsets(x.shape[0], x.shape[1], cu_seqlens)
    function = selective_native if call.recorded or not launch.is_eager(x) else _forward
    y, S, M, *_ = function(call.tensors, call.A, call.S, call.M, offsets, *call.settings, call.recorded, call.step)
    return y.to(x.dtype), S, M


def _arguments(
    inputs: list[Tensor], A: Tensor | None, offsets: Tensor, momentum: bool, write: list[float]
) -> cpu_library.SelectiveArguments:
    x, _, B, _, gamma = inputs
    a = cpu_library.SelectiveArguments(
        launch.INPUT_TYPES[x.dtype], torch.get_num_threads(), offsets.numel() - 1, x.shape[2], B.shape[2], momentum
    )
    a.gamma_step = int(gamma.numel() > 1)
    a.write, a.offsets, a.A = launch.write_struct(write), offsets.data_ptr(), launch.address(A)
    a.x, a.dt, a.B, a.C, a.gamma = (t.data_ptr() for t in inputs)
    return a


def _shapes(x: Tensor, B: Tensor, gamma: Tensor, offsets: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a state and of the saved states."""
    (batch, L, D), N, sequences = x.shape, B.shape[2], offsets.numel() - 1
    channels = (D + CHANNEL_GROUP - 1) // CHANNEL_GROUP * CHANNEL_GROUP
    saved = (launch.saved_segments(batch * L, sequences), channels * launch.padded(N, gamma.dtype))
    return (sequences, D, N), saved


def _forward(
    inputs: list[Tensor],
    A: Tensor | None,
    S0: Tensor | None,
    M0: Tensor | None,
    offsets: Tensor,
    momentum: bool,
    write: list[float],
    save: bool,
    step: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, S, M, S_saved, M_saved, the last two empty unless `save`; `step` asks for the single-step kernel."""
    x, _, B, _, gamma = inputs
    state, saved = _shapes(x, B, gamma, offsets)
    y, S, M = launch.empty(x, x.shape), gamma.new_empty(state), gamma.new_empty(state)
    S_saved, M_saved = (launch.empty(gamma, saved if kept else 0) for kept in (save, save and momentum))
    a = _arguments(inputs, A, offsets, momentum, write)
    a.S0, a.M0, a.y, a.S, a.M = (launch.address(t) for t in (S0, M0, y, S, M))
    a.S_saved, a.M_saved = launch.address(S_saved), launch.address(M_saved)
    cpu_library.call("selective_step" if step else "selective_forward", a)
    return y, S, M, S_saved, M_saved


selective_native = custom_op("muonssm::selective_native", _forward)


@selective_native.register_fake
def fake(inputs, A, S0, M0, offsets, momentum, write, save, step):  # type: ignore[no-untyped-def]
    """Allocate the results of `selective_native`."""
    offer_decompositions()
    x, _, B, _, gamma = inputs
    state, saved = _shapes(x, B, gamma, offsets)
    shapes = (state, state, saved if save else (0,), saved if save and momentum else (0,))
    return x.new_empty(x.shape), *(gamma.new_empty(shape) for shape in shapes)


@functools.partial(custom_op, "muonssm::selective_native_backward")
def _selective_native_backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    A: Tensor | None,
    saved: list[Tensor],
    offsets: Tensor,
    momentum: bool,
    write: list[float],
    dgamma: bool,
) -> list[Tensor]:
    """Return the gradients of x, dt, B, C, A (empty if A is None), gamma (empty unless `dgamma`), S0, M0."""
    out = _gradients(grads, inputs, A, dgamma, launch.empty)
    a = _arguments(inputs, A, offsets, momentum, write)
    dy, dS, dM = (t.contiguous() for t in grads)
    a.dy, a.dS, a.dM = dy.data_ptr(), dS.data_ptr(), dM.data_ptr()
    a.S_saved, a.M_saved = (launch.address(t) for t in saved)
    a.dx, a.ddt, a.dB, a.dC, a.dA, a.dgamma, a.dS0, a.dM0 = (launch.address(t) for t in out)
    cpu_library.call("selective_backward", a)
    return [*(launch.narrow_gradient(t, inputs[0].dtype) for t in out[:4]), *out[4:]]


@_selective_native_backward.register_fake
def _(grads, inputs, A, saved, offsets, momentum, write, dgamma):  # type: ignore[no-untyped-def]
    out = _gradients(grads, inputs, A, dgamma)
    return [*(t.to(inputs[0].dtype) for t in out[:4]), *out[4:]]


def _gradients(
    grads: list[Tensor],
    inputs: list[Tensor],
    A: Tensor | None,
    dgamma: bool,
    empty: Callable[..., Tensor] = Tensor.new_empty,
) -> list[Tensor]:
    """Allocate the gradients in the dtype of computation."""
    x, dt, B, C, gamma = inputs
    sizes: list[Any] = [x.shape, dt.shape, B.shape, C.shape, 0 if A is None else A.shape]
    sizes += [(x.shape[0], x.shape[1], 1) if dgamma else 0, grads[1].shape, grads[2].shape]
    return [empty(gamma, size) for size in sizes]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, A, S0, _, offsets, momentum, write, _, _ = inputs
    ctx.save_for_backward(*tensors, A, offsets, *output[3:])
    ctx.settings, ctx.stateless = (momentum, write), S0 is None
    ctx.set_materialize_grads(False)  # the saved states are large, and nothing differentiates them


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    *inputs, A, offsets, S_saved, M_saved = ctx.saved_tensors
    x, _, B, _, gamma = inputs
    state, _ = _shapes(x, B, gamma, offsets)
    grads = launch.materialize(given[:3], (x, gamma, gamma), (x.shape, state, state))
    dgamma, saved = ctx.needs_input_grad[0][4], [S_saved, M_saved]
    results = _selective_native_backward(grads, inputs, A, saved, offsets, *ctx.settings, dgamma)
    *first, dA, by_gamma, dS0, dM0 = results
    by_gamma = by_gamma.sum_to_size(gamma.shape) if dgamma else None
    states = (None, None) if ctx.stateless else (dS0, dM0)
    return [*first, by_gamma], None if A is None else dA, *states, None, None, None, None, None


selective_native.register_autograd(_backward, setup_context=_save)
