"""The memory recurrence by the C++ kernels in `csrc/`: forward, backward and single step, on raw inputs.

The kernels do casts, the scale of the write and packed sequences themselves: see csrc/memory.h.

    inputs           q, k [B, L, H, m];  v [B, L, H, d];  log_alpha, beta [B, L, H];  gamma [B, L, H] with ones;
                     inject [B, L, H], if it is given
    S0, M0, S, M     [N, H, d, m], one state per sequence
    S_saved, M_saved [segments, H, padded d * padded m], states before every 64 steps, for the backward pass
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import cpu_library, launch
from ..custom_op import custom_op, offer_decompositions
from ..decoding import is_direct_step
from ..muon import Muon
from ..state import MemoryState
from .types import MemoryInputs


def run_raw(
    inputs: MemoryInputs,
    eta: float,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, H, d]` in v's dtype and the last S, M in `dtype`, from the caller's inputs."""
    v = inputs.v
    call = launch.prepare_memory(inputs, eta, muon, state, cu_seqlens, dtype)
    function = memory_native if call.recorded or not launch.is_eager(v) else _forward
    y, S, M, *_ = function(call.tensors, call.S, call.M, call.offsets, *call.settings, call.recorded, call.step)
    return y.to(v.dtype), S, M


_templates: dict[tuple[Any, ...], cpu_library.MemoryArguments] = {}


def decode(
    inputs: MemoryInputs,
    eta: float,
    muon: Muon,
    state: MemoryState,
    cu_seqlens: Tensor | None,
    impl: str,
) -> tuple[Tensor, MemoryState] | None:
    """Run a decoding step by the shortest way to the kernel; None if the call has to take the usual way.

    A step takes the kernel some ten microseconds, a tenth of what the usual checks and dispatch add. They are replaced
    by comparisons with a template that was made for the same shapes, dtypes and settings. Every argument that does not
    match exactly returns None, and the usual way then runs the call or says what is wrong.
    """
    if not isinstance(state, tuple) or len(state) != 2 or type(eta) not in (float, int):
        return None
    inject = inputs.inject
    given = (*inputs[:5], *state) if inject is None else (*inputs[:5], *state, inject)
    if not is_direct_step(given, packed=cu_seqlens is not None):
        return None
    tensors = [x.contiguous() for x in given]
    q, k, v, log_alpha, beta, S, M = tensors[:7]
    keys, values, dtype, wide = q.shape, v.shape, q.dtype, S.dtype
    if len(keys) != 4 or len(values) != 4 or k.shape != keys or k.dtype is not dtype or v.dtype is not dtype:
        return None
    if not wide is beta.dtype is log_alpha.dtype is M.dtype or impl not in ("auto", "native") or type(muon) is not Muon:
        return None
    gates, states = keys[:3], S.shape
    if values[:3] != gates or log_alpha.shape != gates or beta.shape != gates or M.shape != states:
        return None
    if inject is not None and (inject.shape != gates or inject.dtype is not wide):
        return None
    key = (keys, values, states, dtype, wide, eta, id(muon), inject is None)
    template = _templates.get(key)
    if template is None:
        template = _decode_template(q, v, S, eta, muon, inject)
        if template is None:
            return None
        if len(_templates) >= 256:
            _templates.clear()
        _templates[key] = template
    y, S_next, M_next = torch.empty_like(v), torch.empty_like(S), torch.empty_like(M)
    a = cpu_library.MemoryArguments.from_buffer_copy(template)
    a.threads = torch.get_num_threads()
    a.q, a.k, a.v, a.log_alpha, a.beta, a.S0, a.M0 = [x.data_ptr() for x in tensors[:7]]
    if inject is not None:
        a.inject = tensors[7].data_ptr()
    a.y, a.S, a.M = y.data_ptr(), S_next.data_ptr(), M_next.data_ptr()
    refused = cpu_library.load().muonssm_memory_step(a)  # some log_alpha is above 0
    return None if refused else (y, MemoryState(S_next, M_next))


def _decode_template(
    q: Tensor, v: Tensor, S: Tensor, eta: float, muon: Muon, inject: Tensor | None
) -> cpu_library.MemoryArguments | None:
    """Fill in what stays the same from step to step; None if the kernel cannot run such steps.

    The template keeps alive the tensors it points to, and `muon`, whose id is part of the template's key.
    """
    (B, _, H, m), d, wide = q.shape, v.shape[3], torch.float64 if q.dtype == torch.float64 else torch.float32
    if S.shape != (B, H, d, m) or S.dtype != wide or q.dtype not in launch.INPUT_TYPES or not S.numel():
        return None
    if isinstance(muon.gamma, Tensor) or not math.isfinite(eta) or cpu_library.unavailable() is not None:
        return None
    if muon.orthogonalize is not None:
        return None
    gamma, offsets = torch.full((1, 1, 1), float(muon.gamma), dtype=wide), torch.arange(B + 1)
    settings = launch.memory_settings(eta, muon, inject is not None)
    template = _arguments([q, q, v, gamma, gamma, gamma], offsets, *settings)
    template.kept = (gamma, offsets, muon)
    return template


def _strides(gamma: Tensor) -> tuple[int, int]:
    """Return the strides of gamma `[B, L, H]` over steps and heads, in elements; 0 where it does not vary."""
    H = gamma.shape[2]
    return (H if gamma.shape[0] * gamma.shape[1] > 1 else 0), int(H > 1)


def _arguments(
    inputs: list[Tensor], offsets: Tensor, eta: float, residual: bool, momentum: bool, write: list[float]
) -> cpu_library.MemoryArguments:
    q, _, v, _, _, gamma, *inject = inputs
    H, d, m = *v.shape[2:], q.shape[3]
    a = cpu_library.MemoryArguments(
        launch.INPUT_TYPES[v.dtype],
        torch.get_num_threads(),
        offsets.numel() - 1,
        H,
        d,
        m,
        momentum,
        residual,
        *_strides(gamma),
    )
    a.eta, a.write, a.offsets = eta, launch.write_struct(write), offsets.data_ptr()
    a.q, a.k, a.v, a.log_alpha, a.beta, a.gamma = (x.data_ptr() for x in inputs[:6])
    a.inject = inject[0].data_ptr() if inject else None
    return a


def _shapes(q: Tensor, v: Tensor, offsets: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a state and of the saved states."""
    (B, L, H, d), m, N = v.shape, q.shape[3], offsets.numel() - 1
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    size = launch.padded(d, dtype) * launch.padded(m, dtype)
    return (N, H, d, m), (launch.saved_segments(B * L, N), H, size)


def _forward(
    inputs: list[Tensor],
    S0: Tensor | None,
    M0: Tensor | None,
    offsets: Tensor,
    eta: float,
    residual: bool,
    momentum: bool,
    write: list[float],
    save: bool,
    step: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return y, S, M, S_saved, M_saved, the last two empty unless `save`; `step` asks for the single-step kernel."""
    q, _, v, _, beta, *_ = inputs
    state, saved = _shapes(q, v, offsets)
    y, S, M = launch.empty(v, v.shape), beta.new_empty(state), beta.new_empty(state)
    S_saved, M_saved = (launch.empty(beta, saved if kept else 0) for kept in (save, save and momentum))
    a = _arguments(inputs, offsets, eta, residual, momentum, write)
    a.S0, a.M0, a.y, a.S, a.M = (launch.address(x) for x in (S0, M0, y, S, M))
    a.S_saved, a.M_saved = launch.address(S_saved), launch.address(M_saved)
    refused = cpu_library.call("memory_step", a) if step else True
    if refused:  # the single-step kernel does not take a log_alpha above 0, which a compiled call does not check
        cpu_library.call("memory_forward", a)
    return y, S, M, S_saved, M_saved


memory_native = custom_op("muonssm::memory_native", _forward)


@memory_native.register_fake
def fake(inputs, S0, M0, offsets, eta, residual, momentum, write, save, step):  # type: ignore[no-untyped-def]
    """Allocate the results of `memory_native`."""
    offer_decompositions()
    q, _, v, _, beta, *_ = inputs
    state, saved = _shapes(q, v, offsets)
    shapes = (state, state, saved if save else (0,), saved if save and momentum else (0,))
    return v.new_empty(v.shape), *(beta.new_empty(shape) for shape in shapes)


@functools.partial(custom_op, "muonssm::memory_native_backward")
def _memory_native_backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    saved: list[Tensor],
    offsets: Tensor,
    eta: float,
    residual: bool,
    momentum: bool,
    write: list[float],
    dgamma: bool,
    dinject: bool,
) -> list[Tensor]:
    """Return the gradients of q, k, v, log_alpha, beta, gamma and inject (empty unless asked for), S0, M0."""
    out = _gradients(grads, inputs, dgamma, dinject, launch.empty)
    dy, dS, dM = (x.contiguous() for x in grads)
    a = _arguments(inputs, offsets, eta, residual, momentum, write)
    a.S_saved, a.M_saved = (launch.address(x) for x in saved)
    a.dy, a.dS, a.dM = dy.data_ptr(), dS.data_ptr(), dM.data_ptr()
    a.dq, a.dk, a.dv, a.dlog_alpha, a.dbeta, a.dgamma, a.dinject, a.dS0, a.dM0 = (launch.address(x) for x in out)
    cpu_library.call("memory_backward", a)
    return out


@_memory_native_backward.register_fake
def _(grads, inputs, saved, offsets, eta, residual, momentum, write, dgamma, dinject):  # type: ignore[no-untyped-def]
    return _gradients(grads, inputs, dgamma, dinject)


def _gradients(
    grads: list[Tensor],
    inputs: list[Tensor],
    dgamma: bool,
    dinject: bool,
    empty: Callable[..., Tensor] = Tensor.new_empty,
) -> list[Tensor]:
    """Allocate the gradients."""
    beta = inputs[4]
    gates = [empty(beta, beta.shape if needed else 0) for needed in (dgamma, dinject)]
    return [*(empty(x, x.shape) for x in inputs[:5]), *gates, *(empty(x, x.shape) for x in grads[1:])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, S0, _, offsets, *settings, _, _ = inputs
    ctx.save_for_backward(*tensors, offsets, *output[3:])
    ctx.settings, ctx.stateless = tuple(settings), S0 is None
    ctx.set_materialize_grads(False)  # the saved states are large, and nothing differentiates them


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    *inputs, offsets, S_saved, M_saved = ctx.saved_tensors
    q, _, v, _, beta, gamma, *inject = inputs
    state, _ = _shapes(q, v, offsets)
    grads = launch.materialize(given[:3], (v, beta, beta), (v.shape, state, state))
    dgamma, dinject = ctx.needs_input_grad[0][5], bool(inject) and ctx.needs_input_grad[0][6]
    *first, by_gamma, by_inject, dS0, dM0 = _memory_native_backward(
        grads, inputs, [S_saved, M_saved], offsets, *ctx.settings, dgamma, dinject
    )
    by_gamma = by_gamma.sum_to_size(gamma.shape) if dgamma else None
    by_tensors = [*first, by_gamma, *([by_inject if dinject else None] if inject else [])]
    states = (None, None) if ctx.stateless else (dS0, dM0)
    return by_tensors, *states, *(None,) * 7


memory_native.register_autograd(_backward, setup_context=_save)
