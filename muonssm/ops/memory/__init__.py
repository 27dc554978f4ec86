"""`muon_memory`: the matrix memory with scalar gates (Mamba-2, DeltaNet, Gated DeltaNet, LongHorn).

q, k              [B, L, H, m]   queries and keys
v, y              [B, L, H, d]   values and outputs
log_alpha, beta   [B, L, H]      gates; inject [B, L, H] is optional
S, M              [B, H, d, m]   memory and momentum, float32 or float64
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from ..triton.kinds import memory_kind
from . import orthogonal
from .types import MemoryInputs, MemorySteps

_LAYOUTS = {"q": "B L H m", "k": "B L H m", "v": "B L H d", "log_alpha": "B L H", "beta": "B L H", "inject": "B L H"}


def muon_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_alpha: Tensor,
    beta: Tensor,
    *,
    eta: float = 1.0,
    muon: Muon = Muon(),  # noqa: B008  a frozen value
    inject: Tensor | None = None,
    state: MemoryState | None = None,
    cu_seqlens: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, MemoryState]:
    """Run the MuonSSM recurrence over a sequence (eqs. 3 and 4).

        M_t = gamma_t M_{t-1} + NS(tau beta_t v_t k_t^T)
        S_t = S_{t-1} alpha_t (I - beta_t eta k_t k_t^T) + mu_t M_t         mu_t = 1 without `inject`
        y_t = S_t q_t

    `muon` also selects the other rules of the family, see `Muon`.

    Args:
        q, k: queries and keys `[B, L, H, m]`. They are used as they are; layers normalize and scale them.
        v: values `[B, L, H, d]`.
        log_alpha: log of the retention gate `[B, L, H]`, <= 0.
        beta: write gate `[B, L, H]`.
        eta: recall correction: 0 (Mamba) or 1 (DeltaNet, Gated DeltaNet, LongHorn).
        muon: the memory rule; `Muon.off()` is the plain backbone.
        inject: gate mu_t `[B, L, H]` on M_t where it enters S_t; None means 1.
        state: the state that an earlier call returned, to continue its sequences; None starts from zero.
        cu_seqlens: int tensor `[N + 1]`, bounds of N sequences packed into a batch of one.
        impl: `"auto"`, or a name in `muonssm.ops.IMPLEMENTATIONS`, which runs or raises an error that says why.

    Returns:
        y `[B, L, H, d]` in v's dtype, and the `MemoryState` `[B, H, d, m]` after the last step (`[N, H, d, m]` when
        packed), in float32, or float64 if any input is.

    Departs from the paper: the write is evaluated in closed form (see `newton_schulz.write_scale`); gamma can vary
    over heads and steps, and can be 0; `inject`, and the rules that `Muon` names.
    """
    inputs = MemoryInputs(q, k, v, log_alpha, beta, inject)
    context = split.current()
    if context is not None:
        _validate(inputs, eta, muon, state, cu_seqlens, is_piece=True)
        settings = {"eta": eta, "muon": muon, "inject": inject, "impl": impl}
        return context.memory(q, k, v, log_alpha, beta, state=state, cu_seqlens=cu_seqlens, **settings)
    if state is not None and not torch.compiler.is_compiling():  # a decoding step has a shortcut to its kernel
        decoded = _decode()(inputs, eta, muon, state, cu_seqlens, impl)
        if decoded is not None:
            return decoded
    checked = _validate(inputs, eta, muon, state, cu_seqlens)
    implementation = choose(impl, checked.problem)
    return _run(implementation, inputs, eta, muon, state, checked)


class _Checked(NamedTuple):
    """What validation found out about a call."""

    problem: Problem
    state_shape: tuple[int, ...]
    packed: validate.Packed | None


def _validate(
    inputs: MemoryInputs,
    eta: float,
    muon: Muon,
    state: MemoryState | None,
    cu_seqlens: Tensor | None,
    is_piece: bool = False,
) -> _Checked:
    """Check all arguments but `impl`. With `is_piece`, cu_seqlens has the bounds of a longer row."""
    given: dict[str, Tensor] = inputs._asdict()
    if inputs.inject is None:
        del given["inject"]
    size = validate.check_tensors(given, _LAYOUTS)
    B, L, H, m, d = (size[letter] for letter in "BLHmd")
    q = inputs.q
    validate.check_upper_bound("log_alpha", inputs.log_alpha, 0.0, "the log of a gate in [0, 1]")
    validate.check_muon(muon, (B, L, H), q.device)
    packed = validate.check_cu_seqlens(cu_seqlens, B, L, is_piece)
    state_shape = (B if packed is None else packed.sequences, H, d, m)
    validate.check_state(state, state_shape, q.device)
    validate.check_eta(eta)
    dtype = compute_dtype(*given.values(), *(state or ()))
    longest = validate.longest_sequence(packed, L)
    problem = Problem(q.device, dtype, longest, m, is_transformed(), muon.orthogonalize is not None)
    if may_take_triton(q.device):
        problem = problem._replace(kind=memory_kind(inputs[:3], eta, muon, inputs.inject is not None))
    return _Checked(problem, state_shape, packed)


def _run(
    implementation: Implementation,
    inputs: MemoryInputs,
    eta: float,
    muon: Muon,
    state: MemoryState | None,
    checked: _Checked,
) -> tuple[Tensor, MemoryState]:
    """Run the implementation: on the inputs as they are, or on steps in one dtype with the write's scale applied."""
    module, v, dtype, packed = implementation.load().memory, inputs.v, checked.problem.dtype, checked.packed
    with full_precision(v.device):
        if implementation.raw_inputs:
            bounds = None if packed is None else packed.cu_seqlens
            y, S, M = module.run_raw(inputs, eta, muon, state, bounds, dtype)
            return y, MemoryState(S, M)
        steps = _steps(inputs, eta, muon, dtype)
        S, M = (widen(x, dtype) for x in state) if state else steps.u.new_zeros(2, *checked.state_shape)
        run, chunk_length = module.run, module.chunk_length
        if muon.orthogonalize is not None:
            run = functools.partial(orthogonal.run, module.run, muon.orthogonalize)
            chunk_length = orthogonal.chunk_length
        y, S, M = run_sequences(run, chunk_length, steps, S, M, validate.lengths_of(packed, v.shape[1]))
    return y.to(v.dtype), MemoryState(S, M)


def _steps(inputs: MemoryInputs, eta: float, muon: Muon, dtype: torch.dtype) -> MemorySteps:
    """Cast the inputs to `dtype` and turn values into writes u."""
    q, k, v, log_alpha, beta = (widen(x, dtype) for x in inputs[:5])
    correction = eta * beta if eta else None
    return MemorySteps(
        q=q,
        k=k,
        u=write_scale(k, v, beta, muon)[..., None] * v,
        log_alpha=log_alpha,
        erase=correction if muon.correction == "memory" else None,
        residual=correction if muon.correction == "momentum" else None,
        gamma=gamma_tensor(muon.gamma, dtype, q.device),
        mu=q.new_ones(1, 1, 1) if inputs.inject is None else widen(inputs.inject, dtype),
    )


@functools.cache
def _decode() -> Callable[..., tuple[Tensor, MemoryState] | None]:
    """Import `native.decode` on first use: it needs more of torch than importing this package should."""
    from .native import decode

    return decode
