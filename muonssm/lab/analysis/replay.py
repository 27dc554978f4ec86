"""The memory's states in any model, by replaying its operators: an implementation that stops where one wants to look.

    with replaying(model, visitor):
        model(**batch)

While it lasts, every mixer of the model computes one segment of steps after the other, by the chunked algorithm, and
hands the states between segments to the visitor, which may keep them, change them, or read them in another way. No
kernel knows of it.

    layer   number of the operator's call in the model, from 0
    step    steps done so far, from 1
    S, M    `[B, H, d, m]`; of the selective scan `[B, 1, D, N]`
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.ops.dispatch import IMPLEMENTATIONS, Implementation, Modules
from muonssm.ops.memory import chunked as memory_chunked
from muonssm.ops.padding import run_sequences
from muonssm.ops.selective import chunked as selective_chunked

NAME = "replay"
Result = tuple[Tensor, Tensor, Tensor]  # y, S, M
Segment = Callable[
    [Callable[[Tensor], Tensor] | None], Result
]  # runs a segment, with its queries changed or as they are


class Visitor:
    """What happens along the steps; this one looks at nothing and changes nothing."""

    def stops(self, layer: int, length: int) -> Sequence[int]:
        """Steps after which a segment ends, in order, the last one `length`."""
        return (length,)

    def read(self, layer: int, segment: Segment) -> Result:
        """The outputs of a segment, and the states after it."""
        return segment(None)

    def leave(self, layer: int, step: int, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        """The states with which the next segment begins."""
        return S, M


class States(Visitor):
    """Keeps S and M after chosen steps: `S[layer]` is `[T, B, H, d, m]`, after the steps `steps[layer]`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.steps: dict[int, list[int]] = {}
        self.S: list[Tensor] = []
        self.M: list[Tensor] = []
        self._kept: list[tuple[Tensor, Tensor]] = []

    def stops(self, layer: int, length: int) -> Sequence[int]:
        self._kept = []
        self.steps[layer] = evenly(length, self.count)
        return self.steps[layer]

    def leave(self, layer: int, step: int, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        self._kept.append((S.detach(), M.detach()))
        if step == self.steps[layer][-1]:
            for all_of, parts in zip((self.S, self.M), zip(*self._kept, strict=True), strict=True):
                all_of.append(torch.stack(parts))
        return S, M


def evenly(length: int, count: int) -> list[int]:
    """At most `count` whole numbers from 1 to `length`, evenly apart, the last one `length`."""
    count = min(length, count)
    return [round((i + 1) * length / count) for i in range(count)]


@contextlib.contextmanager
def replaying(model: nn.Module, visitor: Visitor) -> Iterator[None]:
    """Replays every operator that the model calls, with the visitor; raises if the model has none."""
    mixers = [module for module in model.modules() if isinstance(getattr(module, "impl", None), str)]
    if not mixers:
        raise ValueError(f"model is a {type(model).__name__} without a mixer of muonssm; there is nothing to replay")
    before = [mixer.impl for mixer in mixers]
    recorder = _Recorder(visitor)
    memory = SimpleNamespace(run=recorder.memory, chunk_length=_any)
    selective = SimpleNamespace(run=recorder.selective, chunk_length=_any)
    modules = Modules(memory, selective)  # type: ignore[arg-type]
    IMPLEMENTATIONS[NAME] = Implementation(NAME, "segment by segment, watched", lambda: modules)
    try:
        for mixer in mixers:
            mixer.impl = NAME  # type: ignore[assignment]
        yield
    finally:
        for mixer, impl in zip(mixers, before, strict=True):
            mixer.impl = impl
        del IMPLEMENTATIONS[NAME]


def _any(length: int) -> int:
    """Any length will do."""
    return 1


class _Recorder:
    """The two operators, segment by segment."""

    def __init__(self, visitor: Visitor) -> None:
        self.visitor = visitor
        self.layer = -1

    def memory(self, steps: Any, S: Tensor, M: Tensor) -> Result:
        """As `memory.chunked.run`, for any length."""

        def run(part: Any, S: Tensor, M: Tensor) -> Result:
            return run_sequences(memory_chunked.run, memory_chunked.chunk_length, part, S, M, None)

        return self._run(steps, S, M, "q", run)

    def selective(self, steps: Any, A: Tensor | None, S: Tensor, M: Tensor) -> Result:
        """As `selective.chunked.run`, for any length; the visitor sees one head."""

        def rows(part: Any, S: Tensor, M: Tensor) -> Result:
            return selective_chunked.run(part, A, S, M)

        def run(part: Any, S: Tensor, M: Tensor) -> Result:
            y, S, M = run_sequences(rows, selective_chunked.chunk_length, part, S[:, 0], M[:, 0], None)
            return y, S[:, None], M[:, None]

        y, S, M = self._run(steps, S[:, None], M[:, None], "C", run)
        return y, S[:, 0], M[:, 0]

    def _run(
        self, steps: Any, S: Tensor, M: Tensor, query: str, run: Callable[[Any, Tensor, Tensor], Result]
    ) -> Result:
        self.layer += 1
        length, start, outputs = steps.u.shape[1], 0, []
        for stop in self.visitor.stops(self.layer, length):
            part = _between(steps, start, stop, length)

            def segment(
                change: Callable[[Tensor], Tensor] | None, part: Any = part, S: Tensor = S, M: Tensor = M
            ) -> Result:
                changed = part if change is None else part._replace(**{query: change(getattr(part, query))})
                return run(changed, S, M)

            y, S, M = self.visitor.read(self.layer, segment)
            outputs.append(y)
            S, M = self.visitor.leave(self.layer, stop, S, M)
            start = stop
        return torch.cat(outputs, dim=1), S, M


def _between(steps: Any, start: int, stop: int, length: int) -> Any:
    """The steps from `start` to `stop`; what does not vary along them stays."""
    cut = [x if x is None or x.shape[1] != length else x[:, start:stop] for x in steps]
    return type(steps)(*cut)
