"""The gradient of the loss with respect to the memory of earlier steps (appendix C.2 of the paper).

    g_S(n) = |dL / dS_n|,   g_M(n) = |dL / dM_n|        Frobenius norms over all heads of a layer, mean over sequences

L is the loss of one sequence. Replay adds a zero tensor to the state that step n hands to step n + 1; the gradient of
that zero is dL / dS_n. The output of step n itself does not contribute to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .replay import Visitor, evenly_spaced, replaying


class GradientProfile(NamedTuple):
    """Gradient norms of S and M `[layers, T]` after the steps `[T]`."""

    steps: np.ndarray
    S: np.ndarray
    M: np.ndarray


class ZeroProbes(Visitor):
    """Adds zeros that require gradients to the states after at most `count` evenly spaced steps.

    `S[layer]` and `M[layer]` are lists of `[B, H, d, m]`, one per step of `steps[layer]`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.steps: dict[int, list[int]] = {}
        self.S: dict[int, list[Tensor]] = {}
        self.M: dict[int, list[Tensor]] = {}

    def segment_ends(self, layer: int, length: int) -> Sequence[int]:
        self.steps[layer] = evenly_spaced(length - 1, self.count)
        self.S[layer], self.M[layer] = [], []
        return (*self.steps[layer], length)

    def after_segment(self, layer: int, step: int, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.S[layer]) == len(self.steps[layer]):  # no step reads the state after the last one
            return S, M
        zero_S, zero_M = (torch.zeros_like(X, requires_grad=True) for X in (S, M))
        self.S[layer].append(zero_S)
        self.M[layer].append(zero_M)
        return S + zero_S, M + zero_M


def gradients(model: nn.Module, batch: Mapping[str, Any], count: int = 64) -> GradientProfile:
    """Compute gradient norms of S and M in every layer, after at most `count` evenly spaced steps."""
    probes = ZeroProbes(count)
    model.eval()
    with torch.enable_grad(), replaying(model, probes):
        loss = model(**batch)["loss"]
        zeros = [zero for states in (probes.S, probes.M) for layer in states.values() for zero in layer]
        of_zeros = torch.autograd.grad(loss, zeros, allow_unused=True)
    sequences = zeros[0].shape[0]
    norms = iter(_norm_per_sequence(gradient, sequences) for gradient in of_zeros)
    S, M = ([[next(norms) for _ in layer] for layer in states.values()] for states in (probes.S, probes.M))
    shortest = min(len(layer) for layer in S)
    cut = [np.array([layer[:shortest] for layer in layers]) for layers in (S, M)]
    return GradientProfile(np.array(probes.steps[0][:shortest]), *cut)


def _norm_per_sequence(gradient: Tensor | None, sequences: int) -> float:
    """The mean norm for the loss of one sequence; the loss of a batch is the mean of theirs, hence the factor."""
    if gradient is None:
        return 0.0
    return sequences * gradient.double().flatten(1).norm(dim=1).mean().item()
