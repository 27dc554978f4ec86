"""`MemoryState`: the state with which a sequence continues."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MemoryState(NamedTuple):
    """Memory `S` and momentum `M` after the last step, float32 (float64 for float64 inputs).

    Both have shape `[B, H, d, m]` for `muon_memory` and `[B, D, N]` for `muon_selective_scan`. With `cu_seqlens` the
    first axis counts the packed sequences. Pass it as `state=` to continue the sequences exactly. Gradients flow
    through it; `detach()` stops them.
    """

    S: Tensor
    M: Tensor

    def detach(self) -> MemoryState:
        """Return the same values without gradients (truncated backpropagation)."""
        return MemoryState(self.S.detach(), self.M.detach())


# Allow `torch.load` with weights_only=True, its default, to read files with such a state.
torch.serialization.add_safe_globals([MemoryState])
