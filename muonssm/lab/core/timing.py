"""Wall-clock times of functions that do the same job, measured so that a noisy machine favors none of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch


def best_seconds(functions: Mapping[str, Callable[[], object]], rounds: int, budget: float = 60.0) -> dict[str, float]:
    """The shortest time of each function over `rounds` rounds, after one call to warm up.

    The functions take turns, so that interruptions by other processes hit all of them alike; the shortest time is the
    one with the least interruption. A function that has used more than `budget` seconds skips the remaining rounds.
    The first call, in which some compile themselves, does not count.
    """
    best: dict[str, float] = {}
    spent = dict.fromkeys(functions, 0.0)
    for round_ in range(rounds + 1):
        for name, function in functions.items():
            if spent[name] > budget and name in best:
                continue
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            if round_ > 0:
                spent[name] += seconds
                best[name] = min(seconds, best.get(name, seconds))
    return best


def fit_exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    """The exponent p of the least-squares fit value ~ length^p."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (lengths, values))
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x * x).sum()).item()
