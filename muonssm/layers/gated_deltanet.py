"""Gated DeltaNet: the delta rule with a retention gate; see `delta_rule` for the rest.

alpha = exp(-exp(A_log) softplus(a + dt_bias)),   beta = sigmoid(b),   a, b, gate = in_proj(x)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.ops import Muon
from muonssm.ops.dtypes import compute_dtype

from .delta_rule import DeltaRule, Heads, head_size
from .mixer import Projected, check_size
from .modules import step_size_bias
from .momentum import Momentum


class GatedDeltaNet(DeltaRule):
    """Gated DeltaNet's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of x and y.
        num_heads: heads of queries and keys.
        head_k_dim: size of a key; by default all heads together have 3/4 `d_model`.
        head_v_dim: size of a value; by default twice the key's.
        num_value_heads: memories; a multiple of `num_heads`, which it is by default. Neighbours share keys and queries.
        conv_size: length of the convolution's filters.
        gate_bias: whether the projections of both gates have a bias, beside `dt_bias` (the paper's model has).
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
        check_size("d_model", d_model)
        key_dim = head_size("head_k_dim", head_k_dim, 0.75 * d_model, num_heads)
        memories = num_heads if num_value_heads is None else num_value_heads
        heads = Heads(num_heads, memories, key_dim, 2 * key_dim if head_v_dim is None else head_v_dim)
        gamma = Momentum(d_model, memories, muon, momentum)
        super().__init__(d_model, heads, [heads.widths[2], memories, memories], conv_size, gamma, bidirectional)
        bound = d_model**-0.5
        self.gate_bias = nn.Parameter(torch.empty(2 * memories).uniform_(-bound, bound)) if gate_bias else None
        self.dt_bias = step_size_bias(memories)
        self.A_log = nn.Parameter(torch.empty(memories).uniform_(0.01, 16).log())

    def gated(self, channels: Tensor, others: list[Tensor]) -> Projected:
        gate, a, b = others
        return Projected(channels, (a, b), gate)

    def log_alpha_and_beta(self, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(gates[0])
        a, b = (t.to(dtype) for t in gates)
        if self.gate_bias is not None:
            by_a, by_b = self.gate_bias.to(dtype).chunk(2)
            a, b = a + by_a, b + by_b
        log_alpha = -self.A_log.to(dtype).exp() * F.softplus(a + self.dt_bias.to(dtype))
        return log_alpha, torch.sigmoid(b)
