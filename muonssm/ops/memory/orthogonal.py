"""An experiment: Newton-Schulz on matrices of rank above one, at the ends of chunks (`Muon.orthogonalize`).

A single write has rank one, on which Newton-Schulz is a normalization. The change of S over a chunk of C = 64 steps
has rank up to C, and so has S itself. O(X) = NS(X) |X|_F / |NS(X)|_F changes the singular values and keeps the norm.
With S0 the state before a chunk and S_C the state after it,

    "update"   S_C <- S0 + O(S_C - S0)
    "read"     y_t = (S_t + A_t (O(S0) - S0)) q_t          A_t = alpha_1 ... alpha_t within the chunk; S is unchanged

The last chunk of a sequence can be shorter. A call starts a chunk, so a split of a sequence gives the same numbers only
at multiples of C, and decoding step by step does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..newton_schulz import newton_schulz
from .types import MemorySteps

CHUNK = 64
TINY = 1e-30  # a Frobenius norm below this counts as zero

Result = tuple[Tensor, Tensor, Tensor]  # y, S, M


def chunk_length(length: int) -> int:
    """Fill the last chunk with neutral steps, which do not change S."""
    return CHUNK


def run(
    inner: Callable[[MemorySteps, Tensor, Tensor], Result],
    orthogonalize: str,
    steps: MemorySteps,
    S: Tensor,
    M: Tensor,
) -> Result:
    """Run an implementation chunk by chunk: `inner` is its function `run`."""
    L = steps.u.shape[1]
    outputs = []
    for start in range(0, L, CHUNK):
        chunk = _slice(steps, start)
        S0 = S
        y, S, M = inner(chunk, S0, M)
        if orthogonalize == "update":
            S = S0 + orthogonalized(S - S0)
        else:
            A = chunk.log_alpha.cumsum(1).exp()[..., None]
            y = y + A * torch.einsum("bhdm,blhm->blhd", orthogonalized(S0) - S0, chunk.q)
        outputs.append(y)
    return torch.cat(outputs, dim=1), S, M


def orthogonalized(X: Tensor) -> Tensor:
    """Compute O(X) `[..., d, m]`; O(0) = 0."""
    N = newton_schulz(X, delta=TINY)
    size, new = (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (X, N))
    return N * (size / new.clamp(min=TINY))


def _slice(steps: MemorySteps, start: int) -> MemorySteps:
    """Take the steps of one chunk; a tensor of size 1 does not vary in time."""
    return MemorySteps(
        *(x if x is None or x.shape[1] == 1 else x[:, start : start + CHUNK] for x in steps)  # type: ignore[arg-type]
    )
