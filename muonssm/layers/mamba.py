"""Mamba: diagonal memory with selective step sizes.

    x, z = in_proj(x);   x = silu(conv(x));   dt, B, C = x_proj(x);   dt = softplus(dt_proj(dt))
    S_t = exp(dt_t A) * S_{t-1} + M_t,   M_t = gamma_t M_{t-1} + NS(tau (dt_t x_t) B_t^T)
    y = out_proj((S C + D x) * silu(z))

Parameters are named, shaped and initialised as in the original, so weights go in and out as they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import MemoryState, Muon, muon_selective_scan
from ..ops.rows import compute_dtype
from .mixer import Mixer, Projected, check_size
from .momentum import Momentum
from .parts import ShortConvolution, step_size_bias, without_weight_decay


class Mamba(Mixer):
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
        super().__init__(check_size("d_model", d_model), bidirectional)
        self.d_state = check_size("d_state", d_state)
        self.d_inner = check_size("expand * d_model", round(expand * d_model))
        self.dt_rank = check_size("dt_rank", math.ceil(d_model / 16) if dt_rank is None else dt_rank)
        self.momentum = Momentum(d_model, 1, muon, momentum)
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        self.conv1d = ShortConvolution(self.d_inner, check_size("conv_size", conv_size), bias=True)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner)
        nn.init.uniform_(self.dt_proj.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        self.dt_proj.bias = step_size_bias(self.d_inner)
        A = torch.arange(1, d_state + 1, dtype=torch.float32).repeat(self.d_inner, 1)
        self.A_log = without_weight_decay(nn.Parameter(A.log()))
        self.D = without_weight_decay(nn.Parameter(torch.ones(self.d_inner)))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

    def project(self, x: Tensor) -> Projected:
        channels, z = self.in_proj(x).chunk(2, dim=-1)
        return Projected(channels, (), z)

    def recall(
        self,
        channels: Tensor,
        gates: tuple[Tensor, ...],
        muon: Muon,
        state: MemoryState | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, MemoryState]:
        dt, B, C = self.x_proj(channels).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        dtype = compute_dtype(channels)
        dt = F.softplus(F.linear(dt, self.dt_proj.weight).to(dtype) + self.dt_proj.bias.to(dtype))
        A = -self.A_log.to(dtype).exp()
        y, state = muon_selective_scan(
            channels, dt, A, B, C, muon=muon, state=state, cu_seqlens=cu_seqlens, impl=self.impl
        )
        return torch.addcmul(y, channels, self.D.to(y.dtype)), state

    def readout(self, y: Tensor, output: Tensor | None) -> Tensor:
        assert output is not None
        return self.out_proj(y * F.silu(output))
