"""Mamba-2: matrix memory with one retention gate a head.

    z, x, B, C, dt = in_proj(x);   x, B, C = silu(conv(x, B, C));   dt = softplus(dt + dt_bias)
    S_t = exp(-exp(A_log) dt_t) S_{t-1} + M_t,   M_t = gamma_t M_{t-1} + NS(tau dt_t x_t B_t^T)
    y = out_proj(RMSNorm((S C + D x) * silu(z)))

Parameters are named, shaped and initialised as in the original, so weights go in and out as they are.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.ops import MemoryState, Muon, muon_memory
from muonssm.ops.dtypes import compute_dtype

from .mixer import Call, Mixer, Projected, check_size, head_dim_of
from .modules import RMSNorm, ShortConvolution, step_size_bias
from .momentum import Momentum


class Mamba2(Mixer):
    """Mamba-2's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of x and y.
        d_state: size of keys B and queries C.
        expand: channels are `expand * d_model`.
        head_dim: channels a head; by default the largest divisor of the channels up to 64.
        groups: heads share B and C in so many groups.
        conv_size: length of the convolution's filters.
        bias: of the input and output projections.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`.

    `dt_limit`, a pair (none by default), bounds the step size, for weights that were trained so.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: float = 2,
        head_dim: int | None = None,
        groups: int = 1,
        conv_size: int = 4,
        bias: bool = False,
        muon: Muon = Muon(),  # noqa: B008  a frozen value
        momentum: str = "fixed",
        bidirectional: bool = False,
    ) -> None:
        super().__init__(check_size("d_model", d_model), bidirectional)
        self.d_state = check_size("d_state", d_state)
        self.d_inner = check_size("expand * d_model", round(expand * d_model))
        self.head_dim = head_dim_of(self.d_inner, head_dim)
        self.heads = self.d_inner // self.head_dim
        self.groups = check_size("groups", groups, divides=("heads", self.heads))
        self.dt_limit = (0.0, math.inf)
        self.momentum = Momentum(d_model, self.heads, muon, momentum)
        channels = self.d_inner + 2 * groups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + channels + self.heads, bias=bias)
        self.conv1d = ShortConvolution(channels, check_size("conv_size", conv_size), bias=True)
        self.dt_bias = step_size_bias(self.heads)
        self.A_log = nn.Parameter(torch.empty(self.heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.heads))
        self.norm = RMSNorm(self.d_inner, gate_first=True)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

    def project(self, x: Tensor) -> Projected:
        sizes = [self.d_inner, self.d_inner + 2 * self.groups * self.d_state, self.heads]
        z, channels, dt = self.in_proj(x).split(sizes, dim=-1)
        return Projected(channels, (dt,), z)

    def recall(self, channels: Tensor, gates: tuple[Tensor, ...], call: Call) -> tuple[Tensor, MemoryState]:
        shared = self.groups * self.d_state
        x, B, C = channels.split([self.d_inner, shared, shared], dim=-1)
        x = x.unflatten(2, (self.heads, self.head_dim))
        k, q = (self._for_heads(t) for t in (B, C))
        dtype = compute_dtype(channels)
        dt = F.softplus(gates[0].to(dtype) + self.dt_bias.to(dtype))
        if self.dt_limit != (0.0, math.inf):
            dt = dt.clamp(*self.dt_limit)
        log_alpha = -self.A_log.to(dtype).exp() * dt
        y, state = muon_memory(q, k, x, log_alpha, dt, eta=0.0, **call._asdict())
        return torch.addcmul(y, x, self.D.to(y.dtype)[:, None]).flatten(2), state

    def _for_heads(self, shared: Tensor) -> Tensor:
        """`[B, L, groups * d_state]` to `[B, L, heads, d_state]`."""
        grouped = shared.unflatten(2, (self.groups, 1, self.d_state))
        return grouped.expand(-1, -1, -1, self.heads // self.groups, -1).flatten(2, 3)

    def readout(self, y: Tensor, output: Tensor | None) -> Tensor:
        return self.out_proj(self.norm(y, output))
