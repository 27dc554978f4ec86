"""Time and memory of functions that do the same job, fit for a noisy machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import profile


def best_seconds(functions: Mapping[str, Callable[[], object]], rounds: int, budget: float = 60.0) -> dict[str, float]:
    """The best time of each function over `rounds` rounds in turn, after one call to warm up.

    Taking turns gives every function the same share of a machine's bad moments; the best of several is what remains
    when nothing interferes. A function that has used up `budget` seconds sits out the remaining rounds.
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
            spent[name] += seconds
            if round_ > 0 or seconds > budget:
                best[name] = min(seconds, best.get(name, seconds))
    return best


def repeated(function: Callable[[], object], times: int) -> Callable[[], object]:
    """`function` many times in a row: for jobs of microseconds, as decoding does them."""

    def run() -> None:
        for _ in range(times):
            function()

    return run


def forward(function: Callable[[], Tensor]) -> Callable[[], object]:
    """`function` as inference runs it."""

    def run() -> Tensor:
        with torch.no_grad():
            return function()

    return run


def training(
    function: Callable[[], Tensor], weight: Tensor, inputs: tuple[Tensor, ...]
) -> Callable[[], tuple[Tensor | None, ...]]:
    """`function` and the gradients of a weighted sum of what it returns in those `inputs` it depends on."""
    return lambda: torch.autograd.grad(function(), inputs, weight, allow_unused=True)


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that tensors allocated by `function` hold at one time, from the allocator's own record."""
    with profile(profile_memory=True) as profiler:
        function()
    total = peak = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def exponent(lengths: list[int], values: list[float]) -> float:
    """The p of the least-squares fit value ~ length^p."""
    x, y = (torch.tensor(v, dtype=torch.float64).log() for v in (lengths, values))
    x, y = x - x.mean(), y - y.mean()
    return ((x * y).sum() / (x * x).sum()).item()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch on `count` threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
