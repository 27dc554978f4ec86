"""The memory recurrence by the C++ kernels in `csrc/`: forward, backward and single step, on raw inputs.

Casts, the scale of the write and packed sequences are the kernels' own business: see csrc/memory.h.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import cpu_library, validate
from ..muon import Muon
from ..state import MemoryState
from .fused import fused


def run_fused(
    inputs: tuple[Tensor, ...],
    eta: float,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """y `[B, L, H, d]` in v's dtype and the last S, M in `dtype`, from q, k, v, log_alpha, beta as they came."""
    v = inputs[2]
    call = fused(inputs, eta, muon, state, cu_seqlens, dtype)
    function = memory_native if call.recorded or not cpu_library.is_plain(v) else _forward
    y, S, M, *_ = function(call.tensors, call.S, call.M, call.offsets, *call.settings, call.recorded)
    return y.to(v.dtype), S, M


_templates: dict[tuple[Any, ...], cpu_library.MemoryArguments] = {}


def decode(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], eta: float, muon: Muon, state: MemoryState, impl: str
) -> tuple[Tensor, MemoryState] | None:
    """One step of plain tensors without gradients, on the shortest way to the kernel.

    A step takes the kernel some ten microseconds, a tenth of what the usual checks and dispatch would add. Anything
    that is not exactly as it should be returns None, and the usual way then serves it or says what is wrong.
    """
    if not isinstance(state, tuple) or len(state) != 2 or type(eta) not in (float, int):
        return None
    recording = torch.is_grad_enabled()
    for x in (*inputs, *state):
        if type(x) is not Tensor or not x.is_cpu or (recording and x.requires_grad):
            return None
    if inputs[0].shape[1:2] != (1,):
        return None
    tensors = [x.contiguous() for x in (*inputs, *state)]
    q, k, v, log_alpha, beta, S, M = tensors
    keys, values, dtype, wide = q.shape, v.shape, q.dtype, S.dtype
    if len(keys) != 4 or len(values) != 4 or k.shape != keys or k.dtype is not dtype or v.dtype is not dtype:
        return None
    if not wide is beta.dtype is log_alpha.dtype is M.dtype or impl not in ("auto", "native") or type(muon) is not Muon:
        return None
    row, states = keys[:3], S.shape
    if values[:3] != row or log_alpha.shape != row or beta.shape != row or M.shape != states:
        return None
    key = (keys, values, states, dtype, wide, eta, id(muon))
    template = _templates.get(key)
    if template is None:
        template = _decode_template(q, v, S, eta, muon)
        if template is None:
            return None
        if len(_templates) >= 256:
            _templates.clear()
        _templates[key] = template
    if validate.is_transformed():
        return None
    y, S_next, M_next = torch.empty_like(v), torch.empty_like(S), torch.empty_like(M)
    a = cpu_library.MemoryArguments.from_buffer_copy(template)
    a.threads = torch.get_num_threads()
    a.q, a.k, a.v, a.log_alpha, a.beta, a.S0, a.M0 = [x.data_ptr() for x in tensors]
    a.y, a.S, a.M = y.data_ptr(), S_next.data_ptr(), M_next.data_ptr()
    return None if cpu_library.load().muonssm_memory_step(a) else (y, MemoryState(S_next, M_next))


def _decode_template(q: Tensor, v: Tensor, S: Tensor, eta: float, muon: Muon) -> cpu_library.MemoryArguments | None:
    """What stays the same from step to step; it keeps alive what it points to, and `muon`, whose id is its name."""
    (B, _, H, m), d, wide = q.shape, v.shape[3], torch.float64 if q.dtype == torch.float64 else torch.float32
    if S.shape != (B, H, d, m) or S.dtype != wide or q.dtype not in cpu_library.INPUT_TYPES or not S.numel():
        return None
    if isinstance(muon.gamma, Tensor) or not math.isfinite(eta) or cpu_library.unavailable() is not None:
        return None
    gamma, offsets = torch.full((1, 1, 1), float(muon.gamma), dtype=wide), torch.arange(B + 1)
    write = cpu_library.write_numbers(muon)
    template = _arguments([q, q, v, gamma, gamma, gamma], offsets, float(eta), cpu_library.has_momentum(muon), write)
    template.kept = (gamma, offsets, muon)
    return template


def _strides(gamma: Tensor) -> tuple[int, int]:
    """gamma `[B, L, H]` with ones: elements from one step, and from one head, to the next."""
    H = gamma.shape[2]
    return (H if gamma.shape[0] * gamma.shape[1] > 1 else 0), int(H > 1)


def _arguments(
    inputs: list[Tensor], offsets: Tensor, eta: float, momentum: bool, write: list[float]
) -> cpu_library.MemoryArguments:
    q, _, v, *_, gamma = inputs
    H, d, m = *v.shape[2:], q.shape[3]
    a = cpu_library.MemoryArguments(
        cpu_library.INPUT_TYPES[v.dtype],
        torch.get_num_threads(),
        offsets.numel() - 1,
        H,
        d,
        m,
        momentum,
        *_strides(gamma),
    )
    a.eta, a.write, a.offsets = eta, cpu_library.make_write(write), offsets.data_ptr()
    a.q, a.k, a.v, a.log_alpha, a.beta, a.gamma = (x.data_ptr() for x in inputs)
    return a


def _shapes(q: Tensor, v: Tensor, offsets: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a state, and of the saved ones."""
    (B, L, H, d), m, N = v.shape, q.shape[3], offsets.numel() - 1
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    rows = cpu_library.padded(d, dtype) * cpu_library.padded(m, dtype)
    return (N, H, d, m), (cpu_library.saved_segments(B * L, N), H, rows)


def _forward(
    inputs: list[Tensor],
    S0: Tensor | None,
    M0: Tensor | None,
    offsets: Tensor,
    eta: float,
    momentum: bool,
    write: list[float],
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y, S, M, and with `save` what the backward pass needs: the states before every 64 steps."""
    q, _, v, _, beta, _ = inputs
    state, saved = _shapes(q, v, offsets)
    y, S, M = cpu_library.empty(v, v.shape), beta.new_empty(state), beta.new_empty(state)
    S_saved, M_saved = (cpu_library.empty(beta, saved if kept else 0) for kept in (save, save and momentum))
    a = _arguments(inputs, offsets, eta, momentum, write)
    a.S0, a.M0, a.y, a.S, a.M = (cpu_library.address(x) for x in (S0, M0, y, S, M))
    a.S_saved, a.M_saved = cpu_library.address(S_saved), cpu_library.address(M_saved)
    cpu_library.call("memory", "forward" if save or v.shape[1] != 1 else "step", a)
    return y, S, M, S_saved, M_saved


memory_native = torch.library.custom_op("muonssm::memory_native", _forward, mutates_args=())


@memory_native.register_fake
def _(inputs, S0, M0, offsets, eta, momentum, write, save):  # type: ignore[no-untyped-def]
    q, _, v, _, beta, _ = inputs
    state, saved = _shapes(q, v, offsets)
    shapes = (state, state, saved if save else (0,), saved if save and momentum else (0,))
    return v.new_empty(v.shape), *(beta.new_empty(shape) for shape in shapes)


@torch.library.custom_op("muonssm::memory_native_backward", mutates_args=())
def _memory_native_backward(
    grads: list[Tensor],
    inputs: list[Tensor],
    saved: list[Tensor],
    offsets: Tensor,
    eta: float,
    momentum: bool,
    write: list[float],
    dgamma: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, log_alpha, beta, gamma (`[B, L, H]`, empty unless asked for), S0, M0."""
    out = _gradients(grads, inputs, dgamma, cpu_library.empty)
    dy, dS, dM = (x.contiguous() for x in grads)
    a = _arguments(inputs, offsets, eta, momentum, write)
    a.S_saved, a.M_saved = (cpu_library.address(x) for x in saved)
    a.dy, a.dS, a.dM = dy.data_ptr(), dS.data_ptr(), dM.data_ptr()
    a.dq, a.dk, a.dv, a.dlog_alpha, a.dbeta, a.dgamma, a.dS0, a.dM0 = (cpu_library.address(x) for x in out)
    cpu_library.call("memory", "backward", a)
    return out


@_memory_native_backward.register_fake
def _(grads, inputs, saved, offsets, eta, momentum, write, dgamma):  # type: ignore[no-untyped-def]
    return _gradients(grads, inputs, dgamma)


def _gradients(
    grads: list[Tensor], inputs: list[Tensor], dgamma: bool, empty: Callable[..., Tensor] = Tensor.new_empty
) -> list[Tensor]:
    """Empty tensors for the gradients."""
    *first, beta, _ = inputs
    by_gamma = empty(beta, beta.shape if dgamma else 0)
    return [*(empty(x, x.shape) for x in (*first, beta)), by_gamma, *(empty(x, x.shape) for x in grads[1:])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, S0, _, offsets, eta, momentum, write, _ = inputs
    ctx.save_for_backward(*tensors, offsets, *output[3:])
    ctx.settings, ctx.stateless = (eta, momentum, write), S0 is None
    ctx.set_materialize_grads(False)  # the saved states are large, and nothing differentiates them


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    *inputs, offsets, S_saved, M_saved = ctx.saved_tensors
    q, _, v, _, beta, gamma = inputs
    state, _ = _shapes(q, v, offsets)
    grads = cpu_library.materialize(given[:3], (v, beta, beta), (v.shape, state, state))
    dgamma = ctx.needs_input_grad[0][5]
    *first, by_gamma, dS0, dM0 = _memory_native_backward(
        grads, inputs, [S_saved, M_saved], offsets, *ctx.settings, dgamma
    )
    by_gamma = by_gamma.sum_to_size(gamma.shape) if dgamma else None
    states = (None, None) if ctx.stateless else (dS0, dM0)
    return [*first, by_gamma], *states, None, None, None, None, None


memory_native.register_autograd(_backward, setup_context=_save)
