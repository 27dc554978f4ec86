"""Spectra and ranks of the memory, as plain arrays.

S, M        `[..., d, m]`, any number of them
sigma_i     singular values of one, falling
kappa       condition number sigma_1 / sigma_last of the min(d, m) there are; infinite where the rank is lower
r_eff       effective rank (sum_i sigma_i)^2 / sum_i sigma_i^2, from 1 to min(d, m) (the paper's appendix C.1)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .replay import States, replaying


class Spectrum(NamedTuple):
    """Of the states after the last step, a row for each layer.

    values      `[layers, n]`   sigma_i / sigma_1, geometric mean over sequences and heads; fewer in a layer: nan
    condition   `[layers]`      kappa, median over sequences and heads
    largest     `[layers]`      sigma_1, mean over sequences and heads
    """

    values: np.ndarray
    condition: np.ndarray
    largest: np.ndarray


class Ranks(NamedTuple):
    """Effective ranks along the steps, means over sequences and heads: `[layers, T]` after the steps `[T]`."""

    steps: np.ndarray
    S: np.ndarray
    M: np.ndarray


def singular_values(X: Tensor) -> Tensor:
    """`[..., min(d, m)]` of `[..., d, m]`, falling, in float64: small ones matter for the condition number."""
    return torch.linalg.svdvals(X.double())


def condition_number(sigma: Tensor) -> Tensor:
    """kappa `[...]` of singular values `[..., n]`; nan where all are zero."""
    return sigma[..., 0] / sigma[..., -1]


def effective_rank(sigma: Tensor) -> Tensor:
    """r_eff `[...]` of singular values `[..., n]`; 0 where all are zero."""
    square = sigma.square().sum(-1)
    return torch.where(square > 0, sigma.sum(-1).square() / square.clamp(min=1e-300), 0.0)


@torch.no_grad()
def states_of(model: nn.Module, batch: Mapping[str, Any], count: int) -> States:
    """S and M of every layer after at most `count` steps, evenly apart; see `replay.States`."""
    states = States(count)
    with replaying(model.eval(), states):
        model(**batch)
    return states


def spectrum(model: nn.Module, batch: Mapping[str, Any]) -> Spectrum:
    """Singular values and condition number of S after the last step.

    All in float64, the model too: in float32 everything below some 1e-7 of the largest would be rounding.
    """
    exact = copy.deepcopy(model).double()
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}
    found = [singular_values(S[-1]).flatten(0, -2) for S in states_of(exact, wide, 1).S]
    widest = max(sigma.shape[-1] for sigma in found)
    rows = np.full((len(found), widest), np.nan)
    for row, sigma in zip(rows, found, strict=True):
        share = sigma / sigma[:, :1].clamp(min=1e-300)
        row[: sigma.shape[-1]] = share.clamp(min=1e-300).log().mean(0).exp().numpy()
    kappa = [condition_number(sigma).nanmedian().item() for sigma in found]
    return Spectrum(rows, np.array(kappa), np.array([sigma[:, 0].mean().item() for sigma in found]))


def rank(model: nn.Module, batch: Mapping[str, Any], count: int = 32) -> Ranks:
    """Effective ranks of S and M along the steps."""
    states = states_of(model, batch, count)
    S, M = ([_mean_rank(X) for X in kept] for kept in (states.S, states.M))
    steps = states.steps[0]
    if any(others != steps for others in states.steps.values()):
        steps = list(range(1, len(S[0]) + 1))  # layers of different lengths have the same number of stops at most
    shortest = min(len(row) for row in S)
    cut = [np.array([row[:shortest] for row in kept]) for kept in (S, M)]
    return Ranks(np.array(steps[:shortest]), *cut)


def _mean_rank(X: Tensor) -> list[float]:
    """Over sequences and heads, for each of the T in `[T, B, H, d, m]`."""
    return effective_rank(singular_values(X)).flatten(1).mean(1).tolist()


class Memory(NamedTuple):
    """S and M of one sequence and head in one layer, `[T, d, m]`, after the steps `[T]`."""

    steps: np.ndarray
    S: np.ndarray
    M: np.ndarray


def memory(model: nn.Module, batch: Mapping[str, Any], layer: int = -1, head: int = 0, count: int = 6) -> Memory:
    """The memory while the first sequence of the batch is read."""
    states = states_of(model, batch, count)
    if not -len(states.S) <= layer < len(states.S):
        raise ValueError(f"layer is {layer}; it may be below {len(states.S)}")
    heads = states.S[layer].shape[2]
    if not 0 <= head < heads:
        raise ValueError(f"head is {head}; it may be from 0 to {heads - 1}")
    S, M = (kept[layer][:, 0, head].numpy() for kept in (states.S, states.M))
    return Memory(np.array(states.steps[layer % len(states.S)]), S, M)
