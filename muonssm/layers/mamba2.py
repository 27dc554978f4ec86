"""Mamba-2: a matrix memory with one retention gate per head.

    z, x, B, C, dt = in_proj(u);   x, B, C = silu(conv(x, B, C));   dt = softplus(dt + dt_bias)
    alpha   = exp(-exp(A_log) dt),   beta = dt,   eta = 0
    M_t     = gamma_t M_{t-1} + NS(tau dt_t x_t B_t^T)
    S_t     = alpha_t S_{t-1} + M_t
    y       = out_proj(RMSNorm((S C + D x) * silu(z)))

    paper           code            shape
    u               u               `[B, L, d_model]`, the input of the mixer
    x_t             x, v            `[B, L, d_inner]`, then `[B, L, num_heads, head_dim]`
    B_t, C_t        k, q            `[B, L, groups d_state]`, then per head `[B, L, num_heads, d_state]`
    Delta_t         dt              `[B, L, num_heads]`, the step sizes
    alpha_t         log_alpha       `[B, L, num_heads]`, its logarithm
    S_t, M_t        memory.S, .M    `[B, num_heads, head_dim, d_state]`
                    z               `[B, L, d_inner]`, the output gate

Parameters have the names, shapes and initial values of the original, so that its weights load unchanged.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import check_bool, check_int
from muonssm.ops import Muon, muon_memory
from muonssm.ops.dtypes import compute_dtype

from .mixer import Mixer
from .modules import RMSNorm, ShortConvolution, channels_per_head, check_divisor, step_size_bias
from .momentum import Momentum
from .sequences import Sequences
from .state import MixerState

NO_LIMIT = (0.0, math.inf)


class Mamba2(Mixer):
    """Mamba-2's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of the input and output.
        d_state: size of keys B and queries C.
        expand: channels are `expand * d_model`.
        head_dim: channels per head; by default the largest divisor of the channels up to 64.
        groups: number of different B and C; the heads of a group share theirs.
        conv_size: length of the convolution's filters.
        bias: whether the input and output projections have a bias.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`.

    Attributes:
        dt_limit: lower and upper bound of the step size, for weights that were trained with them; no bounds by default.
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
        super().__init__(d_model, bidirectional)
        self.d_state = check_int("d_state", d_state, 1)
        self.d_inner = check_int("expand * d_model", round(expand * d_model), 1)
        self.head_dim = channels_per_head(self.d_inner, head_dim)
        self.num_heads = self.d_inner // self.head_dim
        self.groups = check_divisor("groups", groups, "the number of heads", self.num_heads)
        self.dt_limit = NO_LIMIT
        check_bool("bias", bias)

        self.momentum = Momentum(d_model, self.num_heads, muon, momentum)
        channels = self.d_inner + 2 * groups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + channels + self.num_heads, bias=bias)
        self.conv1d = ShortConvolution(channels, check_int("conv_size", conv_size, 1), bias=True)
        self.dt_bias = step_size_bias(self.num_heads)
        self.A_log = nn.Parameter(torch.empty(self.num_heads).uniform_(1, 16).log())
        self.D = nn.Parameter(torch.ones(self.num_heads))
        self.norm = RMSNorm(self.d_inner, gate_first=True)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

    def mix(self, u: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        conv, memory = (None, None) if state is None else state
        keys = self.groups * self.d_state

        # Projections of u.
        z, xBC, dt = self.in_proj(u).split([self.d_inner, self.d_inner + 2 * keys, self.num_heads], dim=-1)
        xBC, dt, gamma = sequences.add_reversed(xBC, dt, self.momentum.gate(u))

        # Short convolution, then values x, keys B and queries C per head.
        xBC, conv = self.conv1d(xBC, conv, sequences.bounds, self.impl)
        x, B, C = xBC.split([self.d_inner, keys, keys], dim=-1)
        v = x.unflatten(2, (self.num_heads, self.head_dim))
        k, q = self._per_head(B), self._per_head(C)

        # Gates, in float32: dt = softplus(dt + dt_bias), alpha = exp(-exp(A_log) dt), beta = dt.
        dtype = compute_dtype(xBC)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype))
        if self.dt_limit != NO_LIMIT:
            dt = dt.clamp(*self.dt_limit)
        log_alpha = -self.A_log.to(dtype).exp() * dt

        # The memory: y_t = S_t C_t + D x_t.
        muon = self.momentum(gamma)
        y, memory = muon_memory(
            q, k, v, log_alpha, dt, eta=0.0, muon=muon, state=memory, cu_seqlens=sequences.bounds, impl=self.impl
        )
        y = torch.addcmul(y, v, self.D.to(y.dtype)[:, None]).flatten(2)
        y = sequences.mean_of_directions(y)

        # Output gate, norm, output projection.
        return self.out_proj(self.norm(y, z)), MixerState(conv, memory)

    def _per_head(self, shared: Tensor) -> Tensor:
        """Give every head the B or C of its group: `[B, L, groups d_state]` to `[B, L, num_heads, d_state]`."""
        grouped = shared.unflatten(2, (self.groups, 1, self.d_state))
        return grouped.expand(-1, -1, -1, self.num_heads // self.groups, -1).flatten(2, 3)
