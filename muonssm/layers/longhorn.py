"""LongHorn: a write that solves an online regression in closed form, inside Mamba's projections.

    x, z     = in_proj(u);   x = silu(conv(x));   dt, k, q = x_proj(x)
    s        = sigmoid(dt_head(dt)),   eps = s / (1 + s k.k)
    M_t      = gamma_t M_{t-1} + NS(tau eps_t x_t k_t^T)
    S_t      = S_{t-1} (I - eps_t k_t k_t^T) + M_t          matrix form, the paper's table: one eps per head
    S_t      = (1 - eps_t k_t^2) * S_{t-1} + M_t            diagonal form, the released model: one eps per channel
    y        = out_proj((S q + D x) * silu(z))

    paper           code            shape
    u               u               `[B, L, d_model]`, the input of the mixer
    x_t = v_t       x, v            `[B, L, d_inner]`; matrix form `[B, L, num_heads, head_dim]`
    k_t, q_t        k, q            `[B, L, d_state]`, shared by all heads
    beta_t          s               `[B, L, num_heads]`; diagonal form `[B, L, d_inner]`
    eps_t           eps             shaped like s; passed to the memory as its write gate
    S_t, M_t        memory.S, .M    `[B, num_heads, head_dim, d_state]`; diagonal form `[B, d_inner, d_state]`
                    z               `[B, L, d_inner]`, the output gate

Both forms have the same parameters, with the names and shapes of the release. In the matrix form a head's logit is the
mean over its channels; with `head_dim=1` every channel has its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import check_choice, check_int
from muonssm.ops import Muon, muon_memory, muon_selective_scan
from muonssm.ops.selective import check_rule

from .mixer import Mixer
from .modules import GateProjection, ShortConvolution, channels_per_head
from .momentum import Momentum
from .sequences import Sequences
from .state import MixerState

FORMS = ("matrix", "diagonal")


class LongHorn(Mixer):
    """LongHorn's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of the input and output.
        d_state: size of keys and queries, which all heads share.
        expand: channels are `expand * d_model`.
        dt_rank: rank of the write gate's projection; `ceil(d_model / 16)` by default.
        conv_size: length of the convolution's filters.
        form: `"matrix"` or `"diagonal"`.
        head_dim: channels per head of the matrix form; by default the largest divisor of the channels up to 64.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`; the diagonal form has one gamma.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        expand: float = 2,
        dt_rank: int | None = None,
        conv_size: int = 4,
        form: str = "matrix",
        head_dim: int | None = None,
        muon: Muon = Muon(),  # noqa: B008  a frozen value
        momentum: str = "fixed",
        bidirectional: bool = False,
    ) -> None:
        super().__init__(d_model, bidirectional)
        self.form = check_choice("form", form, FORMS)
        self.d_state = check_int("d_state", d_state, 1)
        self.d_inner = check_int("expand * d_model", round(expand * d_model), 1)
        self.dt_rank = check_int("dt_rank", math.ceil(d_model / 16) if dt_rank is None else dt_rank, 1)
        self.head_dim = channels_per_head(self.d_inner, head_dim)
        self.num_heads = self.d_inner // self.head_dim if form == "matrix" else 1

        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=False)
        self.conv1d = ShortConvolution(self.d_inner, check_int("conv_size", conv_size, 1), bias=True)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=False)
        self.momentum = Momentum(d_model, self.num_heads, muon, momentum)
        if form == "diagonal":
            check_rule(muon)
        self.dt_head = GateProjection(self.dt_rank, self.d_inner)

    def mix(self, u: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        conv, memory = (None, None) if state is None else state

        # Projections of u.
        x, z = self.in_proj(u).chunk(2, dim=-1)
        x, gamma = sequences.add_reversed(x, self.momentum.gate(u))

        # Short convolution, then keys and queries of its output, and dt for the write gate.
        x, conv = self.conv1d(x, conv, sequences.bounds, self.impl)
        dt, k, q = self.x_proj(x).split([self.dt_rank, self.d_state, self.d_state], dim=-1)

        # The write gate, in float32: s = sigmoid(dt_head(dt)), eps = s / (1 + s k.k).
        s = torch.sigmoid(self._gate_logits(dt))
        eps = s / (1 + s * k.to(s.dtype).square().sum(-1, keepdim=True))

        # The memory: y_t = S_t q_t + D x_t.
        muon = self.momentum(gamma)
        if self.form == "diagonal":
            y, memory = muon_selective_scan(
                x, eps, None, k, q, muon=muon, state=memory, cu_seqlens=sequences.bounds, impl=self.impl
            )
        else:
            q, k = (t[:, :, None].expand(-1, -1, self.num_heads, -1) for t in (q, k))
            v = x.unflatten(2, (self.num_heads, self.head_dim))
            log_alpha = torch.zeros_like(eps)
            y, memory = muon_memory(
                q, k, v, log_alpha, eps, muon=muon, state=memory, cu_seqlens=sequences.bounds, impl=self.impl
            )
            y = y.flatten(2)
        y = sequences.mean_of_directions(torch.addcmul(y, x, self.D.to(y.dtype)))

        # Output gate and projection.
        return self.out_proj(y * F.silu(z)), MixerState(conv, memory)

    def _gate_logits(self, dt: Tensor) -> Tensor:
        """Compute the write gate's logits, in the matrix form averaged over each head's channels."""
        if self.form == "diagonal":
            return self.dt_head(dt)
        if type(self.dt_head) is GateProjection:
            return self.dt_head(dt, shared=self.head_dim)
        return self.dt_head(dt).unflatten(-1, (-1, self.head_dim)).mean(-1)  # an adapter's layer
