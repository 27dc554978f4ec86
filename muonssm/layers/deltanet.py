"""DeltaNet: the delta rule without a retention gate.

q, k, v = silu(conv(in_proj(x)))            q, k unit vectors, q times head_k_dim^-0.5
alpha   = 1,   beta = sigmoid(b)
M_t     = gamma_t M_{t-1} + NS(tau beta_t v_t k_t^T)
S_t     = S_{t-1} (I - beta_t k_t k_t^T) + M_t
y       = out_proj(RMSNorm(S q)), or out_proj(RMSNorm(S q) * silu(z)) with an output gate; one norm per head

paper           code            shape
q_t, k_t        q, k            `[B, L, num_heads, head_k_dim]`
v_t             v               `[B, L, num_heads, head_v_dim]`
beta_t          beta            `[B, L, num_heads]`; `log_alpha` is zeros of the same shape
S_t, M_t        memory.S, .M    `[B, num_heads, head_v_dim, head_k_dim]`
                b, z            projections of x that become beta and the output gate
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from muonssm.checks import check_bool, check_int
from muonssm.ops import Muon, muon_memory
from muonssm.ops.dtypes import compute_dtype
from muonssm.ops.fused.norms import unit

from .mixer import Mixer
from .modules import RMSNorm, ShortConvolution, size_per_head
from .momentum import Momentum
from .sequences import Sequences
from .state import MixerState


class DeltaNet(Mixer):
    """DeltaNet's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of x and y.
        num_heads: number of memories.
        head_k_dim, head_v_dim: size of a key and a value; by default all heads together have `d_model`.
        conv_size: length of the convolution's filters.
        output_gate: whether the output is gated by silu of another projection.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        conv_size: int = 4,
        output_gate: bool = False,
        muon: Muon = Muon(),  # noqa: B008  a frozen value
        momentum: str = "fixed",
        bidirectional: bool = False,
    ) -> None:
        super().__init__(d_model, bidirectional)
        self.num_heads = check_int("num_heads", num_heads, 1)
        self.head_k_dim = size_per_head("head_k_dim", head_k_dim, d_model, num_heads)
        self.head_v_dim = size_per_head("head_v_dim", head_v_dim, d_model, num_heads)
        keys, values = num_heads * self.head_k_dim, num_heads * self.head_v_dim
        self.qkv_widths = [keys, keys, values]
        self.gate_widths = [num_heads, values] if check_bool("output_gate", output_gate) else [num_heads]  # b, z

        self.momentum = Momentum(d_model, num_heads, muon, momentum)
        self.in_proj = nn.Linear(d_model, sum(self.qkv_widths) + sum(self.gate_widths), bias=False)
        self.conv1d = ShortConvolution(sum(self.qkv_widths), check_int("conv_size", conv_size, 1), bias=False)
        self.norm = RMSNorm(self.head_v_dim)
        self.out_proj = nn.Linear(values, d_model, bias=False)

    def mix(self, x: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        conv, memory = (None, None) if state is None else state

        # Projections of x; z is there with an output gate alone.
        qkv, b, *z = self.in_proj(x).split([sum(self.qkv_widths), *self.gate_widths], dim=-1)
        qkv, b, gamma = sequences.add_reversed(qkv, b, self.momentum.gate(x))

        # Short convolution, then queries, keys and values per head.
        qkv, conv = self.conv1d(qkv, conv, sequences.bounds, self.impl)
        q, k, v = qkv.split(self.qkv_widths, dim=-1)
        q, k = (t.unflatten(2, (self.num_heads, self.head_k_dim)) for t in (q, k))
        q, k = unit(q, self.head_k_dim**-0.5), unit(k)
        v = v.unflatten(2, (self.num_heads, self.head_v_dim))

        # Gates, in float32: alpha = 1, beta = sigmoid(b).
        beta = torch.sigmoid(b.to(compute_dtype(b)))
        log_alpha = torch.zeros_like(beta)

        # The memory: y_t = S_t q_t.
        muon = self.momentum(gamma)
        y, memory = muon_memory(
            q, k, v, log_alpha, beta, muon=muon, state=memory, cu_seqlens=sequences.bounds, impl=self.impl
        )
        y = sequences.mean_of_directions(y)

        # Norm per head, output gate if there is one, output projection.
        gate = z[0].unflatten(2, (self.num_heads, self.head_v_dim)) if z else None
        return self.out_proj(self.norm(y, gate).flatten(2)), MixerState(conv, memory)
