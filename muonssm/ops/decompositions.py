"""The C++ kernels' operators in torch's own operations, which torch's ONNX exporter puts in their place.

The recurrences are loops over time steps, so the exported length is fixed, and the program grows with it: export small
models, or short pieces that are continued with a cache.

steps     per-step inputs of `reference.run`, `[B, L, ...]`
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
from .memory import reference as memory_reference
from .memory.types import MemoryInputs
from .muon import Muon, normalization_of
from .selective import _steps as selective_steps
from .selective import reference as selective_reference

Run = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


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
    y, S, M = _run(memory_reference.run, steps, S0, M0, offsets, shape)
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

    def run(steps: Any, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return selective_reference.run(steps, A, S, M)

    y, S, M = _run(run, steps, S0, M0, offsets, (offsets.shape[0] - 1, x.shape[2], B.shape[2]))
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


def _run(
    run: Run, steps: Any, S: Tensor | None, M: Tensor | None, offsets: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a batch, or packed sequences step by step: each step reads and writes the state of its sequence."""
    S, M = (steps.u.new_zeros(shape) if state is None else state for state in (S, M))
    if shape[0] == steps.u.shape[0]:
        return run(steps, S, M)
    outputs = []
    for t in range(steps.u.shape[1]):
        one = type(steps)(*(x if x is None or x.shape[1] == 1 else x[:, t : t + 1] for x in steps))
        here = ((offsets[:-1] <= t) & (t < offsets[1:])).view(-1, *(1,) * (len(shape) - 1))
        y, S_next, M_next = run(one, *((state * here).sum(0, keepdim=True) for state in (S, M)))
        S, M = torch.where(here, S_next, S), torch.where(here, M_next, M)
        outputs.append(y)
    return torch.cat(outputs, dim=1), S, M


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
