"""DeltaNet: the delta rule without forgetting (alpha = 1, beta = sigmoid); see `delta_rule` for the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from muonssm.ops import Muon
from muonssm.ops.dtypes import compute_dtype

from .delta_rule import DeltaRule, Heads, head_size
from .mixer import Projected, check_size
from .momentum import Momentum


class DeltaNet(DeltaRule):
    """DeltaNet's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of x and y.
        num_heads: memories.
        head_k_dim, head_v_dim: size of a key and a value; by default all heads together have `d_model`.
        conv_size: length of the convolution's filters.
        output_gate: whether the answer is gated by silu of another projection.
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
        check_size("d_model", d_model)
        key_dim = head_size("head_k_dim", head_k_dim, d_model, num_heads)
        value_dim = head_size("head_v_dim", head_v_dim, d_model, num_heads)
        heads = Heads(num_heads, num_heads, key_dim, value_dim)
        others = [num_heads, heads.widths[2]] if output_gate else [num_heads]
        gamma = Momentum(d_model, num_heads, muon, momentum)
        super().__init__(d_model, heads, others, conv_size, gamma, bidirectional)

    def gated(self, channels: Tensor, others: list[Tensor]) -> Projected:
        beta, *output = others
        return Projected(channels, (beta,), output[0] if output else None)

    def log_alpha_and_beta(self, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        beta = torch.sigmoid(gates[0].to(compute_dtype(gates[0])))
        return torch.zeros_like(beta), beta
