"""The implementations of the two operators, and which one a call gets. Choosing is kept apart from computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from . import cpu_library
from .triton import config as triton_config
from .triton import support as triton_support


class Problem(NamedTuple):
    """What the choice depends on: nothing else may influence it."""

    device: torch.device
    dtype: torch.dtype  # of the computation and the state: float32 or float64
    length: int  # steps of the longest sequence
    width: int = 0  # key dimension, or states of a channel
    transformed: bool = False  # by torch.func or forward-mode differentiation, which see through torch's own ops only


class Modules(NamedTuple):
    """An implementation's module for each operator, with its `run` and `chunk_length`."""

    memory: ModuleType
    selective: ModuleType


@dataclass(frozen=True)
class Implementation:
    """One way to compute both operators: `ops/memory/NAME.py` and `ops/selective/NAME.py`, imported on first use."""

    name: str
    summary: str
    load: Callable[[], Modules]
    fused: bool = False  # takes the inputs as they came: casts, scales and packing are its own business
    transformable: bool = False  # made of torch's own operations throughout

    def unsupported(self, problem: Problem) -> str | None:
        """Why this implementation cannot compute `problem`; None if it can."""
        if problem.dtype == torch.float64 and problem.device.type == "mps":
            return "the mps device has no float64"
        if problem.transformed and not self.transformable:
            return "it has operations of its own, which torch.func and forward-mode differentiation cannot see through"
        return None


class NativeImplementation(Implementation):
    """The C++ kernels: usable on a CPU, where they were built."""

    def unsupported(self, problem: Problem) -> str | None:
        """Why the kernels cannot compute `problem`; None if they can."""
        if problem.device.type != "cpu":
            return f"the C++ kernels run on a CPU, not on {problem.device.type}"
        return super().unsupported(problem) or cpu_library.unavailable()


class TritonImplementation(Implementation):
    """The Triton kernels: usable on a GPU, or on a CPU under Triton's interpreter."""

    def unsupported(self, problem: Problem) -> str | None:
        """Why the kernels cannot compute `problem`; None if they can."""
        if problem.dtype == torch.float64:
            return "the Triton kernels compute in float32, not float64"
        if problem.width > triton_config.LARGEST:
            return f"the Triton kernels hold {triton_config.LARGEST} key dimensions or states at most"
        return super().unsupported(problem) or triton_support.unavailable(problem.device)


# Import statements, one function each: a compiler follows these, where it cannot follow an import by name.


def _reference() -> Modules:
    from .memory import reference as memory
    from .selective import reference as selective

    return Modules(memory, selective)


def _scan() -> Modules:
    from .memory import scan as memory
    from .selective import scan as selective

    return Modules(memory, selective)


def _chunked() -> Modules:
    from .memory import chunked as memory
    from .selective import chunked as selective

    return Modules(memory, selective)


def _native() -> Modules:
    from .memory import native as memory
    from .selective import native as selective

    return Modules(memory, selective)


def _triton() -> Modules:
    from .memory import triton as memory
    from .selective import triton as selective

    return Modules(memory, selective)


IMPLEMENTATIONS: dict[str, Implementation] = {
    implementation.name: implementation
    for implementation in (
        Implementation(
            "reference", "a loop over the steps, to be read and as the oracle", _reference, transformable=True
        ),
        Implementation("scan", "the paper's Algorithm 1: a parallel scan over every step", _scan, transformable=True),
        Implementation("chunked", "matmuls within chunks, a short recurrence across them", _chunked),
        NativeImplementation("native", "C++ on a CPU: one pass over the state a step", _native, fused=True),
        TritonImplementation("triton", "Triton on a GPU: the chunked form as kernels", _triton, fused=True),
    )
}


def auto_order(problem: Problem) -> tuple[str, ...]:
    """Names that `impl="auto"` tries, best first.

    On a CPU `native`, where it was built, on a GPU `triton`, where it is installed. Otherwise `reference` for a single
    step (decoding has nothing to parallelise), and `chunked` for anything longer. `scan` costs a factor of m more work
    and is taken only when asked for.
    """
    kernels = {"cpu": ("native",), "cuda": ("triton",)}.get(problem.device.type, ())
    return (*kernels, "reference") if problem.length <= 1 else (*kernels, "chunked", "reference")


def choose(impl: str, problem: Problem) -> Implementation:
    """The implementation for `impl`: one asked for by name is taken or refused with the reason, never replaced."""
    if impl == "auto":
        candidates = [IMPLEMENTATIONS[name] for name in auto_order(problem)]
        reasons = [candidate.unsupported(problem) for candidate in candidates]
        for candidate, reason in zip(candidates, reasons, strict=True):
            if reason is None:
                return candidate
        tried = "; ".join(f"{c.name}: {reason}" for c, reason in zip(candidates, reasons, strict=True))
        raise ValueError(f"impl is 'auto', and no implementation can run this: {tried}")
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl is {impl!r}; it may be 'auto' or one of {sorted(IMPLEMENTATIONS)}")
    reason = IMPLEMENTATIONS[impl].unsupported(problem)
    if reason is not None:
        raise ValueError(f"impl is {impl!r}, which cannot run this: {reason}; impl='auto' picks one that can")
    return IMPLEMENTATIONS[impl]
