"""`muon_memory`: the matrix memory with scalar gates (Mamba-2, DeltaNet, Gated DeltaNet, LongHorn)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .. import validate
from ..dispatch import Problem, choose
from ..dtypes import compute_dtype, full_precision, gamma_tensor, widen
from ..muon import Muon
from ..newton_schulz import write_scale
from ..padding import run_sequences
from ..state import MemoryState
from .types import MemorySteps

_LAYOUTS = {"q": "B L H m", "k": "B L H m", "v": "B L H d", "log_alpha": "B L H", "beta": "B L H"}


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
    """The MuonSSM recurrence over a sequence (eqs. 3 and 4).

        M_t = gamma_t M_{t-1} + NS(tau beta_t v_t k_t^T)
        S_t = S_{t-1} alpha_t (I - beta_t eta k_t k_t^T) + M_t
        y_t = S_t q_t

    Args:
        q, k: queries and keys `[B, L, H, m]`. Nothing is normalised or scaled here; a layer does that.
        v: values `[B, L, H, d]`.
        log_alpha: log of the retention gate `[B, L, H]`, <= 0.
        beta: write gate `[B, L, H]`.
        eta: recall correction: 0 (Mamba) or 1 (DeltaNet, Gated DeltaNet, LongHorn).
        muon: momentum and normalisation; `Muon.off()` is the plain backbone.
        state: what an earlier call returned, to continue its sequences; None starts from zero.
        cu_seqlens: int tensor `[N + 1]`, bounds of N sequences packed into one row (B = 1).
        impl: `"auto"`, or a name in `muonssm.ops.IMPLEMENTATIONS`, which is then used or refused.

    Returns:
        y `[B, L, H, d]` in v's dtype, and the `MemoryState` `[B, H, d, m]` after the last step (`[N, H, d, m]` when
        packed), in float32, or float64 if any input is.

    Departs from the paper: the write is evaluated in closed form (see `normalization.write_scale`), gamma may vary
    over heads and steps and may be 0.
    """
    if state is not None and cu_seqlens is None and not torch.compiler.is_compiling():
        step = _decode()((q, k, v, log_alpha, beta), eta, muon, state, impl)
        if step is not None:
            return step
    inputs = {"q": q, "k": k, "v": v, "log_alpha": log_alpha, "beta": beta}
    size = validate.check_tensors(inputs, _LAYOUTS)
    B, L, H, m, d = (size[letter] for letter in "BLHmd")
    validate.check_upper_bound("log_alpha", log_alpha, 0.0, "the log of a gate in [0, 1]")
    validate.check_muon(muon, (B, L, H), q.device)
    lengths = validate.check_cu_seqlens(cu_seqlens, B, L)
    state_shape = (B if lengths is None else len(lengths), H, d, m)
    validate.check_state(state, state_shape, q.device)
    validate.check_eta(eta)

    dtype = compute_dtype(*inputs.values(), *(state or ()))
    longest = L if lengths is None else max(lengths)
    problem = Problem(q.device, dtype, longest, m, validate.is_transformed())
    implementation = choose(impl, problem)
    module = implementation.load().memory

    with full_precision(q.device):
        if implementation.fused:
            y, S, M = module.run_fused(tuple(inputs.values()), eta, muon, state, cu_seqlens, dtype)
            return y, MemoryState(S, M)
        wide_q, wide_k, wide_v, wide_log_alpha, wide_beta = (widen(x, dtype) for x in inputs.values())
        steps = MemorySteps(
            q=wide_q,
            k=wide_k,
            u=write_scale(wide_k, wide_v, wide_beta, muon)[..., None] * wide_v,
            log_alpha=wide_log_alpha,
            erase=eta * wide_beta if eta else None,
            gamma=gamma_tensor(muon.gamma, dtype, q.device),
            mu=wide_q.new_ones(1, 1, 1),
        )
        S, M = (widen(x, dtype) for x in state) if state else wide_q.new_zeros(2, *state_shape)
        y, S, M = run_sequences(module.run, module.chunk_length, steps, S, M, lengths)
    return y.to(v.dtype), MemoryState(S, M)


@functools.cache
def _decode() -> Callable[..., tuple[Tensor, MemoryState] | None]:
    """Loaded on use, because it loads more of torch than importing this package should."""
    from .native import decode

    return decode
