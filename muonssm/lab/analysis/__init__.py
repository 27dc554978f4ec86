"""Analyses of the memory: functions of a model and a batch, and the analyses of a finished run or comparison.

    from muonssm.lab.analysis import spectrum, rank, memory, gradients, truncation    # of a model and a batch
    from muonssm.lab.analysis import analyze                                          # `muonssm analyze RUN`

Functions of a model and a batch are in `spectra`, `gradient_flow` and `low_rank`; they return NumPy arrays and need
torch and NumPy only. Analyses of an experiment are listed in `analyses`; they return a `Result` with sentences, tables
and figures.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "spectrum": "spectra",
    "rank": "spectra",
    "memory": "spectra",
    "singular_values": "spectra",
    "condition_number": "spectra",
    "effective_rank": "spectra",
    "gradients": "gradient_flow",
    "truncation": "low_rank",
    "replaying": "replay",
    "analyze": "analyses",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public function on first use, so that the command line starts without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
