"""The C++ kernels' operators in torch's own operations, which torch's ONNX exporter puts in their place.

The recurrences become torch's `scan`, one loop in the program (ONNX: the operator Scan): its size does not depend on
the length, and the length can stay open. Where torch cannot export a scan, the program has a copy of the step per time
step, so that the length is fixed.

steps     per-step inputs of the recurrence, `[B, L, ...]`; in the functions of one step `[B, ...]`
S, M      `[N, ...]`, one state per sequence
offsets   `[N + 1]`, bounds of the sequences in the flattened batch
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .causal_conv import shifts
from .memory import _steps as memory_steps
from .memory.types import MemoryInputs, MemorySteps
from .muon import Muon, normalization_of
from .selective import _steps as selective_steps
from .selective.types import SelectiveSteps, retention

Step = Callable[..., tuple[Tensor, Tensor, Tensor]]  # y, S and M, of the inputs of one step, S, M and constants


def offer(exporting: bool) -> None:
    """Add the functions below to the table that torch's ONNX exporter reads, or take them out of it."""
    from torch._decomp import decomposition_table

    if exporting:
        decomposition_table.update(_decompositions())
    else:
        for operator in _decompositions():
            decomposition_table.pop(operator, None)


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    from . import checked_bounds
    from .causal_conv import native as convolution
    from .memory import native as memory
    from .selective import native as selective

    functions: dict[str, tuple[Any, Callable[..., Any]]] = {
        "memory_native": (memory.fake, _memory),
        "selective_native": (selective.fake, _selective),
        "convolution_native": (convolution.fake, _convolution),
        "checked_bounds": (checked_bounds.fake, _bounds),
    }
    return {
        getattr(torch.ops.muonssm, name).default: _when_recorded(fake, function)
        for name, (fake, function) in functions.items()
    }


def _when_recorded(fake: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Call `function` where torch records its operations, and `fake` where torch only asks for shapes."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    @functools.wraps(function)
    def decomposition(*arguments: Any) -> Any:
        return fake(*arguments) if get_proxy_mode() is None else function(*arguments)

    return decomposition


def _memory(
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
) -> tuple[Tensor, ...]:
    q, k, v, log_alpha, beta, gamma, *inject = inputs
    muon = _muon(write, "momentum" if residual else "memory")
    given = MemoryInputs(q, k, v, log_alpha, beta, inject[0] if inject else None)
    steps = memory_steps(given, eta, muon, beta.dtype)._replace(gamma=gamma)
    shape = (offsets.shape[0] - 1, v.shape[2], v.shape[3], q.shape[3])
    y, S, M = _run(_memory_step, steps, S0, M0, offsets, shape)
    return y.to(v.dtype), S, M, beta.new_zeros(0), beta.new_zeros(0)


def _selective(
    inputs: list[Tensor],
    A: Tensor | None,
    S0: Tensor | None,
    M0: Tensor | None,
    offsets: Tensor,
    momentum: bool,
    write: list[float],
    save: bool,
    step: bool,
) -> tuple[Tensor, ...]:
    x, dt, B, C, gamma = inputs
    steps = selective_steps((x, dt, B, C), _muon(write, "memory"), gamma.dtype)._replace(gamma=gamma)

    shape = (offsets.shape[0] - 1, x.shape[2], B.shape[2])
    y, S, M = _run(_selective_step, steps, S0, M0, offsets, shape, () if A is None else (A,))
    return y.to(x.dtype), S, M, gamma.new_zeros(0), gamma.new_zeros(0)


def _muon(write: list[float], correction: str) -> Muon:
    """Rebuild the rule from `launch.write_numbers`; gamma is an input of its own."""
    steps, beta_outside, tau_inside, tau_outside, delta = write
    return Muon(
        gamma=0.0,
        tau=tau_inside * tau_outside,  # one of them is 1
        delta=delta,
        tau_position="inside" if tau_outside == 1 else "outside",
        correction=correction,
        beta_position="outside" if beta_outside else "inside",
        **normalization_of(int(steps)),
    )


# The steps of `memory.reference` and `selective.reference` in broadcasts alone: a size that is left open must not be a
# number in the graph of a loop.


def _memory_step(x: MemorySteps, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    k, u = x.k[..., None, :], x.u[..., None]
    alpha, gamma, mu = (gate[..., None, None] for gate in (x.log_alpha.exp(), x.gamma, x.mu))
    if x.residual is not None:
        u = u - alpha * x.residual[..., None, None] * (S * k).sum(-1, keepdim=True)
    M = gamma * M + u * k
    if x.erase is not None:
        S = S - x.erase[..., None, None] * (S * k).sum(-1, keepdim=True) * k
    S = alpha * S + mu * M
    return (S * x.q[..., None, :]).sum(-1), S, M


def _selective_step(x: SelectiveSteps, S: Tensor, M: Tensor, A: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    M = x.gamma[..., None] * M + x.u[..., None] * x.B[..., None, :]
    S = retention(x.dt, A, x.B) * S + x.mu[..., None] * M
    return (S * x.C[..., None, :]).sum(-1), S, M


def _run(
    step: Step,
    steps: Any,
    S: Tensor | None,
    M: Tensor | None,
    offsets: Tensor,
    shape: tuple[int, ...],
    constants: tuple[Tensor, ...] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a batch, or packed sequences: each step reads and writes the state of its sequence."""
    S, M = (steps.u.new_zeros(shape) if state is None else state for state in (S, M))
    L, packed = steps.u.shape[1], shape[0] != steps.u.shape[0]
    given = {name: x for name, x in steps._asdict().items() if x is not None}
    none = dict.fromkeys(steps._fields)

    def one_step(S: Tensor, M: Tensor, here: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = type(steps)(**none | dict(zip(given, tensors[: len(given)], strict=True)))
        constants = tensors[len(given) :]
        if not packed:
            y, S, M = step(one, S, M, *constants)
            return S, M, y
        here = here.view(-1, *(1,) * (S.ndim - 1))
        own = (torch.where(here, state, torch.zeros_like(state)).sum(0, keepdim=True) for state in (S, M))
        y, S_next, M_next = step(one, *own, *constants)
        return torch.where(here, S_next, S), torch.where(here, M_next, M), y

    t = torch.arange(L, device=offsets.device)[:, None]
    here = (offsets[:-1] <= t) & (t < offsets[1:])  # [L, N], which sequence a step belongs to
    along = [x.expand(x.shape[0], L, *x.shape[2:]).transpose(0, 1).contiguous() for x in given.values()]
    if L == 1:
        S, M, y = one_step(S, M, here[0], *(x[0] for x in along), *constants)
        return y[:, None], S, M
    S, M, y = _over_time(one_step, S, M, (here, *along), constants)
    return y.transpose(0, 1), S, M


def _over_time(
    step: Callable[..., Any], S: Tensor, M: Tensor, inputs: tuple[Tensor, ...], constants: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the last S and M and all y `[L, ...]` of S, M, y = step(S, M, *inputs_t, *constants); inputs `[L, ...]`.

    The step must not refer to other tensors: it becomes a graph of its own.
    """
    if _exports_scan():
        from torch._higher_order_ops.scan import scan_op

        # Without gradients: torch would save sizes that are left open for a backward pass, and fail.
        start, along, kept = ([x.detach() for x in given] for given in ((S, M), inputs, constants))
        return scan_op(step, [x.clone() for x in start], along, tuple(kept))
    outputs = []
    for t in range(inputs[0].shape[0]):
        S, M, y = step(S, M, *(x[t] for x in inputs), *constants)
        outputs.append(y)
    return S, M, torch.stack(outputs)


@functools.cache
def _exports_scan() -> bool:
    """Whether torch's ONNX exporter translates `scan`; older ones do not."""
    try:
        from torch.onnx._internal.exporter._torchlib.ops import hop
    except ImportError:
        return False
    return hasattr(hop, "higher_order_scan")


def _convolution(tensors: list[Tensor], offsets: Tensor, silu: bool) -> Tensor:
    x, weight, bias, tail = tensors
    wide, tail, activation = x.to(weight.dtype), tail.to(weight.dtype), "silu" if silu else None
    if tail.shape[0] == x.shape[0]:
        return shifts.convolve(wide, weight[:, None], bias, tail, None, activation).to(x.dtype)
    before = weight.shape[1] - 1
    step = torch.arange(x.shape[1], device=x.device)
    sequence = (offsets[1:] <= step[:, None]).sum(1)
    position = step - offsets[sequence]
    y = bias
    for j in range(before + 1):  # the input j - before steps ago, from the tail if the sequence started later
        back = before - j
        earlier = tail[sequence, (position + j).clamp(max=max(before - 1, 0))] if back else wide[0]
        y = y + weight[:, j] * torch.where((position >= back)[:, None], wide[0, (step - back).clamp(min=0)], earlier)
    return (torch.nn.functional.silu(y) if silu else y)[None].to(x.dtype)


def _bounds(cu_seqlens: Tensor, length: int) -> Tensor:
    return cu_seqlens.clone()
