"""The implementations of both operators, and which one a call gets.

A named implementation runs, or raises an error that says why. `impl="auto"` takes the best one that can run the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from . import cpu_library
from .decoding import is_one_step
from .triton import config as triton_config
from .triton import support as triton_support
from .triton.kinds import Kind


class Problem(NamedTuple):
    """Everything that the choice depends on."""

    device: torch.device
    dtype: torch.dtype  # of the computation and the state: float32 or float64
    length: int  # time steps of the longest sequence
    width: int = 0  # key dimension, or states per channel
    transformed: bool = False  # torch.func or forward-mode differentiation surrounds the call
    orthogonalized: bool = False  # `Muon.orthogonalize` is set
    kind: Kind | None = None  # of call, where `auto` may take Triton


class Modules(NamedTuple):
    """The modules of an implementation, one per operator: `ops/memory/NAME.py` and `ops/selective/NAME.py`."""

    memory: ModuleType
    selective: ModuleType


def _no_limits(problem: Problem) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute both operators. `load` imports its modules on first use."""

    name: str
    summary: str
    load: Callable[[], Modules]
    limits: Callable[[Problem], str | None] = _no_limits  # why it cannot run a problem; None if it can
    distrusted: Callable[[Problem], str | None] = _no_limits  # why `auto` leaves out a problem that it can run
    raw_inputs: bool = False  # `run_raw` takes the caller's inputs and does casts, write scales and packing itself
    transformable: bool = False  # consists of torch's own operations
    orthogonalizes: bool = False  # serves the experiment `Muon.orthogonalize`

    def unsupported(self, problem: Problem) -> str | None:
        """Return why this implementation cannot run `problem`; None if it can."""
        if problem.dtype == torch.float64 and problem.device.type == "mps":
            return "the mps device has no float64"
        if problem.transformed and not self.transformable:
            return "torch.func and forward-mode differentiation cannot see through its custom operations"
        if problem.orthogonalized and not self.orthogonalizes:
            return "only 'reference' and 'chunked' serve the experiment Muon(orthogonalize=...)"
        return self.limits(problem)


def _native_limits(problem: Problem) -> str | None:
    if problem.device.type != "cpu":
        return f"the C++ kernels run on a CPU, not on {problem.device.type}"
    return cpu_library.unavailable()


def _triton_limits(problem: Problem) -> str | None:
    if problem.dtype == torch.float64:
        return "the Triton kernels compute in float32, not float64"
    if problem.width > triton_config.LARGEST:
        return f"the Triton kernels support at most {triton_config.LARGEST} key dimensions or states"
    return triton_support.unavailable(problem.device)


def _triton_distrusted(problem: Problem) -> str | None:
    if problem.kind is None:
        return None
    from .triton.self_check import distrusted

    return distrusted(problem.device, is_one_step(problem.length, packed=False), *problem.kind)


def may_take_triton(device: torch.device) -> bool:
    """Return whether `auto` can choose the Triton kernels on `device`, and so needs the kind of a call."""
    return "triton" in KERNELS.get(device.type, ())


# One function with import statements per implementation: torch.compile follows these, but not an import by name.


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
    "reference": Implementation(
        "reference", "the equations, in a loop over time steps", _reference, transformable=True, orthogonalizes=True
    ),
    "scan": Implementation("scan", "Algorithm 1 of the paper: a parallel scan", _scan, transformable=True),
    "chunked": Implementation(
        "chunked", "matmuls within chunks, a recurrence across chunks", _chunked, orthogonalizes=True
    ),
    "native": Implementation("native", "C++ kernels on a CPU", _native, _native_limits, raw_inputs=True),
    "triton": Implementation(
        "triton", "Triton kernels on a GPU", _triton, _triton_limits, _triton_distrusted, raw_inputs=True
    ),
}

KERNELS = {"cpu": ("native",), "cuda": ("triton",)}
"""Compiled kernels by type of device, which `auto` prefers."""


def auto_order(problem: Problem) -> tuple[str, ...]:
    """Return the names that `impl="auto"` tries, best first.

    Compiled kernels come first. Without them, `reference` serves a single step, which has nothing to parallelize, and
    `chunked` serves longer sequences. `scan` does m times more work and only runs by name.
    """
    kernels = KERNELS.get(problem.device.type, ())
    if is_one_step(problem.length, packed=False):
        return (*kernels, "reference")
    return (*kernels, "chunked", "reference")


def choose(impl: str, problem: Problem) -> Implementation:
    """Return the implementation that runs `problem`; raise ValueError with the reasons if there is none."""
    if impl == "auto":
        return _choose_auto(problem)
    if not isinstance(impl, str) or impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {sorted(IMPLEMENTATIONS)}, got {impl!r}")
    reason = IMPLEMENTATIONS[impl].unsupported(problem)
    if reason is not None:
        raise ValueError(f"impl={impl!r} cannot run this call: {reason}; impl='auto' chooses one that can")
    return IMPLEMENTATIONS[impl]


def _choose_auto(problem: Problem) -> Implementation:
    reasons = {}
    for name in auto_order(problem):
        implementation = IMPLEMENTATIONS[name]
        reasons[name] = implementation.unsupported(problem) or implementation.distrusted(problem)
        if reasons[name] is None:
            return IMPLEMENTATIONS[name]
    tried = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ValueError(f"impl='auto' found no implementation that can run this call: {tried}")
