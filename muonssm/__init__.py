"""MuonSSM: momentum and Newton-Schulz conditioned memory updates for state space models.

The names below are imported on first use: the `muonssm` command settles how threads wait before torch is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from muonssm.models.registration import register as _register_models
from muonssm.version import __version__

if TYPE_CHECKING:
    from muonssm.layers import build_mixer
    from muonssm.layers.upcycle import upcycle
    from muonssm.models.classifier import MuonSSMClassifier
    from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan, newton_schulz

__all__ = [
    "MemoryState",
    "Muon",
    "MuonSSMClassifier",
    "__version__",
    "build_mixer",
    "muon_memory",
    "muon_selective_scan",
    "newton_schulz",
    "upcycle",
]

_HOMES = {
    "MuonSSMClassifier": "muonssm.models.classifier",
    "build_mixer": "muonssm.layers",
    "upcycle": "muonssm.layers.upcycle",
}  # all others are in muonssm.ops


def __getattr__(name: str) -> Any:
    if name in ("ops", "layers"):
        return import_module(f"muonssm.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'muonssm' has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "muonssm.ops")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "layers", "ops"})


_register_models()  # with transformers and PEFT, when they are imported
