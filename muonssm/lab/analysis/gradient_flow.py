"""How much of the loss's gradient reaches the memory of earlier steps (the paper's appendix C.2).

    g_S(n) = |dL / dS_n|,   g_M(n) = |dL / dM_n|        Frobenius norms over all heads of a layer, mean over sequences

L is the loss of one sequence. By replay: a zero that is added to the state handed on from step n to the next has that
gradient. What step n itself reads is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .replay import Visitor, evenly, replaying


class GradientProfile(NamedTuple):
    """`[layers, T]` each, after the steps `[T]`."""

    steps: np.ndarray
    S: np.ndarray
    M: np.ndarray


class Probes(Visitor):
    """Adds zeros to the states after chosen steps, to see their gradients: `S[layer]`, a list of `[B, H, d, m]`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.steps: dict[int, list[int]] = {}
        self.S: dict[int, list[Tensor]] = {}
        self.M: dict[int, list[Tensor]] = {}

    def stops(self, layer: int, length: int) -> Sequence[int]:
        self.steps[layer] = evenly(length - 1, self.count)
        self.S[layer], self.M[layer] = [], []
        return (*self.steps[layer], length)

    def leave(self, layer: int, step: int, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.S[layer]) == len(self.steps[layer]):  # nothing comes after the last step
            return S, M
        zeros = [torch.zeros_like(X, requires_grad=True) for X in (S, M)]
        self.S[layer].append(zeros[0])
        self.M[layer].append(zeros[1])
        return S + zeros[0], M + zeros[1]


def gradients(model: nn.Module, batch: Mapping[str, Any], count: int = 64) -> GradientProfile:
    """Norms of the gradient along the steps, in every layer."""
    probes = Probes(count)
    model.eval()
    with torch.enable_grad(), replaying(model, probes):
        loss = model(**batch)["loss"]
        zeros = [zero for kind in (probes.S, probes.M) for layer in kind.values() for zero in layer]
        found = torch.autograd.grad(loss, zeros, allow_unused=True)
    sequences = zeros[0].shape[0]
    norms = iter(_norm(gradient, sequences) for gradient in found)
    S, M = ([[next(norms) for _ in layer] for layer in kind.values()] for kind in (probes.S, probes.M))
    shortest = min(len(row) for row in S)
    cut = [np.array([row[:shortest] for row in kind]) for kind in (S, M)]
    return GradientProfile(np.array(probes.steps[0][:shortest]), *cut)


def _norm(gradient: Tensor | None, sequences: int) -> float:
    """Of the loss of one sequence: a batch's loss is the mean of theirs."""
    if gradient is None:
        return 0.0
    return sequences * gradient.double().flatten(1).norm(dim=1).mean().item()
