"""Spectra and ranks of the memory of a model on a batch, as NumPy arrays.

S, M        memory and momentum, `[..., d, m]`
sigma_i     singular values of one matrix, in decreasing order
kappa       condition number sigma_1 / sigma_n with n = min(d, m); infinite for a lower rank
r_eff       effective rank (sum_i sigma_i)^2 / sum_i sigma_i^2, from 1 to min(d, m) (appendix C.1 of the paper)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .replay import StateRecorder, replaying

TINY = 1e-300  # keeps logarithms and quotients of zeros finite, in float64


class Spectrum(NamedTuple):
    """The spectrum of S after the last step.

    Attributes:
        values: sigma_i / sigma_1 `[layers, n]`, geometric mean over sequences and heads; nan where a layer has fewer.
        condition: kappa `[layers]`, median over sequences and heads.
        largest: sigma_1 `[layers]`, mean over sequences and heads.
    """

    values: np.ndarray
    condition: np.ndarray
    largest: np.ndarray


class Ranks(NamedTuple):
    """Effective ranks of S and M `[layers, T]` after the steps `[T]`, means over sequences and heads."""

    steps: np.ndarray
    S: np.ndarray
    M: np.ndarray


class Memory(NamedTuple):
    """S and M `[T, d, m]` of one sequence, layer and head, after the steps `[T]`."""

    steps: np.ndarray
    S: np.ndarray
    M: np.ndarray


def singular_values(X: Tensor) -> Tensor:
    """Singular values `[..., min(d, m)]` of `[..., d, m]`, decreasing, in float64 for the sake of the small ones."""
    return torch.linalg.svdvals(X.double())


def condition_number(sigma: Tensor) -> Tensor:
    """kappa `[...]` of singular values `[..., n]`; nan where all are zero."""
    return sigma[..., 0] / sigma[..., -1]


def effective_rank(sigma: Tensor) -> Tensor:
    """r_eff `[...]` of singular values `[..., n]`; 0 where all are zero."""
    square = sigma.square().sum(-1)
    return torch.where(square > 0, sigma.sum(-1).square() / square.clamp(min=TINY), 0.0)


@torch.no_grad()
def record_states(model: nn.Module, batch: Mapping[str, Any], count: int) -> StateRecorder:
    """Record S and M of every layer after at most `count` evenly spaced steps."""
    states = StateRecorder(count)
    with replaying(model.eval(), states):
        model(**batch)
    return states


def spectrum(model: nn.Module, batch: Mapping[str, Any]) -> Spectrum:
    """Compute singular values and condition number of S after the last step.

    A copy of the model runs in float64: in float32, everything below about 1e-7 of sigma_1 would be rounding error.
    """
    exact = copy.deepcopy(model).double()
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}
    sigmas = [singular_values(S[-1]).flatten(0, -2) for S in record_states(exact, wide, 1).S]
    values = np.full((len(sigmas), max(sigma.shape[-1] for sigma in sigmas)), np.nan)
    for layer, sigma in zip(values, sigmas, strict=True):
        relative = sigma / sigma[:, :1].clamp(min=TINY)
        layer[: sigma.shape[-1]] = relative.clamp(min=TINY).log().mean(0).exp().numpy()
    kappa = [condition_number(sigma).nanmedian().item() for sigma in sigmas]
    return Spectrum(values, np.array(kappa), np.array([sigma[:, 0].mean().item() for sigma in sigmas]))


def rank(model: nn.Module, batch: Mapping[str, Any], count: int = 32) -> Ranks:
    """Compute effective ranks of S and M after at most `count` evenly spaced steps."""
    states = record_states(model, batch, count)
    S, M = ([_mean_rank(X) for X in layers] for layers in (states.S, states.M))
    steps = states.steps[0]
    if any(others != steps for others in states.steps.values()):
        steps = list(range(1, len(S[0]) + 1))  # layers have sequences of different lengths: number the stops instead
    shortest = min(len(layer) for layer in S)
    cut = [np.array([layer[:shortest] for layer in layers]) for layers in (S, M)]
    return Ranks(np.array(steps[:shortest]), *cut)


def _mean_rank(X: Tensor) -> list[float]:
    """Mean effective rank over sequences and heads, for each of the T matrices of `[T, B, H, d, m]`."""
    return effective_rank(singular_values(X)).flatten(1).mean(1).tolist()


def memory(model: nn.Module, batch: Mapping[str, Any], layer: int = -1, head: int = 0, count: int = 6) -> Memory:
    """Record S and M of one layer and head while the model reads the first sequence of the batch."""
    states = record_states(model, batch, count)
    layers = len(states.S)
    if not -layers <= layer < layers:
        raise ValueError(f"layer must be in {-layers} to {layers - 1}, got {layer}")
    heads = states.S[layer].shape[2]
    if not 0 <= head < heads:
        raise ValueError(f"head must be in 0 to {heads - 1}, got {head}")
    S, M = (all_layers[layer][:, 0, head].numpy() for all_layers in (states.S, states.M))
    return Memory(np.array(states.steps[layer % layers]), S, M)
