"""Momentum DeltaNet (arXiv 2605.05838): momentum on the error of the delta rule, with four gates per step and head.

q, k, v   = silu(conv(in_proj(x)));   q <- q - exp(D_log) k;   q, k unit vectors, q times head_k_dim^-0.5
gamma     = max(exp(-exp(Mu_log) softplus(m + mu_bias)), exp(-2))
eps       = 1 + tanh(e / sqrt(d_model)),   r = eps exp(log_factor)
mu        = sigmoid(b) r^2 / (1 + r^2)
alpha     = exp(-exp(A_log) softplus(a + dt_bias)) / (1 + r^2)
M_t       = gamma_t M_{t-1} + eps_t (v_t - alpha_t S_{t-1} k_t) k_t^T
S_t       = alpha_t S_{t-1} + mu_t M_t
y         = out_proj(RMSNorm(S q) * silu(z))          one norm per head; sigmoid(z) in the authors' code

r^2 / (1 + r^2) and 1 / (1 + r^2) are the squared sine and cosine of theta = atan(r): they bound mu and alpha, so that
the two states cannot grow without limit.

paper           code            shape
q_t, k_t        q, k            `[B, L, num_heads, head_k_dim]`, then repeated to `num_value_heads` heads
v_t             v               `[B, L, num_value_heads, head_v_dim]`
mu_t            gamma           `[B, L, num_value_heads]`, the momentum decay
eta_t           eps             `[B, L, num_value_heads]`, passed to the memory as its write gate `beta`
beta_t          mu              `[B, L, num_value_heads]`, passed to the memory as `inject`
alpha_t         log_alpha       `[B, L, num_value_heads]`, its logarithm
S_t, -M_t       memory.S, .M    `[B, num_value_heads, head_v_dim, head_k_dim]`; the paper's momentum has the other sign
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import check_choice, check_int
from muonssm.ops import Muon, muon_memory
from muonssm.ops.dtypes import compute_dtype
from muonssm.ops.fused.norms import unit

from .mixer import Mixer
from .modules import RMSNorm, ShortConvolution, repeat_heads, size_per_head, step_size_bias
from .momentum import Momentum
from .sequences import Sequences
from .state import MixerState

LEAST_LOG_GAMMA = -2.0
GATE_ACTIVATIONS = ("silu", "sigmoid")


class MomentumDeltaNet(Mixer):
    """Momentum DeltaNet's mixer, as published (`Muon.off()`) or with a normalized write.

    It has momentum of its own: gamma is a gate, and the correction is always in the momentum. Of `muon` it takes how
    the write is normalized and scaled; `muon.gamma` and `muon.correction` have no effect.

    Args:
        d_model: width of x and y.
        num_heads: heads of queries and keys.
        head_k_dim: size of a key; by default all heads together have 3/4 `d_model`.
        head_v_dim: size of a value; by default twice the key's.
        num_value_heads: number of memories, a multiple of `num_heads` (the default). Neighbors share keys and queries.
        conv_size: length of the convolution's filters.
        gate_activation: of the output gate z: `"silu"` as in flash-linear-attention 0.6.0, or `"sigmoid"` as in the
            authors' code (HuuYuLong/MomentumDeltaNet). Otherwise both compute the same from the same parameters.
        muon, bidirectional: see `Mixer`.
        momentum: must be `"fixed"`; gamma is learned in any case.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int = 4,
        head_k_dim: int | None = None,
        head_v_dim: int | None = None,
        num_value_heads: int | None = None,
        conv_size: int = 4,
        gate_activation: str = "silu",
        muon: Muon = Muon(),  # noqa: B008  a frozen value
        momentum: str = "fixed",
        bidirectional: bool = False,
    ) -> None:
        super().__init__(d_model, bidirectional)
        if momentum != "fixed":
            raise ValueError(f"momentum must be 'fixed' for momentum_deltanet, whose gamma is a gate, got {momentum!r}")
        self.num_heads = check_int("num_heads", num_heads, 1)
        self.head_k_dim = size_per_head("head_k_dim", head_k_dim, 0.75 * d_model, num_heads)
        self.head_v_dim = 2 * self.head_k_dim if head_v_dim is None else check_int("head_v_dim", head_v_dim, 1)
        num_value_heads = num_heads if num_value_heads is None else num_value_heads
        self.num_value_heads = check_int("num_value_heads", num_value_heads, 1)
        if num_value_heads % num_heads:
            raise ValueError(f"num_value_heads must be a multiple of num_heads = {num_heads}, got {num_value_heads}")
        self.gate_activation = check_choice("gate_activation", gate_activation, GATE_ACTIVATIONS)
        keys, values = num_heads * self.head_k_dim, num_value_heads * self.head_v_dim
        self.qkv_widths = [keys, keys, values]
        self.gate_widths = [values, *[num_value_heads] * 4]  # z, a, b, m, e

        self.momentum = Momentum(d_model, num_value_heads, muon, momentum)
        self.rule = replace(muon, correction="momentum")
        self.in_proj = nn.Linear(d_model, sum(self.qkv_widths) + sum(self.gate_widths), bias=False)
        self.conv1d = ShortConvolution(sum(self.qkv_widths), check_int("conv_size", conv_size, 1), bias=False)
        self.norm = RMSNorm(self.head_v_dim)
        self.out_proj = nn.Linear(values, d_model, bias=False)
        self.dt_bias = step_size_bias(num_value_heads)
        self.mu_bias = nn.Parameter(self.dt_bias.detach().clone())
        self.A_log = _log_uniform(num_heads, 16)
        self.Mu_log = _log_uniform(num_heads, 16)
        self.log_factor = _log_uniform(num_heads, 4)
        self.D_log = _log_uniform(num_heads, 1)

    def no_weight_decay(self) -> set[str]:
        return {"A_log", "Mu_log", "log_factor", "D_log", "dt_bias", "mu_bias"}

    def mix(self, x: Tensor, state: MixerState | None, sequences: Sequences) -> tuple[Tensor, MixerState]:
        conv, memory = (None, None) if state is None else state

        # Projections of x.
        qkv, z, *gates = self.in_proj(x).split([sum(self.qkv_widths), *self.gate_widths], dim=-1)
        qkv, *gates = sequences.add_reversed(qkv, *gates)

        # Short convolution, then queries, keys and values per head; the query without its key's direction.
        qkv, conv = self.conv1d(qkv, conv, sequences.bounds, self.impl)
        q, k, v = qkv.split(self.qkv_widths, dim=-1)
        q, k = (t.unflatten(2, (self.num_heads, self.head_k_dim)) for t in (q, k))
        dtype = compute_dtype(q)
        q = (q - self.D_log.to(dtype).exp()[:, None] * k).to(k.dtype)
        q, k = unit(q, self.head_k_dim**-0.5), unit(k)
        q, k = (repeat_heads(t, self.num_value_heads) for t in (q, k))
        v = v.unflatten(2, (self.num_value_heads, self.head_v_dim))

        # Gates, in float32.
        a, b, m, e = (gate.to(dtype) for gate in gates)
        eps = 1 + torch.tanh(e * self.d_model**-0.5)
        square = (eps * self._per_memory(self.log_factor, dtype).exp()).square()
        mu = torch.sigmoid(b) * square / (1 + square)
        log_alpha = -self._per_memory(self.A_log, dtype).exp() * F.softplus(a + self.dt_bias.to(dtype))
        log_alpha = log_alpha - torch.log1p(square)
        log_gamma = -self._per_memory(self.Mu_log, dtype).exp() * F.softplus(m + self.mu_bias.to(dtype))
        gamma = log_gamma.clamp(min=LEAST_LOG_GAMMA).exp()

        # The memory: y_t = S_t q_t.
        muon = self.rule.with_gamma(gamma)
        y, memory = muon_memory(
            q, k, v, log_alpha, eps, muon=muon, inject=mu, state=memory, cu_seqlens=sequences.bounds, impl=self.impl
        )
        y = sequences.mean_of_directions(y)

        # Norm per head, output gate, output projection.
        gate = z.unflatten(2, (self.num_value_heads, self.head_v_dim))
        return self.out_proj(self._gated(y, gate).flatten(2)), MixerState(conv, memory)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Compute RMSNorm(y) times the activation of the gate."""
        if self.gate_activation == "silu":
            return self.norm(y, gate)
        dtype = compute_dtype(y)
        return (self.norm(y, dtype=dtype) * torch.sigmoid(gate.to(dtype))).to(y.dtype)

    def _per_memory(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Repeat a parameter per key head for the memories that share the head."""
        return parameter.to(dtype).repeat_interleave(self.num_value_heads // self.num_heads)


def _log_uniform(count: int, high: float) -> nn.Parameter:
    """Draw the logarithm of a number that is uniform up to `high`; the lower bound keeps it finite."""
    return nn.Parameter(torch.empty(count).uniform_(0.01, high).log())
