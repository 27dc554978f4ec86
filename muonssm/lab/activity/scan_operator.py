"""The recurrences as loops that ONNX keeps as loops: its operator Scan, instead of a copy of the step per time step.

Also what else a model has to be told for the time of an export.

Shapes are those of `muonssm.ops.memory.reference` and `muonssm.ops.selective.reference`, whose lines these are; torch's
`scan` runs the body over the leading axis, so time comes first here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from muonssm.layers import modules
from muonssm.models.activity import ActivityClassifier
from muonssm.ops import dispatch
from muonssm.ops.memory.types import MemorySteps
from muonssm.ops.selective.types import SelectiveSteps, retention

NAME = "onnx_scan"


def run_memory(steps: MemorySteps, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the matrix memory; see `memory.reference.run`."""
    B, L, H, _ = steps.u.shape
    corrections = {name: getattr(steps, name) for name in ("residual", "erase")}
    given = {name: x for name, x in corrections.items() if x is not None}
    gates = (steps.log_alpha.exp(), steps.gamma.expand(B, L, H), steps.mu.expand(B, L, H), *given.values())

    def step(state: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        S, M = state
        q, k, u = (x[..., None] for x in inputs[:3])
        alpha, gamma, mu, *rest = (x[..., None, None] for x in inputs[3:])
        scale = dict(zip(given, rest, strict=True))
        if "residual" in scale:
            u = u - alpha * scale["residual"] * (S @ k)
        M = gamma * M + u * k.mT
        if "erase" in scale:
            S = S - scale["erase"] * (S @ k) * k.mT
        S = alpha * S + mu * M
        return (S, M), (S @ q).squeeze(-1)

    return _scan(step, S, M, (steps.q, steps.k, steps.u, *gates))


def run_selective(steps: SelectiveSteps, A: Tensor | None, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run the diagonal memory; see `selective.reference.run`."""
    B, L, _ = steps.u.shape
    gates = (steps.gamma.expand(B, L, 1), steps.mu.expand(B, L, 1))

    def step(state: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...]) -> Any:
        S, M = state
        u, dt, key, query, gamma, mu = inputs
        M = gamma[..., None] * M + u[..., None] * key[:, None]
        S = retention(dt, A, key) * S + mu[..., None] * M
        return (S, M), (S * query[:, None]).sum(-1)

    return _scan(step, S, M, (steps.u, steps.dt, steps.B, steps.C, *gates))


def _scan(step: Any, S: Tensor, M: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Run `step` over time: inputs and the output are `[B, L, ...]`."""
    from torch._higher_order_ops.scan import scan

    # Copies: torch refuses tensors that share memory, as S and M at the start do.
    time_first = tuple(x.transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in inputs)
    (S, M), y = scan(step, (S.clone(), M.clone()), time_first)
    return y.transpose(0, 1), S, M


@contextmanager
def recurrences_as_scans(model: ActivityClassifier) -> Iterator[None]:
    """Let the mixers of a model run the functions above, for the time of an export."""

    def one_step(length: int) -> int:
        return 1

    def load() -> Any:
        memory, selective = (SimpleNamespace(run=run, chunk_length=one_step) for run in (run_memory, run_selective))
        return dispatch.Modules(memory, selective)  # type: ignore[arg-type]

    scans = dispatch.Implementation(NAME, "loops for ONNX", load)
    dispatch.IMPLEMENTATIONS[NAME] = scans
    try:
        with running(model, NAME):
            yield
    finally:
        del dispatch.IMPLEMENTATIONS[NAME]


@contextmanager
def running(model: ActivityClassifier, impl: str) -> Iterator[None]:
    """Let the mixers of a model run an implementation by name, and norms take one path for all sizes.

    A norm has a shortcut for small tensors. A program that took it would hold for small numbers of windows alone.
    """
    with ExitStack() as stack:
        stack.enter_context(_set(modules, "SMALL", 0))
        for mixer in model.mixers:
            stack.enter_context(_set(mixer, "impl", impl))
        yield


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and at the end set it back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
