"""The memory recurrence as the paper writes it (eqs. 3 and 4), with its family: a loop over time steps.

    u_t k_t^T = NS(tau beta_t v_t k_t^T), the normalized write; its scale is `newton_schulz.write_scale`
    erase = eta beta_t, or residual = eta beta_t if the correction goes into the momentum
    mu = 1, or the gate `inject`; 0 at the neutral steps of padding

q, k [B, L, H, m];  u, y [B, L, H, d];  alpha, erase, gamma [B, L, H];  S, M [B, H, d, m]
"""

from __future__ import annotations

import torch
from torch import Tensor

from .types import MemorySteps


def chunk_length(length: int) -> int:
    """Take any length."""
    return 1


def run(steps: MemorySteps, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, H, d]` and the last S, M `[B, H, d, m]`; O(L d m) per head, sequential in L."""
    B, L, H, _ = steps.u.shape
    gamma = steps.gamma.expand(B, L, H)[..., None, None]
    mu = steps.mu.expand(B, L, H)[..., None, None]
    alpha = steps.log_alpha.exp()[..., None, None]
    outputs = []
    for t in range(L):
        q, k, u = steps.q[:, t, :, :, None], steps.k[:, t, :, :, None], steps.u[:, t, :, :, None]
        if steps.residual is not None:
            u = u - alpha[:, t] * steps.residual[:, t, :, None, None] * (S @ k)
        M = gamma[:, t] * M + u * k.mT
        if steps.erase is not None:
            S = S - steps.erase[:, t, :, None, None] * (S @ k) * k.mT
        S = alpha[:, t] * S + mu[:, t] * M
        outputs.append((S @ q).squeeze(-1))
    return torch.stack(outputs, dim=1), S, M
