"""Analysis: what runs show, as arrays, tables, pictures and pages. Nothing imports it but the command line.

Of a model and a batch: `spectrum`, `rank`, `memory` (geometry), `gradients` and `truncation`. Of a run, the commands
`muonssm analyze` (analyses.py) and `muonssm report`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PLACES = {
    "spectrum": "geometry",
    "rank": "geometry",
    "memory": "geometry",
    "singular_values": "geometry",
    "condition_number": "geometry",
    "effective_rank": "geometry",
    "gradients": "gradient_flow",
    "truncation": "low_rank",
    "replaying": "replay",
    "analyze": "analyses",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    """Functions, imported when they are first asked for: the page needs no torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_PLACES[name]}", __name__), name)
