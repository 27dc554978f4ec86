"""The diagonal recurrence by one associative scan over all steps: Algorithm 1 with elementwise 2 x 2 transitions.

For every channel and state, the pair (S, M) moves by

    [S M] <- [S M] [[a, 0], [p, g]] + [us, um]         p = mu gamma,  g = gamma,  us = mu U,  um = U

and such maps compose elementwise. All tensors are `[B, L, D, N]`, with size 1 on axes where they do not vary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..associative_scan import Elements, associative_scan
from .types import SelectiveSteps, retention


def chunk_length(length: int) -> int:
    """Take any length."""
    return 1


def run(steps: SelectiveSteps, A: Tensor | None, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, D]` and the last S, M `[B, D, N]`; O(L D N) work and memory, O(log L) depth."""
    batch, L, _ = steps.u.shape
    gamma, mu = (x.expand(batch, L, 1)[..., None] for x in (steps.gamma, steps.mu))
    U = steps.u[..., None] * steps.B[:, :, None, :]
    S_all, M_all = two_state_scan(retention(steps.dt, A, steps.B), gamma, mu, U, S, M)
    y = (S_all * steps.C[:, :, None, :]).sum(-1)
    return y, S_all[:, -1].clone(), M_all[:, -1].clone()


def two_state_scan(a: Tensor, gamma: Tensor, mu: Tensor, U: Tensor, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """Compute all states of M_t = gamma_t M_{t-1} + U_t, S_t = a_t S_{t-1} + mu_t M_t, from the first S and M."""
    p = (mu * gamma).expand_as(U)
    us, um = mu * U, U
    us_first = us[:, :1] + a[:, :1] * S[:, None] + p[:, :1] * M[:, None]
    um_first = um[:, :1] + gamma[:, :1] * M[:, None]
    us, um = torch.cat((us_first, us[:, 1:]), dim=1), torch.cat((um_first, um[:, 1:]), dim=1)
    *_, S_all, M_all = associative_scan(compose, (a, p, gamma, us, um))
    return S_all, M_all


def compose(first: Elements, then: Elements) -> Elements:
    """Compose two maps elementwise, the earlier one first."""
    (a_i, p_i, g_i, us_i, um_i), (a_j, p_j, g_j, us_j, um_j) = first, then
    return (
        a_i * a_j,
        p_i * a_j + g_i * p_j,
        g_i * g_j,
        us_i * a_j + um_i * p_j + us_j,
        um_i * g_j + um_j,
    )
