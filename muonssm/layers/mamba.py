"""Mamba: diagonal memory with selective step sizes.

    dt = softplus(dt_proj(dt)),   A = -exp(A_log)                       x, dt, B = k and C = q as in `shell`
    S_t = exp(dt_t A) * S_{t-1} + M_t,   M_t = gamma_t M_{t-1} + NS(tau (dt_t x_t) B_t^T),   y_t = S_t C_t

Parameters are named, shaped and initialised as in the original, so weights go in and out as they are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.ops import MemoryState, Muon, muon_selective_scan
from muonssm.ops.mamba_step import MambaWeights, Norm, mamba_step
from muonssm.ops.dtypes import compute_dtype

from .mixer import Call
from .modules import RMSNorm, is_own, step_size_bias
from .momentum import Momentum
from .shell import Shell
from .state import MixerState


class Mamba(Shell):
    """Mamba's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of x and y.
        d_state: states a channel, N.
        expand: channels are `expand * d_model`.
        dt_rank: rank of the step size's projection; `ceil(d_model / 16)` by default.
        conv_size: length of the convolution's filters.
        bias: of the input and output projections.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`. The write's norm goes over all channels, so there
            is one gamma.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        expand: float = 2,
        dt_rank: int | None = None,
        conv_size: int = 4,
        bias: bool = False,
        muon: Muon = Muon(),  # noqa: B008  a frozen value
        momentum: str = "fixed",
        bidirectional: bool = False,
    ) -> None:
        super().__init__(d_model, d_state, expand, dt_rank, conv_size, bias, bidirectional)
        self.momentum = Momentum(d_model, 1, muon, momentum)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        self.dt_proj.bias = step_size_bias(self.d_inner)
        A = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(self.d_inner, 1)
        self.A_log = nn.Parameter(A.log())

    def answer(self, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, call: Call) -> tuple[Tensor, MemoryState]:
        dtype = compute_dtype(x)
        dt = F.softplus(F.linear(dt, self.dt_proj.weight).to(dtype) + self.dt_proj.bias.to(dtype))
        return muon_selective_scan(x, dt, -self.A_log.to(dtype).exp(), k, q, **call._asdict())

    def step(self, x: Tensor, state: MixerState, norm: RMSNorm | None = None) -> tuple[Tensor, MixerState] | None:
        if torch.is_grad_enabled() or self.momentum.kind != "fixed" or self.in_proj.bias is not None:
            return None
        if not all(is_own(layer) for layer in (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)):
            return None
        filters = self.conv1d
        weights = MambaWeights(
            self.in_proj.weight,
            filters.weight,
            filters.bias,
            self.x_proj.weight,
            self.dt_proj.weight,
            self.dt_proj.bias,
            self.A_log,
            self.D,
            self.out_proj.weight,
        )
        before = None if norm is None else Norm(norm.weight, norm.eps)
        found = mamba_step(x, weights, state.conv, state.memory, self.muon, self.impl, before)
        return None if found is None else (found.y, MixerState(found.tail, found.memory))
