"""Where a mixer's gamma comes from: a constant, one learned value per head, or a learned function of the input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.checks import check_choice
from muonssm.ops import Muon

MOMENTUM_VARIANTS = ("fixed", "per_head", "per_step")


class Momentum(nn.Module):
    """gamma of a mixer with `heads` memories.

        fixed       gamma = muon.gamma
        per_head    gamma_h = sigmoid(g_h)
        per_step    gamma_{t,h} = sigmoid(w_h . x_t + g_h),   w = 0 at the start

    The learned variants start at `muon.gamma`; the sigmoid keeps them in (0, 1).
    """

    def __init__(self, d_model: int, heads: int, muon: Muon, variant: str) -> None:
        super().__init__()
        if not isinstance(muon, Muon):
            raise TypeError(f"muon must be a Muon (Muon.off() is the plain backbone), got {type(muon).__name__}")
        check_choice("momentum", variant, MOMENTUM_VARIANTS)
        if isinstance(muon.gamma, Tensor):
            raise TypeError("muon.gamma must be a number in a mixer, got a tensor; use momentum='per_head' to learn it")
        if variant != "fixed" and not 0 < muon.gamma < 1:
            raise ValueError(f"muon.gamma must be in (0, 1) with momentum={variant!r}, got {muon.gamma!r}")
        self.muon, self.variant = muon, variant
        if variant != "fixed":
            self.bias = nn.Parameter(torch.full((heads,), math.log(muon.gamma / (1 - muon.gamma))))
        if variant == "per_step":
            self.weight = nn.Parameter(torch.zeros(heads, d_model))

    def gate(self, x: Tensor) -> Tensor | None:
        """Compute gamma `[B, L, heads]` of x `[B, L, d_model]` if it depends on the step; otherwise return None."""
        return self(x, of_input=True) if self.variant == "per_step" else None  # a call, so that hooks see it

    def forward(self, gate: Tensor | None, of_input: bool = False) -> Any:
        """Return the `Muon` of one operator call, with the learned gamma if there is one; `of_input`, see `gate`."""
        if of_input:
            assert gate is not None
            return torch.sigmoid(nn.functional.linear(gate, self.weight.to(gate.dtype)).to(self.bias.dtype) + self.bias)
        if self.variant == "fixed":
            return self.muon
        return self.muon.with_gamma(torch.sigmoid(self.bias) if gate is None else gate)

    def extra_repr(self) -> str:
        """Describe the module for `print(mixer)`."""
        return f"{self.muon}, {self.variant}"
