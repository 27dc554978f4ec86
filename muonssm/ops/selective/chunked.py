"""The diagonal recurrence chunk by chunk: the scan of `scan.py` on C steps at a time, which bounds the memory.

The forward pass keeps the states between chunks only. The backward pass processes the chunks from last to first,
recomputes the states inside each, and runs the adjoint recurrence (dS, dM are the gradients of S_t, M_t):

    dS_t = dy_t C_t^T + a_{t+1} dS_{t+1}
    dM_t = mu_t dS_t + gamma_{t+1} dM_{t+1}

which is the same two-state scan with S and M exchanged and time reversed.

    T <= C steps of one chunk;  u, dt [B, T, D];  B, C [B, T, N];  gamma, mu [B, T, 1];  a, S, M, dS, dM [B, T, D, N]
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..custom_op import custom_op
from .scan import two_state_scan
from .types import SelectiveSteps, retention

CHUNK = 32


def chunk_length(length: int) -> int:
    """Take any length: the last chunk can be shorter."""
    return 1


def run(steps: SelectiveSteps, A: Tensor | None, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, D]` and the last S, M `[B, D, N]`; O(L D N) work, O(L D + (C + L / C) D N) memory."""
    batch, L, _ = steps.u.shape
    gamma, mu = (x.expand(batch, L, 1).contiguous() for x in (steps.gamma, steps.mu))
    y, S_all, M_all = selective_chunked(steps.u, steps.dt, A, steps.B, steps.C, gamma, mu, S, M)
    return y, S_all[:, -1].clone(), M_all[:, -1].clone()


class _Chunk(NamedTuple):
    """Gates and states of the steps of one chunk."""

    a: Tensor
    gamma: Tensor
    mu: Tensor
    S: Tensor
    M: Tensor

    @classmethod
    def compute(cls, steps: SelectiveSteps, A: Tensor | None, S: Tensor, M: Tensor) -> _Chunk:
        a = retention(steps.dt, A, steps.B)
        gamma, mu = steps.gamma[..., None], steps.mu[..., None]
        U = steps.u[..., None] * steps.B[:, :, None, :]
        return cls(a, gamma, mu, *two_state_scan(a, gamma, mu, U, S, M))

    def adjoints(self, dy_C: Tensor, dS_end: Tensor, dM_end: Tensor) -> tuple[Tensor, Tensor]:
        """Compute dS_t, dM_t of all steps, from the direct gradients of S_t and the adjoints after the chunk."""

        def backwards(gate: Tensor) -> Tensor:
            # gate_{t+1} at step t, and 1 at the last step: the adjoints after the chunk have decayed already
            return torch.cat((torch.ones_like(gate[:, :1]), gate[:, 1:].flip(1)), dim=1)

        dM, dS = two_state_scan(
            backwards(self.gamma), backwards(self.a), self.mu.flip(1), dy_C.flip(1), S=dM_end, M=dS_end
        )
        return dS.flip(1), dM.flip(1)


@functools.partial(custom_op, "muonssm::selective_chunked")
def selective_chunked(
    u: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, gamma: Tensor, mu: Tensor, S: Tensor, M: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute y `[B, L, D]`, and S and M before each chunk and at the end, `[B, n + 1, D, N]`."""
    outputs, S_all, M_all = [], [S], [M]
    for start in range(0, u.shape[1], CHUNK):
        steps = _slice((u, dt, B, C, gamma, mu), start)
        chunk = _Chunk.compute(steps, A, S_all[-1], M_all[-1])
        outputs.append(torch.einsum("btdn,btn->btd", chunk.S, steps.C))
        S_all.append(chunk.S[:, -1])
        M_all.append(chunk.M[:, -1])
    results = (torch.cat(outputs, dim=1), torch.stack(S_all, dim=1), torch.stack(M_all, dim=1))
    return tuple(x.contiguous() for x in results)  # type: ignore[return-value]


@functools.partial(custom_op, "muonssm::selective_chunked_backward")
def _selective_chunked_backward(
    grads: list[Tensor], inputs: list[Tensor], A: Tensor | None, S_all: Tensor, M_all: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of u, dt, A, B, C, gamma, S, M; that of A is empty if A is None."""
    dy, dS_all, dM_all = grads
    u, dt, B, C, gamma, _ = inputs
    du, ddt, dB, dC, dgamma = (x.new_empty(x.shape) for x in (u, dt, B, C, gamma))
    dA = A.new_zeros(A.shape) if A is not None else u.new_empty(0)
    dS_end, dM_end = dS_all[:, -1], dM_all[:, -1]
    for i in reversed(range(S_all.shape[1] - 1)):
        start = i * CHUNK
        at = slice(start, start + CHUNK)
        steps = _slice(inputs, start)
        chunk = _Chunk.compute(steps, A, S_all[:, i], M_all[:, i])
        dS, dM = chunk.adjoints(dy[:, at, :, None] * steps.C[:, :, None, :], dS_end, dM_end)
        S_before, M_before = (_shift(x[:, i], s) for x, s in ((S_all, chunk.S), (M_all, chunk.M)))

        da = dS * S_before
        du[:, at] = torch.einsum("btdn,btn->btd", dM, steps.B)
        dB[:, at] = torch.einsum("btdn,btd->btn", dM, steps.u)
        dC[:, at] = torch.einsum("btdn,btd->btn", chunk.S, dy[:, at])
        dgamma[:, at] = (dM * M_before).sum((-2, -1))[..., None]
        if A is None:  # a = 1 - dt B^2
            ddt[:, at] = -torch.einsum("btdn,btn->btd", da, steps.B**2)
            dB[:, at] -= 2 * steps.B * torch.einsum("btdn,btd->btn", da, steps.dt)
        else:  # a = exp(dt A)
            dlog = da * chunk.a
            ddt[:, at] = torch.einsum("btdn,dn->btd", dlog, A)
            dA += torch.einsum("btdn,btd->dn", dlog, steps.dt)
        dS_end = chunk.a[:, 0] * dS[:, 0] + dS_all[:, i]
        dM_end = chunk.gamma[:, 0] * dM[:, 0] + dM_all[:, i]
    return du, ddt, dA, dB, dC, dgamma, *(x.clone(memory_format=torch.contiguous_format) for x in (dS_end, dM_end))  # type: ignore[return-value]


def _slice(inputs: Any, start: int) -> SelectiveSteps:
    return SelectiveSteps(*(x[:, start : start + CHUNK] for x in inputs))


def _shift(first: Tensor, states: Tensor) -> Tensor:
    """Return the state before each step: `first`, then all states but the last."""
    return torch.cat((first[:, None], states[:, :-1]), dim=1)


@selective_chunked.register_fake
def _(u, dt, A, B, C, gamma, mu, S, M):  # type: ignore[no-untyped-def]
    states = (u.shape[0], (u.shape[1] + CHUNK - 1) // CHUNK + 1, u.shape[2], B.shape[2])
    return u.new_empty(u.shape), u.new_empty(states), u.new_empty(states)


@_selective_chunked_backward.register_fake
def _(grads, inputs, A, S_all, M_all):  # type: ignore[no-untyped-def]
    u, dt, B, C, gamma, _ = inputs
    like = (u, dt, A if A is not None else u.new_empty(0), B, C, gamma, S_all[:, 0], M_all[:, 0])
    return tuple(x.new_empty(x.shape) for x in like)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    u, dt, A, B, C, gamma, mu, _, _ = inputs
    ctx.save_for_backward(u, dt, A, B, C, gamma, mu, *output[1:])


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    u, dt, A, B, C, gamma, mu, S_all, M_all = ctx.saved_tensors
    inputs = [u, dt, B, C, gamma, mu]
    du, ddt, dA, dB, dC, dgamma, dS, dM = _selective_chunked_backward(list(grads), inputs, A, S_all, M_all)
    return du, ddt, None if A is None else dA, dB, dC, dgamma, None, dS, dM


selective_chunked.register_autograd(_backward, setup_context=_save)
