"""Read the memory of any model while it runs, by replaying its operators segment by segment.

    with replaying(model, visitor):
        model(**batch)

Inside the block every mixer of the model computes with the `chunked` implementation, whatever its `impl` is. A sequence
is cut into segments where the visitor asks for it. Between two segments the visitor sees the states; it can keep them,
change them, or change the queries that read a segment. No kernel knows about replay.

    layer   index of the operator call in the model, from 0
    step    number of time steps done so far, from 1
    S, M    memory and momentum, `[B, H, d, m]`; `[B, 1, D, N]` for the selective scan
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
Outputs = tuple[Tensor, Tensor, Tensor]  # y, and S and M after the segment
ChangeQueries = Callable[[Tensor], Tensor]
RunSegment = Callable[[ChangeQueries | None], Outputs]


class Visitor:
    """Decides where segments end and sees the states between them. This base class changes nothing."""

    def segment_ends(self, layer: int, length: int) -> Sequence[int]:
        """Steps after which a segment ends, in increasing order; the last one is `length`."""
        return (length,)

    def read_segment(self, layer: int, run: RunSegment) -> Outputs:
        """Run a segment: `run(None)`, or `run(change)` to change its queries."""
        return run(None)

    def after_segment(self, layer: int, step: int, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        """The states from which the next segment starts."""
        return S, M


class StateRecorder(Visitor):
    """Keeps S and M after at most `count` evenly spaced steps of every layer.

    `S[layer]` and `M[layer]` are `[T, B, H, d, m]`, after the steps `steps[layer]`.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.steps: dict[int, list[int]] = {}
        self.S: list[Tensor] = []
        self.M: list[Tensor] = []
        self._current_layer: list[tuple[Tensor, Tensor]] = []

    def segment_ends(self, layer: int, length: int) -> Sequence[int]:
        self._current_layer = []
        self.steps[layer] = evenly_spaced(length, self.count)
        return self.steps[layer]

    def after_segment(self, layer: int, step: int, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
        self._current_layer.append((S.detach(), M.detach()))
        if step == self.steps[layer][-1]:
            memories, momenta = zip(*self._current_layer, strict=True)
            self.S.append(torch.stack(memories))
            self.M.append(torch.stack(momenta))
        return S, M


def evenly_spaced(length: int, count: int) -> list[int]:
    """At most `count` evenly spaced integers from 1 to `length`; the last one is `length`."""
    count = min(length, count)
    return [round((i + 1) * length / count) for i in range(count)]


@contextlib.contextmanager
def replaying(model: nn.Module, visitor: Visitor) -> Iterator[None]:
    """Replay every operator call of the model with a visitor, using the `chunked` implementation.

    Each mixer's `impl` is restored at the end. Raises ValueError if the model has no mixer.
    """
    mixers = [module for module in model.modules() if isinstance(getattr(module, "impl", None), str)]
    if not mixers:
        raise ValueError(f"model must contain a mixer of muonssm, got a {type(model).__name__} without one")
    impls = [mixer.impl for mixer in mixers]
    replay = _Replay(visitor)
    modules = Modules(
        SimpleNamespace(run=replay.memory, chunk_length=_any_length),  # type: ignore[arg-type]
        SimpleNamespace(run=replay.selective, chunk_length=_any_length),  # type: ignore[arg-type]
    )
    IMPLEMENTATIONS[NAME] = Implementation(NAME, "chunked, segment by segment, with a visitor", lambda: modules)
    try:
        for mixer in mixers:
            mixer.impl = NAME  # type: ignore[assignment]
        yield
    finally:
        for mixer, impl in zip(mixers, impls, strict=True):
            mixer.impl = impl
        del IMPLEMENTATIONS[NAME]


def _any_length(length: int) -> int:
    """The chunk length of replay: sequences are not padded, because `_Replay` cuts and pads them itself."""
    return 1


class _Replay:
    """Both operators, run segment by segment; counts the calls to know the layer."""

    def __init__(self, visitor: Visitor) -> None:
        self.visitor = visitor
        self.layer = -1

    def memory(self, steps: Any, S: Tensor, M: Tensor) -> Outputs:
        """The matrix memory: `memory.chunked.run` for any length."""

        def run(segment: Any, S: Tensor, M: Tensor) -> Outputs:
            return run_sequences(memory_chunked.run, memory_chunked.chunk_length, segment, S, M, None)

        return self._run(steps, S, M, "q", run)

    def selective(self, steps: Any, A: Tensor | None, S: Tensor, M: Tensor) -> Outputs:
        """The selective scan: `selective.chunked.run` for any length; its states have one head for the visitor."""

        def run_chunked(segment: Any, S: Tensor, M: Tensor) -> Outputs:
            return selective_chunked.run(segment, A, S, M)

        def run(segment: Any, S: Tensor, M: Tensor) -> Outputs:
            y, S, M = run_sequences(run_chunked, selective_chunked.chunk_length, segment, S[:, 0], M[:, 0], None)
            return y, S[:, None], M[:, None]

        y, S, M = self._run(steps, S[:, None], M[:, None], "C", run)
        return y, S[:, 0], M[:, 0]

    def _run(
        self, steps: Any, S: Tensor, M: Tensor, query: str, run: Callable[[Any, Tensor, Tensor], Outputs]
    ) -> Outputs:
        """Run the segments one after the other; `query` is the field of `steps` that reads the memory."""
        self.layer += 1
        length, start, outputs = steps.u.shape[1], 0, []
        for stop in self.visitor.segment_ends(self.layer, length):
            segment = _slice_steps(steps, start, stop, length)

            def run_segment(
                change: ChangeQueries | None, segment: Any = segment, S: Tensor = S, M: Tensor = M
            ) -> Outputs:
                if change is not None:
                    segment = segment._replace(**{query: change(getattr(segment, query))})
                return run(segment, S, M)

            y, S, M = self.visitor.read_segment(self.layer, run_segment)
            outputs.append(y)
            S, M = self.visitor.after_segment(self.layer, stop, S, M)
            start = stop
        return torch.cat(outputs, dim=1), S, M


def _slice_steps(steps: Any, start: int, stop: int, length: int) -> Any:
    """The steps from `start` to `stop`; tensors without a time dimension stay whole."""
    cut = [x if x is None or x.shape[1] != length else x[:, start:stop] for x in steps]
    return type(steps)(*cut)
