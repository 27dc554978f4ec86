"""Where the operators learn that their sequences are split over processes; `muonssm.distributed` does the rest.

An operator asks `current()` first. If it returns a `Split`, the operator's arguments are one process's piece of a
longer sequence, and the split runs the call. Inside the split, `use(None)` gives operators their usual meaning back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Split(Protocol):
    """Runs the operators on pieces of sequences. The arguments are those of the operators."""

    def memory(self, *inputs: Any, **settings: Any) -> Any:
        """Run `muon_memory`."""

    def selective(self, *inputs: Any, **settings: Any) -> Any:
        """Run `muon_selective_scan`."""

    def convolution(self, *inputs: Any, **settings: Any) -> Any:
        """Run `causal_convolution`."""


_current: Split | None = None  # of the process, not of a thread: autograd recomputes checkpoints in threads of its own


def current() -> Split | None:
    """Return the split of the calls that follow; None if every call has whole sequences."""
    return _current


@contextmanager
def use(split: Split | None) -> Iterator[None]:
    """Let calls inside the `with` statement belong to `split`."""
    global _current
    before, _current = _current, split
    try:
        yield
    finally:
        _current = before
