"""The MuonSSM recurrence: pure functions on tensors, one file per algorithm. Imports torch only."""

from .config import Muon
from .implementations import IMPLEMENTATIONS
from .memory import muon_memory
from .normalization import newton_schulz
from .selective import muon_selective_scan
from .state import MemoryState

__all__ = ["IMPLEMENTATIONS", "MemoryState", "Muon", "muon_memory", "muon_selective_scan", "newton_schulz"]
