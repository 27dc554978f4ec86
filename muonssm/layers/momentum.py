"""Where a mixer's gamma comes from: a number, one learned value a head, or a learned function of the input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from muonssm.ops import Muon

KINDS = ("fixed", "per_head", "per_step")


class Momentum(nn.Module):
    """gamma of a mixer with `heads` memories; learned kinds start at `muon.gamma` and stay in (0, 1) by a sigmoid.

    fixed       gamma = muon.gamma
    per_head    gamma_h = sigmoid(g_h)
    per_step    gamma_{t,h} = sigmoid(w_h . x_t + g_h),   w = 0 at the start
    """

    def __init__(self, d_model: int, heads: int, muon: Muon, kind: str) -> None:
        super().__init__()
        if not isinstance(muon, Muon):
            raise TypeError(f"muon is of type {type(muon).__name__}; it may be a Muon (Muon.off() is plain)")
        if kind not in KINDS:
            raise ValueError(f"momentum is {kind!r}; it may be one of {KINDS}")
        if isinstance(muon.gamma, Tensor):
            raise TypeError("muon.gamma is a tensor; for a mixer it may be a float (learned ones: momentum='per_head')")
        if kind != "fixed" and not 0 < muon.gamma < 1:
            raise ValueError(f"muon.gamma is {muon.gamma!r}; with momentum={kind!r} it may be in (0, 1), to start from")
        self.muon, self.kind = muon, kind
        if kind != "fixed":
            self.bias = nn.Parameter(torch.full((heads,), math.log(muon.gamma / (1 - muon.gamma))))
        if kind == "per_step":
            self.weight = nn.Parameter(torch.zeros(heads, d_model))

    def gate(self, x: Tensor) -> Tensor | None:
        """gamma `[B, L, heads]` from x `[B, L, d_model]` where it depends on the step, otherwise None."""
        if self.kind != "per_step":
            return None
        return torch.sigmoid(nn.functional.linear(x, self.weight.to(x.dtype)).to(self.bias.dtype) + self.bias)

    def forward(self, gate: Tensor | None) -> Muon:
        """The `Muon` of one call of the operator."""
        if self.kind == "fixed":
            return self.muon
        return self.muon.with_gamma(torch.sigmoid(self.bias) if gate is None else gate)

    def extra_repr(self) -> str:
        """What `print(mixer)` says."""
        return f"{self.muon}, {self.kind}"
