"""`muon_memory`: the matrix memory with scalar gates (Mamba-2, DeltaNet, Gated DeltaNet, LongHorn).

q, k              [B, L, H, m]   queries and keys
v, y              [B, L, H, d]   values and outputs
log_alpha, beta   [B, L, H]      gates
S, M              [B, H, d, m]   memory and momentum, float32 or float64
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import validate
from ..dispatch import Implementation, Problem, choose
from ..dtypes import compute_dtype, full_precision, gamma_tensor, widen
from ..muon import Muon
from ..newton_schulz import write_scale
from ..padding import run_sequences
from ..state import MemoryState
from ..tracing import is_transformed
from .types import MemorySteps

_LAYOUTS = {"q": "B L H m", "k": "B L H m", "v": "B L H d", "log_alpha": "B L H", "beta": "B L H"}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, log_alpha, beta


def muon_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    eta: float = 1.0,
    muon: Muon = Muon(),  # noqa: B008  a frozen value
    state: MemoryState | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """Run the MuonSSM recurrence over a sequence (eqs. 3 and 4).

        M_t = gamma_t M_{t-1} + NS(tau beta_t v_t k_t^T)
        S_t = S_{t-1} alpha_t (I - beta_t eta k_t k_t^T) + M_t
        y_t = S_t q_t

    Args:
        q, k: queries and keys `[B, L, H, m]`. They are used as they are; layers normalize and scale them.
        v: values `[B, L, H, d]`.
        log_alpha: log of the retention gate `[B, L, H]`, <= 0.
        beta: write gate `[B, L, H]`.
        eta: recall correction: 0 (Mamba) or 1 (DeltaNet, Gated DeltaNet, LongHorn).
        muon: momentum and normalization; `Muon.off()` is the plain backbone.
        state: the state that an earlier call returned, to continue its sequences; None starts from zero.
        cu_seqlens: int tensor `[N + 1]`, bounds of N sequences packed into a batch of one.
        impl: `"auto"`, or a name in `muonssm.ops.IMPLEMENTATIONS`, which runs or raises an error that says why.

    Returns:
        y `[B, L, H, d]` in v's dtype, and the `MemoryState` `[B, H, d, m]` after the last step (`[N, H, d, m]` when
        packed), in float32, or float64 if any input is.

    Departs from the paper: the write is evaluated in closed form (see `newton_schulz.write_scale`); gamma can vary
    over heads and steps, and can be 0.
    """
    inputs = (q, k, v, log_alpha, beta)
    if state is not None and not torch.compiler.is_compiling():  # a decoding step has a shortcut to its kernel
        decoded = _decode()(inputs, eta, muon, state, cu_seqlens, impl)
        if decoded is not None:
            return decoded
    checked = _validate(inputs, eta, muon, state, cu_seqlens)
    implementation = choose(impl, checked.problem)
    return _run(implementation, inputs, eta, muon, state, cu_seqlens, checked)


class _Checked(NamedTuple):
    """What validation found out about a call."""

    problem: Problem
    state_shape: tuple[int, ...]
    lengths: list[int] | None  # of packed sequences


def _validate(inputs: Inputs, eta: float, muon: Muon, state: MemoryState | None, cu_seqlens: Tensor | None) -> _Checked:
    """Check all arguments but `impl`."""
    size = validate.check_tensors(dict(zip(_LAYOUTS, inputs, strict=True)), _LAYOUTS)
    B, L, H, m, d = (size[letter] for letter in "BLHmd")
    q, log_alpha = inputs[0], inputs[3]
    validate.check_upper_bound("log_alpha", log_alpha, 0.0, "the log of a gate in [0, 1]")
    validate.check_muon(muon, (B, L, H), q.device)
    lengths = validate.check_cu_seqlens(cu_seqlens, B, L)
    state_shape = (B if lengths is None else len(lengths), H, d, m)
    validate.check_state(state, state_shape, q.device)
    validate.check_eta(eta)
    dtype = compute_dtype(*inputs, *(state or ()))
    longest = L if lengths is None else max(lengths)
    return _Checked(Problem(q.device, dtype, longest, m, is_transformed()), state_shape, lengths)


def _run(
    implementation: Implementation,
    inputs: Inputs,
    eta: float,
    muon: Muon,
    state: MemoryState | None,
    cu_seqlens: Tensor | None,
    checked: _Checked,
) -> tuple[Tensor, MemoryState]:
    """Run the implementation: on the inputs as they are, or on steps in one dtype with the write's scale applied."""
    module, v, dtype = implementation.load().memory, inputs[2], checked.problem.dtype
    with full_precision(v.device):
        if implementation.raw_inputs:
            y, S, M = module.run_raw(inputs, eta, muon, state, cu_seqlens, dtype)
            return y, MemoryState(S, M)
        steps = _steps(inputs, eta, muon, dtype)
        S, M = (widen(x, dtype) for x in state) if state else steps.u.new_zeros(2, *checked.state_shape)
        y, S, M = run_sequences(module.run, module.chunk_length, steps, S, M, checked.lengths)
    return y.to(v.dtype), MemoryState(S, M)


def _steps(inputs: Inputs, eta: float, muon: Muon, dtype: torch.dtype) -> MemorySteps:
    """Cast the inputs to `dtype` and turn values into writes u."""
    q, k, v, log_alpha, beta = (widen(x, dtype) for x in inputs)
    return MemorySteps(
        q=q,
        k=k,
        u=write_scale(k, v, beta, muon)[..., None] * v,
        log_alpha=log_alpha,
        erase=eta * beta if eta else None,
        gamma=gamma_tensor(muon.gamma, dtype, q.device),
        mu=q.new_ones(1, 1, 1),
    )


@functools.cache
def _decode() -> Callable[..., tuple[Tensor, MemoryState] | None]:
    """Import `native.decode` on first use: it needs more of torch than importing this package should."""
    from .native import decode

    return decode
