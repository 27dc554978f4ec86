"""MuonSSM: momentum and Newton-Schulz conditioned memory updates for state space models."""

from .layers import build_mixer
from .layers.upcycle import upcycle
from .ops import MemoryState, Muon, muon_memory, muon_selective_scan, newton_schulz
from .version import __version__

__all__ = [
    "MemoryState",
    "Muon",
    "__version__",
    "build_mixer",
    "muon_memory",
    "muon_selective_scan",
    "newton_schulz",
    "upcycle",
]
