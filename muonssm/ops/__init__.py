"""The MuonSSM recurrence: functions on tensors, one file per algorithm. Needs torch only."""

from .dispatch import IMPLEMENTATIONS
from .memory import muon_memory
from .muon import Muon
from .newton_schulz import newton_schulz
from .selective import muon_selective_scan
from .state import MemoryState

__all__ = ["IMPLEMENTATIONS", "MemoryState", "Muon", "muon_memory", "muon_selective_scan", "newton_schulz"]
