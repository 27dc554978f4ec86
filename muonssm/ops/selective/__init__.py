"""`muon_selective_scan`: the diagonal memory with one gate per channel and state (Mamba, LongHorn as released)."""

from __future__ import annotations

from torch import Tensor

from .. import validate
from ..dispatch import Problem, choose
from ..dtypes import compute_dtype, full_precision, gamma_tensor, widen
from ..muon import Muon
from ..newton_schulz import write_scale
from ..padding import run_sequences
from ..state import MemoryState
from .types import SelectiveSteps

_LAYOUTS = {"x": "B L D", "dt": "B L D", "A": "D N", "B": "B L N", "C": "B L N"}


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
    """The MuonSSM recurrence with a diagonal transition: Mamba-1's selective scan with momentum.

        M_t = gamma_t M_{t-1} + NS(tau (dt_t x_t) B_t^T)
        S_t = a_t * S_{t-1} + M_t,     a_t = exp(dt_t A), or 1 - dt_t B_t^2 where A is None
        y_t = S_t C_t

    The write is rank one over the whole channel x state matrix, so its norm is taken over all channels of a step.

    Args:
        x: inputs `[B, L, D]`.
        dt: step sizes `[B, L, D]`, >= 0, after the softplus; LongHorn's epsilon where A is None.
        A: `[D, N]`, <= 0; None for the diagonal gate of LongHorn's released model.
        B, C: what writes and reads the state, `[B, L, N]`.
        muon, state, cu_seqlens, impl: as for `muon_memory`; a gamma tensor is `[1]` or `[B, L, 1]`.

    Returns:
        y `[B, L, D]` in x's dtype (without Mamba's skip D x), and the `MemoryState` `[B, D, N]` after the last step
        (`[N, D, N]` for N packed sequences), in float32, or float64 if any input is.
    """
    inputs = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    given = {name: tensor for name, tensor in inputs.items() if name != "A" or tensor is not None}
    size = validate.check_tensors(given, _LAYOUTS)  # type: ignore[arg-type]
    batch, L, D, N = (size[letter] for letter in "BLDN")
    validate.check_lower_bound("dt", dt, 0.0, "a step size")
    if A is not None:
        validate.check_upper_bound("A", A, 0.0, "so that exp(dt A) is a gate in [0, 1]")
    validate.check_muon(muon, (batch, L, 1), x.device)
    lengths = validate.check_cu_seqlens(cu_seqlens, batch, L)
    state_shape = (batch if lengths is None else len(lengths), D, N)
    validate.check_state(state, state_shape, x.device)

    dtype = compute_dtype(*given.values(), *(state or ()))  # type: ignore[arg-type]
    longest = L if lengths is None else max(lengths)
    problem = Problem(x.device, dtype, longest, N, validate.is_transformed())
    implementation = choose(impl, problem)
    module = implementation.load().selective

    with full_precision(x.device):
        if implementation.fused:
            y, S, M = module.run_fused((x, dt, B, C), A, muon, state, cu_seqlens, dtype)
            return y, MemoryState(S, M)
        wide_x, wide_dt, wide_B, wide_C = (widen(t, dtype) for t in (x, dt, B, C))
        write = wide_dt * wide_x
        steps = SelectiveSteps(
            u=write_scale(wide_B, write, wide_x.new_ones(()), muon)[..., None] * write,
            dt=wide_dt,
            B=wide_B,
            C=wide_C,
            gamma=gamma_tensor(muon.gamma, dtype, x.device),
            mu=wide_x.new_ones(1, 1, 1),
        )
        wide_A = None if A is None else widen(A, dtype)

        def run(steps: SelectiveSteps, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return module.run(steps, wide_A, S, M)

        S, M = (widen(t, dtype) for t in state) if state else wide_x.new_zeros(2, *state_shape)
        y, S, M = run_sequences(run, module.chunk_length, steps, S, M, lengths)
    return y.to(x.dtype), MemoryState(S, M)
