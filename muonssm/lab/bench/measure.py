"""Functions to time, their peak memory, and the check that a contender computes the right result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import profile

TOLERANCE = 1e-4  # largest relative RMS error of a contender


def check_close(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise unless a contender's result is right, so that no time is reported for a wrong one; nan is wrong."""
    if actual.shape != expected.shape:
        raise RuntimeError(
            f"{name} must have shape {list(expected.shape)}, got {list(actual.shape)}; no time is reported"
        )
    error = ((actual - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name} must have a relative error <= {TOLERANCE:g}, got {error:.2e}; no time is reported")


def repeated(function: Callable[[], object], times: int) -> Callable[[], object]:
    """Call `function` many times in a row, for jobs of microseconds such as decoding."""

    def run() -> None:
        for _ in range(times):
            function()

    return run


def forward(function: Callable[[], Tensor]) -> Callable[[], object]:
    """Call `function` without gradients, as in inference."""

    def run() -> Tensor:
        with torch.no_grad():
            return function()

    return run


def training(
    function: Callable[[], Tensor], weight: Tensor, inputs: tuple[Tensor, ...]
) -> Callable[[], tuple[Tensor | None, ...]]:
    """Call `function` and compute the gradients of its output, weighted by `weight`, with respect to `inputs`."""
    return lambda: torch.autograd.grad(function(), inputs, weight, allow_unused=True)


def peak_bytes(function: Callable[[], object]) -> int:
    """The largest number of bytes that tensors allocated by `function` hold at one time, from torch's profiler."""
    with profile(profile_memory=True) as profiler:
        function()
    total = peak = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch on `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
