"""Gated DeltaNet: the delta rule with a retention gate.

q, k, v = silu(conv(in_proj(x)))            q, k unit vectors, q times head_k_dim^-0.5
alpha   = exp(-exp(A_log) softplus(a + dt_bias)),   beta = sigmoid(b)
M_t     = gamma_t M_{t-1} + NS(tau beta_t v_t k_t^T)
S_t     = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + M_t
y       = out_proj(RMSNorm(S q) * silu(z))          one norm per head

paper           code            shape
q_t, k_t        q, k            `[B, L, num_heads, head_k_dim]`, then repeated to `num_value_heads` heads
v_t             v               `[B, L, num_value_heads, head_v_dim]`
alpha_t         log_alpha       `[B, L, num_value_heads]`, its logarithm
beta_t          beta            `[B, L, num_value_heads]`
S_t, M_t        memory.S, .M    `[B, num_value_heads, head_v_dim, head_k_dim]`
                a, b, z         projections of x that become alpha, beta and the output gate
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import check_bool, check_int
from muonssm.ops import Muon, muon_memory
from muonssm.ops.dtypes import compute_dtype
from muonssm.ops.fused.norms import unit

from .mixer import Mixer
from .modules import RMSNorm, ShortConvolution, repeat_heads, size_per_head, step_size_bias
from .momentum import Momentum
from .sequences import Sequences
from .state import MixerState


class GatedDeltaNet(Mixer):
    """Gated DeltaNet's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of x and y.
        num_heads: heads of queries and keys.
        head_k_dim: size of a key; by default all heads together have 3/4 `d_model`.
        head_v_dim: size of a value; by default twice the key's.
        num_value_heads: number of memories, a multiple of `num_heads` (the default). Neighbors share keys and queries.
        conv_size: length of the convolution's filters.
        gate_bias: whether the projections a and b have a bias besides `dt_bias`, as in the paper's model.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        num_value_heads: int | None = None,
        conv_size: int = 4,
        gate_bias: bool = True,
        muon: Muon = Muon(),  # noqa: B008  a frozen value
        momentum: str = "fixed",
        bidirectional: bool = False,
    ) -> None:
        super().__init__(d_model, bidirectional)
        self.num_heads = check_int("num_heads", num_heads, 1)
        self.head_k_dim = size_per_head("head_k_dim", head_k_dim, 0.75 * d_model, num_heads)
        self.head_v_dim = 2 * self.head_k_dim if head_v_dim is None else check_int("head_v_dim", head_v_dim, 1)
        num_value_heads = num_heads if num_value_heads is None else num_value_heads
        self.num_value_heads = check_int("num_value_heads", num_value_heads, 1)
        if num_value_heads % num_heads:
            raise ValueError(f"num_value_heads must be a multiple of num_heads = {num_heads}, got {num_value_heads}")
        keys, values = num_heads * self.head_k_dim, num_value_heads * self.head_v_dim
        self.qkv_widths = [keys, keys, values]
        self.gate_widths = [values, num_value_heads, num_value_heads]  # z, a, b

        self.momentum = Momentum(d_model, num_value_heads, muon, momentum)
        self.in_proj = nn.Linear(d_model, sum(self.qkv_widths) + sum(self.gate_widths), bias=False)
        self.conv1d = ShortConvolution(sum(self.qkv_widths), check_int("conv_size", conv_size, 1), bias=False)
        self.norm = RMSNorm(self.head_v_dim)
        self.out_proj = nn.Linear(values, d_model, bias=False)
        self.gate_bias: nn.Parameter | None = None  # of a and b
        if check_bool("gate_bias", gate_bias):
            bound = d_model**-0.5
            self.gate_bias = nn.Parameter(torch.empty(2 * num_value_heads).uniform_(-bound, bound))
        self.dt_bias = step_size_bias(num_value_heads)
        self.A_log = nn.Parameter(torch.empty(num_value_heads).uniform_(0.01, 16).log())

    def mix(self, x: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        conv, memory = (None, None) if state is None else state

        # Projections of x.
        qkv, z, a, b = self.in_proj(x).split([sum(self.qkv_widths), *self.gate_widths], dim=-1)
        qkv, a, b, gamma = sequences.add_reversed(qkv, a, b, self.momentum.gate(x))

        # Short convolution, then queries, keys and values per head.
        qkv, conv = self.conv1d(qkv, conv, sequences.bounds, self.impl)
        q, k, v = qkv.split(self.qkv_widths, dim=-1)
        q, k = (t.unflatten(2, (self.num_heads, self.head_k_dim)) for t in (q, k))
        q, k = unit(q, self.head_k_dim**-0.5), unit(k)
        q, k = (repeat_heads(t, self.num_value_heads) for t in (q, k))
        v = v.unflatten(2, (self.num_value_heads, self.head_v_dim))

        # Gates, in float32: alpha = exp(-exp(A_log) softplus(a + dt_bias)), beta = sigmoid(b).
        dtype = compute_dtype(a)
        a, b = a.to(dtype), b.to(dtype)
        if self.gate_bias is not None:
            bias_a, bias_b = self.gate_bias.to(dtype).chunk(2)
            a, b = a + bias_a, b + bias_b
        log_alpha = -self.A_log.to(dtype).exp() * F.softplus(a + self.dt_bias.to(dtype))
        beta = torch.sigmoid(b)

        # The memory: y_t = S_t q_t.
        muon = self.momentum(gamma)
        y, memory = muon_memory(
            q, k, v, log_alpha, beta, muon=muon, state=memory, cu_seqlens=sequences.bounds, impl=self.impl
        )
        y = sequences.mean_of_directions(y)

        # Norm per head, output gate, output projection.
        gate = z.unflatten(2, (self.num_value_heads, self.head_v_dim))
        return self.out_proj(self.norm(y, gate).flatten(2)), MixerState(conv, memory)
