"""`MemoryState`: what one sequence hands on to its continuation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MemoryState(NamedTuple):
    """Memory `S` and momentum `M` after the last step, float32 (float64 for float64 inputs).

    Both have shape `[B, H, d, m]` for `muon_memory`, `[B, D, N]` for `muon_selective_scan`; with `cu_seqlens` the
    first axis counts the packed sequences. Passing it as `state=` continues the sequence exactly, and gradients
    flow through it both ways; `detach()` cuts them.
    """

    S: Tensor
    M: Tensor

    def detach(self) -> MemoryState:
        """The same values, cut from the graph (truncated back-propagation)."""
        return MemoryState(self.S.detach(), self.M.detach())


# `torch.load` of a file with such a state needs no more than its default, weights_only=True.
torch.serialization.add_safe_globals([MemoryState])
