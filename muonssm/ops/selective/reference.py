"""The diagonal recurrence as a loop over time steps.

u, dt, y [B, L, D];  B, C [B, L, N];  A [D, N];  gamma, mu [B, L, 1];  S, M [B, D, N]
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import SelectiveSteps, retention


def chunk_length(length: int) -> int:
    """Take any length."""
    return 1


def run(steps: SelectiveSteps, A: Tensor | None, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, D]` and the last S, M `[B, D, N]`; O(L D N), sequential in L."""
    batch, L, _ = steps.u.shape
    gamma, mu = (x.expand(batch, L, 1)[..., None] for x in (steps.gamma, steps.mu))
    outputs = []
    for t in range(L):
        B, C = steps.B[:, t], steps.C[:, t]
        M = gamma[:, t] * M + steps.u[:, t, :, None] * B[:, None, :]
        S = retention(steps.dt[:, t], A, B) * S + mu[:, t] * M
        outputs.append((S * C[:, None, :]).sum(-1))
    return torch.stack(outputs, dim=1), S, M
