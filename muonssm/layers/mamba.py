"""Mamba: a diagonal memory with selective step sizes.

    x, z     = in_proj(u);   x = silu(conv(x));   dt, B, C = x_proj(x)
    dt       = softplus(dt_proj(dt)),   A = -exp(A_log)
    M_t      = gamma_t M_{t-1} + NS(tau (dt_t x_t) B_t^T)
    S_t      = exp(dt_t A) * S_{t-1} + M_t
    y        = out_proj((S C + D x) * silu(z))

    paper           code            shape
    u               u               `[B, L, d_model]`, the input of the mixer
    x_t             x               `[B, L, d_inner]`, d_inner = expand d_model channels
    Delta_t         dt              `[B, L, d_inner]`, the step sizes
    B_t, C_t        B, C            `[B, L, d_state]`, key and query
    A, D            A_log, D        `[d_inner, d_state]` and `[d_inner]`, learned
    S_t, M_t        memory.S, .M    `[B, d_inner, d_state]`
                    z               `[B, L, d_inner]`, the output gate

Parameters have the names, shapes and initial values of the original, so that its weights load unchanged.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import check_bool, check_int
from muonssm.ops import Muon, muon_selective_scan
from muonssm.ops.dtypes import compute_dtype
from muonssm.ops.mamba_step import MambaWeights, Norm, mamba_step
from muonssm.ops.selective import check_rule

from .mixer import Mixer
from .modules import GateProjection, RMSNorm, ShortConvolution, is_plain_linear, step_size_bias
from .momentum import Momentum
from .sequences import Sequences
from .state import MixerState


class Mamba(Mixer):
    """Mamba's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of the input and output.
        d_state: states per channel.
        expand: channels are `expand * d_model`.
        dt_rank: rank of the step size's projection; `ceil(d_model / 16)` by default.
        conv_size: length of the convolution's filters.
        bias: whether the input and output projections have a bias.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`. The norm of a write is taken over all channels, so
            there is one gamma.
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
        super().__init__(d_model, bidirectional)
        self.d_state = check_int("d_state", d_state, 1)
        self.d_inner = check_int("expand * d_model", round(expand * d_model), 1)
        self.dt_rank = check_int("dt_rank", math.ceil(d_model / 16) if dt_rank is None else dt_rank, 1)
        check_bool("bias", bias)

        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        self.conv1d = ShortConvolution(self.d_inner, check_int("conv_size", conv_size, 1), bias=True)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)
        self.momentum = Momentum(d_model, 1, muon, momentum)
        check_rule(muon)
        self.dt_proj = GateProjection(self.dt_rank, self.d_inner)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        self.dt_proj.bias = step_size_bias(self.d_inner)
        A = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(self.d_inner, 1)
        self.A_log = nn.Parameter(A.log().to(torch.get_default_dtype()))

    def mix(self, u: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        conv, memory = (None, None) if state is None else state

        # Projections of u.
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, gamma = sequences.add_reversed(x, self.momentum.gate(u))

        # Short convolution, then step sizes, keys B and queries C of its output.
        x, conv = self.conv1d(x, conv, sequences.bounds, self.impl)
        dt, B, C = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        A = -self.A_log.to(compute_dtype(x)).exp()

        # The memory: y_t = S_t C_t + D x_t, with the retention gate exp(dt_t A).
        muon = self.momentum(gamma)
        y, memory = muon_selective_scan(
            x, dt, A, B, C, muon=muon, state=memory, cu_seqlens=sequences.bounds, impl=self.impl
        )
        y = sequences.mean_of_directions(torch.addcmul(y, x, self.D.to(y.dtype)))

        # Output gate and projection.
        return self.out_proj(y * F.silu(z)), MixerState(conv, memory)

    def step_kernel(self, x: Tensor, state: MixerState, norm: RMSNorm | None) -> tuple[Tensor, MixerState] | None:
        """Run `ops.mamba_step`, which sees weights alone: not biases, adapters, hooks or a learned momentum."""
        layers = (self.in_proj, self.x_proj, self.dt_proj, self.out_proj)
        if self.momentum.variant != "fixed" or self.in_proj.bias is not None or not all(map(is_plain_linear, layers)):
            return None
        weights = MambaWeights(
            self.in_proj.weight,
            self.conv1d.weight,
            self.conv1d.bias,
            self.x_proj.weight,
            self.dt_proj.weight,
            self.dt_proj.bias,
            self.A_log,
            self.D,
            self.out_proj.weight,
        )
        norm_weights = None if norm is None else Norm(norm.weight, norm.eps)
        result = mamba_step(x, weights, state.conv, state.memory, self.muon, self.impl, norm_weights)
        return None if result is None else (result.y, MixerState(result.tail, result.memory))
