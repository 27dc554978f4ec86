"""`muon_selective_scan`: the diagonal memory with one gate per channel and state (Mamba, LongHorn as released).

x, dt, y   [B, L, D]   inputs, step sizes and outputs of D channels
A          [D, N]      decay rates of N states per channel
B, C       [B, L, N]   input and output vectors: the key and the query of the step
S, M       [B, D, N]   memory and momentum, float32 or float64
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import split, validate
from ..dispatch import Implementation, Problem, choose, may_take_triton
from ..dtypes import compute_dtype, full_precision, gamma_tensor, widen
from ..muon import Muon
from ..newton_schulz import write_scale
from ..padding import run_sequences
from ..state import MemoryState
from ..tracing import is_transformed
from ..triton.kinds import selective_kind
from .types import SelectiveSteps

_LAYOUTS = {"x": "B L D", "dt": "B L D", "A": "D N", "B": "B L N", "C": "B L N"}
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # x, dt, B, C


def muon_selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    *,
    muon: Muon = Muon(),  # noqa: B008  a frozen value
    state: MemoryState | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """Run the MuonSSM recurrence with a diagonal transition: Mamba's selective scan with momentum.

        M_t = gamma_t M_{t-1} + NS(tau (dt_t x_t) B_t^T)
        S_t = a_t * S_{t-1} + M_t,     a_t = exp(dt_t A), or 1 - dt_t B_t^2 if A is None
        y_t = S_t C_t

    The write has rank one over the whole channel x state matrix, so its norm is taken over all channels of a step.

    Args:
        x: inputs `[B, L, D]`.
        dt: step sizes `[B, L, D]`, >= 0, after the softplus; LongHorn's epsilon if A is None.
        A: `[D, N]`, <= 0; None for the diagonal gate of LongHorn's released model.
        B, C: input and output vectors of the state, `[B, L, N]`.
        muon, state, cu_seqlens, impl: as for `muon_memory`; a gamma tensor is `[1]` or `[B, L, 1]`.

    Returns:
        y `[B, L, D]` in x's dtype (without Mamba's skip D x), and the `MemoryState` `[B, D, N]` after the last step
        (`[sequences, D, N]` when packed), in float32, or float64 if any input is.
    """
    context = split.current()
    if context is not None:
        _validate((x, dt, B, C), A, muon, state, cu_seqlens, is_piece=True)
        return context.selective(x, dt, A, B, C, muon=muon, state=state, cu_seqlens=cu_seqlens, impl=impl)
    checked = _validate((x, dt, B, C), A, muon, state, cu_seqlens)
    implementation = choose(impl, checked.problem)
    return _run(implementation, (x, dt, B, C), A, muon, state, checked)


class _Checked(NamedTuple):
    """What validation found out about a call."""

    problem: Problem
    state_shape: tuple[int, ...]
    packed: validate.Packed | None


def _validate(
    inputs: Inputs,
    A: Tensor | None,
    muon: Muon,
    state: MemoryState | None,
    cu_seqlens: Tensor | None,
    is_piece: bool = False,
) -> _Checked:
    """Check all arguments but `impl`. With `is_piece`, cu_seqlens has the bounds of a longer row."""
    x, dt, B, C = inputs
    given = {"x": x, "dt": dt, "B": B, "C": C} if A is None else {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    size = validate.check_tensors(given, _LAYOUTS)
    batch, L, D, N = (size[letter] for letter in "BLDN")
    validate.check_lower_bound("dt", dt, 0.0, "a step size")
    if A is not None:
        validate.check_upper_bound("A", A, 0.0, "so that exp(dt A) is a gate in [0, 1]")
    validate.check_muon(muon, (batch, L, 1), x.device)
    check_rule(muon)
    packed = validate.check_cu_seqlens(cu_seqlens, batch, L, is_piece)
    state_shape = (batch if packed is None else packed.sequences, D, N)
    validate.check_state(state, state_shape, x.device)
    dtype = compute_dtype(*given.values(), *(state or ()))
    problem = Problem(x.device, dtype, validate.longest_sequence(packed, L), N, is_transformed())
    if may_take_triton(x.device):
        problem = problem._replace(kind=selective_kind(inputs, A is None, muon))
    return _Checked(problem, state_shape, packed)


def check_rule(muon: Muon) -> None:
    """Check that the selective scan has this rule. Mixers call it when they are built."""
    if muon.beta_position != "inside":
        raise ValueError(
            f"muon.beta_position must be 'inside' in the selective scan, whose write gate dt is a part of the value, "
            f"got {muon.beta_position!r}"
        )
    if muon.orthogonalize is not None:
        raise ValueError(f"muon.orthogonalize must be None in the selective scan, got {muon.orthogonalize!r}")


def _run(
    implementation: Implementation,
    inputs: Inputs,
    A: Tensor | None,
    muon: Muon,
    state: MemoryState | None,
    checked: _Checked,
) -> tuple[Tensor, MemoryState]:
    """Run the implementation: on the inputs as they are, or on steps in one dtype with the write's scale applied."""
    module, x, dtype, packed = implementation.load().selective, inputs[0], checked.problem.dtype, checked.packed
    with full_precision(x.device):
        if implementation.raw_inputs:
            bounds = None if packed is None else packed.cu_seqlens
            y, S, M = module.run_raw(inputs, A, muon, state, bounds, dtype)
            return y, MemoryState(S, M)
        steps = _steps(inputs, muon, dtype)
        wide_A = None if A is None else widen(A, dtype)

        def run(steps: SelectiveSteps, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return module.run(steps, wide_A, S, M)

        S, M = (widen(t, dtype) for t in state) if state else steps.u.new_zeros(2, *checked.state_shape)
        y, S, M = run_sequences(run, module.chunk_length, steps, S, M, validate.lengths_of(packed, x.shape[1]))
    return y.to(x.dtype), MemoryState(S, M)


def _steps(inputs: Inputs, muon: Muon, dtype: torch.dtype) -> SelectiveSteps:
    """Cast the inputs to `dtype` and turn dt x into writes u."""
    x, dt, B, C = (widen(t, dtype) for t in inputs)
    write = dt * x
    return SelectiveSteps(
        u=write_scale(B, write, x.new_ones(()), muon)[..., None] * write,
        dt=dt,
        B=B,
        C=C,
        gamma=gamma_tensor(muon.gamma, dtype, x.device),
        mu=x.new_ones(1, 1, 1),
    )
