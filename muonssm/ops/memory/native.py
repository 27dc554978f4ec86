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
    S, M = (x.to(dtype).contiguous() for x in state) if state else (None, None)
    settings = (float(eta), library.has_momentum(muon), library.write_numbers(muon))
    tensors = (*vectors, log_alpha, beta, gamma, S, M)
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    offsets = library.sequence_offsets(v.shape[0], v.shape[1], cu_seqlens)
    if recorded or not library.is_plain(v):
        y, S, M, *_ = memory_native(*tensors, offsets, *settings, recorded)
    else:
        y, S, M, *_ = _forward(*tensors, offsets, *settings, False)
    return y.to(v.dtype), S, M


def _strides(gamma: Tensor) -> tuple[int, int]:
    """gamma `[B, L, H]` with ones: elements from one step, and from one head, to the next."""
    H = gamma.shape[2]
    return (H if gamma.shape[0] * gamma.shape[1] > 1 else 0), int(H > 1)


def _arguments(
    tensors: tuple[Tensor | None, ...], offsets: Tensor, eta: float, momentum: bool, write: list[float]
) -> library.MemoryArguments:
    q, _, v, _, _, gamma, *_ = tensors
    assert q is not None and v is not None and gamma is not None
    H, d, m = *v.shape[2:], q.shape[3]
    a = library.MemoryArguments(
        library.INPUT_TYPES[v.dtype], torch.get_num_threads(), offsets.numel() - 1, H, d, m, momentum, *_strides(gamma)
    )
    a.eta, a.write, a.offsets = eta, library.make_write(write), offsets.data_ptr()
    a.q, a.k, a.v, a.log_alpha, a.beta, a.gamma, a.S0, a.M0 = (library.address(x) for x in tensors)
    return a


def _shapes(q: Tensor, v: Tensor, offsets: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of a state, and of the saved ones."""
    (B, L, H, d), m, N = v.shape, q.shape[3], offsets.numel() - 1
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    rows = library.padded(d, dtype) * library.padded(m, dtype)
    return (N, H, d, m), (library.saved_segments(B * L, N), H, rows)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, gamma: Tensor, S0: Tensor | None, M0: Tensor | None,
    offsets: Tensor, eta: float, momentum: bool, write: list[float], save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    state, saved = _shapes(q, v, offsets)
    y, S, M = torch.empty_like(v), beta.new_empty(state), beta.new_empty(state)
    a = _arguments((q, k, v, log_alpha, beta, gamma, S0, M0), offsets, eta, momentum, write)
    a.y, a.S, a.M = y.data_ptr(), S.data_ptr(), M.data_ptr()
    S_saved, M_saved = beta.new_empty(saved if save else 0), beta.new_empty(saved if save and momentum else 0)
    if save:
        a.S_saved, a.M_saved = S_saved.data_ptr(), M_saved.data_ptr() if momentum else None
    library.call("memory", "forward" if save or v.shape[1] != 1 else "step", a)
    return y, S, M, S_saved, M_saved


@torch.library.custom_op("muonssm::memory_native", mutates_args=())
def memory_native(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor, gamma: Tensor, S0: Tensor | None, M0: Tensor | None,
    offsets: Tensor, eta: float, momentum: bool, write: list[float], save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, S, M, and with `save` what the backward pass needs: the states before every 64 steps."""
    return _forward(q, k, v, log_alpha, beta, gamma, S0, M0, offsets, eta, momentum, write, save)


@memory_native.register_fake
def _(q, k, v, log_alpha, beta, gamma, S0, M0, offsets, eta, momentum, write, save):  # type: ignore[no-untyped-def]
    state, saved = _shapes(q, v, offsets)
    shapes = (state, state, saved if save else (0,), saved if save and momentum else (0,))
    return torch.empty_like(v), *(beta.new_empty(shape) for shape in shapes)


@torch.library.custom_op("muonssm::memory_native_backward", mutates_args=())
def _memory_native_backward(
    grads: list[Tensor], inputs: list[Tensor], S_saved: Tensor, M_saved: Tensor, offsets: Tensor,
    eta: float, momentum: bool, write: list[float], dgamma: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, log_alpha, beta, gamma (`[B, L, H]`, empty unless asked for), S0, M0."""
    q, k, v, log_alpha, beta, gamma = inputs
    dy, dS, dM = (x.contiguous() for x in grads)
    out = [torch.empty_like(x) for x in (q, k, v, log_alpha, beta)]
    out += [beta.new_empty(beta.shape if dgamma else 0), torch.empty_like(dS), torch.empty_like(dM)]
    a = _arguments((q, k, v, log_alpha, beta, gamma, None, None), offsets, eta, momentum, write)
    a.S_saved, a.M_saved = S_saved.data_ptr(), M_saved.data_ptr() if momentum else None
    a.dy, a.dS, a.dM = dy.data_ptr(), dS.data_ptr(), dM.data_ptr()
    a.dq, a.dk, a.dv, a.dlog_alpha, a.dbeta, a.dgamma, a.dS0, a.dM0 = (x.data_ptr() for x in out)
    if not dgamma:
        a.dgamma = None
    library.call("memory", "backward", a)
    return tuple(out)  # type: ignore[return-value]


@_memory_native_backward.register_fake
def _(grads, inputs, S_saved, M_saved, offsets, eta, momentum, write, dgamma):  # type: ignore[no-untyped-def]
    *_, beta, _ = inputs
    sizes = [*inputs[:5], beta if dgamma else beta.new_empty(0), grads[1], grads[2]]
    return tuple(x.new_empty(x.shape) for x in sizes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, S0, _, offsets, eta, momentum, write, _ = inputs
    ctx.save_for_backward(*tensors, offsets, *output[3:])
    ctx.settings, ctx.stateless = (eta, momentum, write), S0 is None
    ctx.set_materialize_grads(False)  # the saved states are large, and nothing differentiates them


def _backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    *inputs, offsets, S_saved, M_saved = ctx.saved_tensors
    q, _, v, _, beta, gamma = inputs
    state, _ = _shapes(q, v, offsets)
    dy, dS, dM = library.materialize(given[:3], (v, beta, beta), (v.shape, state, state))
    dgamma = ctx.needs_input_grad[5]
    results = _memory_native_backward([dy, dS, dM], inputs, S_saved, M_saved, offsets, *ctx.settings, dgamma)
    *first, by_gamma, dS0, dM0 = results
    by_gamma = by_gamma.sum_to_size(gamma.shape) if dgamma else None
    states = (None, None) if ctx.stateless else (dS0, dM0)
    return *first, by_gamma, *states, None, None, None, None, None


memory_native.register_autograd(_backward, setup_context=_save)
