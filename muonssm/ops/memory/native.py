"""The memory recurrence by the C++ kernels in `native/`: forward, backward and single step, on raw inputs.

Casts, the scale of the write and packed sequences are the kernels' own business: see native/memory.h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import library
from ..config import Muon
from ..rows import gamma_rows, widen


def run_fused(
    inputs: tuple[Tensor, ...],
    eta: float,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """y `[B, L, H, d]` in v's dtype and the last S, M in `dtype`, from q, k, v, log_alpha, beta as they came."""
    q, k, v, log_alpha, beta = inputs
    vectors = library.common_dtype((q, k, v), dtype)
    log_alpha, beta = (widen(x, dtype).contiguous() for x in (log_alpha, beta))
    gamma = gamma_rows(muon.gamma, dtype, v.device).contiguous()
    S, M = (widen(x, dtype).contiguous() for x in state) if state else (None, None)
    tensors = [*vectors, log_alpha, beta, gamma]
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, S, M))
    offsets = library.sequence_offsets(v.shape[0], v.shape[1], cu_seqlens)
    function = memory_native if recorded or not library.is_plain(v) else _forward
    settings = (float(eta), library.has_momentum(muon), library.write_numbers(muon))
    y, S, M, *_ = function(tensors, S, M, offsets, *settings, recorded)
    return y.to(v.dtype), S, M


_templates: dict[tuple[Any, ...], library.MemoryArguments] = {}


def decode(
    vectors: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor],
    eta: float,
    muon: Muon,
    state: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """One step of plain contiguous tensors without gradients, on the shortest way to the kernel.

    A step takes the kernel some ten microseconds, a tenth of what the usual checks and dispatch would add. Anything
    that is not exactly as it should be returns None, and the usual way then serves it or says what is wrong.
    """
    (q, k, v), (S, M) = vectors, state
    tensors = (*vectors, *gates, S, M)
    recording = torch.is_grad_enabled()
    for x in tensors:
        if type(x) is not Tensor or not x.is_cpu or not x.is_contiguous() or (recording and x.requires_grad):
            return None
    B, _, H, m = q.shape
    row, dtype, wide = (B, 1, H), q.dtype, S.dtype
    if k.shape != q.shape or v.shape[:3] != row or gates[0].shape != row or gates[1].shape != row:
        return None
    if S.shape != (B, H, v.shape[3], m) or M.shape != S.shape or k.dtype is not dtype or v.dtype is not dtype:
        return None
    if wide is not (torch.float64 if dtype is torch.float64 else torch.float32):
        return None
    if M.dtype is not wide or gates[0].dtype is not wide or gates[1].dtype is not wide:
        return None
    key = (q.shape, v.shape, dtype, eta, id(muon))
    template = _templates.get(key)
    if template is None:
        if dtype not in library.INPUT_TYPES or library.unavailable() is not None:
            return None
        if len(_templates) >= 256:
            _templates.clear()
        template = _templates[key] = _decode_template(q, v, wide, eta, muon)
    y, S_next, M_next = torch.empty_like(v), torch.empty_like(S), torch.empty_like(M)
    a = library.MemoryArguments.from_buffer_copy(template)
    a.threads = torch.get_num_threads()
    a.q, a.k, a.v, a.log_alpha, a.beta, a.S0, a.M0 = [x.data_ptr() for x in tensors]
    a.y, a.S, a.M = y.data_ptr(), S_next.data_ptr(), M_next.data_ptr()
    return None if library.load().muonssm_memory_step(a) else (y, S_next, M_next)


def _decode_template(q: Tensor, v: Tensor, wide: torch.dtype, eta: float, muon: Muon) -> library.MemoryArguments:
    """What stays the same from step to step; it keeps alive what it points to, and `muon`, whose id is its name."""
    gamma, offsets = torch.full((1, 1, 1), float(muon.gamma), dtype=wide), torch.arange(q.shape[0] + 1)
    write = library.write_numbers(muon)
    template = _arguments([q, q, v, gamma, gamma, gamma], offsets, float(eta), library.has_momentum(muon), write)
    template.kept = (gamma, offsets, muon)
    return template


def _strides(gamma: Tensor) -> tuple[int, int]:
    """gamma `[B, L, H]` with ones: elements from one step, and from one head, to the next."""
    H = gamma.shape[2]
    return (H if gamma.shape[0] * gamma.shape[1] > 1 else 0), int(H > 1)


def _arguments(
    inputs: list[Tensor], offsets: Tensor, eta: float, momentum: bool, write: list[float]
) -> library.MemoryArguments:
    q, _, v, *_, gamma = inputs
    H, d, m = *v.shape[2:], q.shape[3]
    a = library.MemoryArguments(
        library.INPUT_TYPES[v.dtype], torch.get_num_threads(), offsets.numel() - 1, H, d, m, momentum, *_strides(gamma)
    )
    a.eta, a.write, a.offsets = eta, library.make_write(write), offsets.data_ptr()
    a.q, a.k, a.v, a.log_alpha, a.beta, a.gamma = (x.data_ptr() for x in inputs)
    return a


def _shapes(q: Tensor, v: Tensor, offsets: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a state, and of the saved ones."""
    (B, L, H, d), m, N = v.shape, q.shape[3], offsets.numel() - 1
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    rows = library.padded(d, dtype) * library.padded(m, dtype)
    return (N, H, d, m), (library.saved_segments(B * L, N), H, rows)


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
    q, _, v, _, beta, _ = inputs
    state, saved = _shapes(q, v, offsets)
    y, S, M = v.new_empty(v.shape), beta.new_empty(state), beta.new_empty(state)
    S_saved, M_saved = beta.new_empty(saved if save else 0), beta.new_empty(saved if save and momentum else 0)
    a = _arguments(inputs, offsets, eta, momentum, write)
    a.S0, a.M0, a.y, a.S, a.M = (library.address(x) for x in (S0, M0, y, S, M))
    a.S_saved, a.M_saved = library.address(S_saved), library.address(M_saved)
    library.call("memory", "forward" if save or v.shape[1] != 1 else "step", a)
    return y, S, M, S_saved, M_saved


@torch.library.custom_op("muonssm::memory_native", mutates_args=())
def memory_native(
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
    return _forward(inputs, S0, M0, offsets, eta, momentum, write, save)


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
    out = _gradients(grads, inputs, dgamma)
    dy, dS, dM = (x.contiguous() for x in grads)
    a = _arguments(inputs, offsets, eta, momentum, write)
    a.S_saved, a.M_saved = (library.address(x) for x in saved)
    a.dy, a.dS, a.dM = dy.data_ptr(), dS.data_ptr(), dM.data_ptr()
    a.dq, a.dk, a.dv, a.dlog_alpha, a.dbeta, a.dgamma, a.dS0, a.dM0 = (library.address(x) for x in out)
    library.call("memory", "backward", a)
    return out


@_memory_native_backward.register_fake
def _(grads, inputs, saved, offsets, eta, momentum, write, dgamma):  # type: ignore[no-untyped-def]
    return _gradients(grads, inputs, dgamma)


def _gradients(grads: list[Tensor], inputs: list[Tensor], dgamma: bool) -> list[Tensor]:
    """Empty tensors for the gradients."""
    *first, beta, _ = inputs
    by_gamma = beta.new_empty(beta.shape if dgamma else 0)
    return [*(x.new_empty(x.shape) for x in (*first, beta)), by_gamma, *(x.new_empty(x.shape) for x in grads[1:])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, S0, _, offsets, eta, momentum, write, _ = inputs
    ctx.save_for_backward(*tensors, offsets, *output[3:])
    ctx.settings, ctx.stateless = (eta, momentum, write), S0 is None
    ctx.set_materialize_grads(False)  # the saved states are large, and nothing differentiates them


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Any, ...]:
    *inputs, offsets, S_saved, M_saved = ctx.saved_tensors
    q, _, v, _, beta, gamma = inputs
    state, _ = _shapes(q, v, offsets)
    grads = library.materialize(given[:3], (v, beta, beta), (v.shape, state, state))
    dgamma = ctx.needs_input_grad[0][5]
    *first, by_gamma, dS0, dM0 = _memory_native_backward(
        grads, inputs, [S_saved, M_saved], offsets, *ctx.settings, dgamma
    )
    by_gamma = by_gamma.sum_to_size(gamma.shape) if dgamma else None
    states = (None, None) if ctx.stateless else (dS0, dM0)
    return [*first, by_gamma], *states, None, None, None, None, None


memory_native.register_autograd(_backward, setup_context=_save)
