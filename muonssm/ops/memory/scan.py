"""Algorithm 1 of the paper: the block-affine recurrence (Proposition 1), computed by an associative scan.

    Z_t = [S_t M_t]                               [B, L, H, d, 2m]
    Z_t = Z_{t-1} Phi_t + Psi_t
    Phi_t = [[D_t - mu_t E_t, -E_t], [mu_t gamma_t I, gamma_t I]]      [B, L, H, 2m, 2m]
    Psi_t = [mu_t U_t, U_t]                       [B, L, H, d, 2m],    U_t = u_t k_t^T
    D_t   = alpha_t (I - e_t k_t k_t^T),   E_t = alpha_t eps_t k_t k_t^T, which is 0 in the paper's rule

It is here for fidelity to the paper. It forms every state and every 2m x 2m transition: O(L m (d + m)) memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..associative_scan import Elements, associative_scan
from .types import MemorySteps


def chunk_length(length: int) -> int:
    """Take any length."""
    return 1


def run(steps: MemorySteps, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, H, d]` and the last S, M `[B, H, d, m]`; O(L m^2 (d + m)) work per head, O(log L) depth."""
    m = steps.k.shape[-1]
    Phi, Psi = block_affine(steps)
    Z0 = torch.cat((S, M), dim=-1)[:, None]
    Psi = torch.cat((Psi[:, :1] + Z0 @ Phi[:, :1], Psi[:, 1:]), dim=1)  # the initial state enters at the first step
    _, Z = associative_scan(compose, (Phi, Psi))
    y = (Z[..., :m] @ steps.q[..., None]).squeeze(-1)
    return y, Z[:, -1, ..., :m].clone(), Z[:, -1, ..., m:].clone()


def compose(first: Elements, then: Elements) -> Elements:
    """Compose two steps: (Phi_i, Psi_i) + (Phi_j, Psi_j) = (Phi_i Phi_j, Psi_i Phi_j + Psi_j), as in Remark 1."""
    (Phi_i, Psi_i), (Phi_j, Psi_j) = first, then
    return Phi_i @ Phi_j, Psi_i @ Phi_j + Psi_j


def block_affine(steps: MemorySteps) -> tuple[Tensor, Tensor]:
    """Build Phi and Psi of Proposition 1 for every step."""
    B, L, H, m = steps.k.shape
    identity = torch.eye(m, dtype=steps.k.dtype, device=steps.k.device).expand(B, L, H, m, m)
    k = steps.k[..., None]
    D = identity if steps.erase is None else identity - steps.erase[..., None, None] * (k * k.mT)
    alpha = steps.log_alpha.exp()[..., None, None]
    D = alpha * D
    E = torch.zeros_like(D) if steps.residual is None else alpha * steps.residual[..., None, None] * (k * k.mT)
    gamma = steps.gamma.expand(B, L, H)[..., None, None]
    mu = steps.mu.expand(B, L, H)[..., None, None]
    U = steps.u[..., None] * k.mT
    top = torch.cat((D - mu * E, -E), dim=-1)
    bottom = torch.cat((mu * gamma * identity, gamma * identity), dim=-1)
    return torch.cat((top, bottom), dim=-2), torch.cat((mu * U, U), dim=-1)
