"""MuonSSM: momentum and Newton-Schulz conditioned memory updates for state space models."""

from muonssm.layers import build_mixer
from muonssm.layers.upcycle import upcycle
from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan, newton_schulz
from muonssm.version import __version__

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
