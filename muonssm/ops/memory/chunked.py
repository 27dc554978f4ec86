"""The memory recurrence in chunks of C steps: matmuls within a chunk, a short recurrence of states across chunks.

Within a chunk (states S0, M0 at its start) every product of gates between two steps is an entry of a triangular matrix:

    LA[t,s] = alpha_t ... alpha_{s+1},   LG[t,s] = gamma_t ... gamma_{s+1}         s <= t, else 0
    Cm      = LA diag(mu) LG             the share of write s in S_t, through the momentum
    A_t, Gam_t, g_t                      the shares of S0 in S_t, of M0 in M_t, and of M0 in S_t

The correction adds writes w_t k_t^T with w_t = -alpha_t e_t S_{t-1} k_t, to S (the erase) or, with eps_t for e_t, to M
(the residual rule). Its rows W solve a triangular system. W is affine in the states, W = WU + WS S0^T + WM M0^T, so WU,
WS and WM are computed for all chunks at once. The derivation is in docs/design/operator.md; the numbered steps of `run`
follow it.

    q, k, WS, WM   [n, B, H, C, m]   n chunks of C steps
    u, W, WU       [n, B, H, C, d]
    KS, KM         [n, B, H, C, m]   keys times the share of a step's correction in S and in M at the chunk's end
    LA, LG, Cm     [n, B, H, C, C]
    A, g, Gam      [n, B, H, C]
    S, M           [B, H, d, m]
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..custom_op import custom_op
from .types import MemorySteps

CHUNK, SHORT_CHUNK = 64, 16


def chunk_length(length: int) -> int:
    """Return one of two chunk lengths, so that a compiled graph serves many sequence lengths."""
    return CHUNK if length > 2 * SHORT_CHUNK else SHORT_CHUNK


def run(steps: MemorySteps, S: Tensor, M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y `[B, L, H, d]` and the last S, M `[B, H, d, m]`; O(L C (d + m) + L d m) per head, memory linear in L."""
    # 0. Products of matrices mix all steps of a chunk, also with coefficients of zero, which NaN does not respect.
    steps, invalid = _finite(_rescaled(steps))

    # 1. Decays between any two steps of a chunk, and from the start of the chunk.
    chunks = _Chunks.cut(steps, chunk_length(steps.u.shape[1]))
    decays = _Decays.of(chunks)

    # 2. The correction: writes W k^T, without the parts that depend on the states.
    corrected = _correct(chunks, decays)

    # 3. The chunk's own writes in S and M at its end, and the decays of S0 and M0 until then.
    LG_end, Cm_end = (x[..., -1, :, None] for x in (decays.LG, decays.Cm))
    US, UM = chunks.u.mT @ (Cm_end * chunks.k), chunks.u.mT @ (LG_end * chunks.k)
    ends = [x[..., -1, None, None].expand(*US.shape[:3], 1, 1) for x in (decays.A, decays.g, decays.Gam)]

    # 4. The recurrence over chunks: S and M before each chunk and at the end, and W.
    S_all, M_all, W = chunk_states(S, M, ends, US, UM, *corrected)

    # 5. Outputs read the state before the chunk, the chunk's own writes, and the correction.
    y = _read(chunks, decays, S_all[:-1], M_all[:-1], W)
    ended = invalid[:, -1, ..., None]
    return y.masked_fill(invalid, torch.nan), *(x[-1].masked_fill(ended, torch.nan) for x in (S_all, M_all))


def _rescaled(steps: MemorySteps) -> MemorySteps:
    """Scale keys that are far from 1 by powers of two, which the writes and corrections take up: exact algebra.

    Products of keys with queries and keys would leave the range of float32 where the writes themselves do not.
    """
    largest = steps.k.detach().abs().amax(-1, keepdim=True)
    limit = 1022 if steps.k.dtype == torch.float64 else 126  # exponents of the smallest normal numbers
    exponent = largest.log2().floor()  # -inf for 0, nan for nan
    scale = torch.where(exponent.abs() > 30, exponent, 0.0).clamp(-limit, limit).exp2()
    scale = torch.where(largest > 0, scale, 1.0)
    square = scale.squeeze(-1).square()
    erase, residual = (None if x is None else x * square for x in (steps.erase, steps.residual))
    return steps._replace(k=steps.k / scale, u=steps.u * scale, erase=erase, residual=residual)


def _finite(steps: MemorySteps) -> tuple[MemorySteps, Tensor]:
    """Replace numbers that are not finite by zero; also return which outputs `[B, L, H, d]` they reach.

    A write that is not finite reaches its own row of S from its step on, a key or gate reaches all rows. Queries stay:
    they reach their own step only.
    """
    per_head = ~steps.k.isfinite().all(-1) | steps.log_alpha.isnan()
    for gate in (steps.erase, steps.residual, steps.gamma, steps.mu):
        if gate is not None:
            per_head = per_head | ~gate.isfinite()
    invalid = (~steps.u.isfinite() | per_head[..., None]).cumsum(1) > 0
    finite = [None if x is None else torch.where(x.isfinite(), x, 0.0) for x in steps]
    log_alpha = torch.where(steps.log_alpha.isnan(), 0.0, steps.log_alpha)  # -inf, a gate of 0, stays
    return MemorySteps(*finite)._replace(q=steps.q, log_alpha=log_alpha), invalid  # type: ignore[arg-type]


class _Chunks(NamedTuple):
    """`MemorySteps` in chunks: `[n, B, H, C, ...]`."""

    q: Tensor
    k: Tensor
    u: Tensor
    alpha: Tensor
    erase: Tensor | None
    residual: Tensor | None
    gamma: Tensor  # size 1 on axes where it does not vary, except C
    mu: Tensor  # likewise

    @classmethod
    def cut(cls, steps: MemorySteps, C: int) -> _Chunks:
        def cut(x: Tensor) -> Tensor:
            if x.shape[1] == 1:  # constant in time: the same for every chunk
                x = x.expand(x.shape[0], C, *x.shape[2:])
            x = x.unflatten(1, (-1, C)).transpose(0, 1)  # [n, B, C, H, ...]
            return x.transpose(2, 3).contiguous()

        q, k, u, log_alpha, *others = (None if x is None else cut(x) for x in steps)
        return cls(q, k, u, log_alpha.exp(), *others)  # type: ignore[arg-type, union-attr]


class _Decays(NamedTuple):
    """Products of gates in a chunk: between two steps `[n, B, H, C, C]`, from the chunk's start `[n, B, H, C]`."""

    LA: Tensor
    LG: Tensor  # size 1 on axes where gamma does not vary
    muLG: Tensor  # likewise
    Cm: Tensor
    A: Tensor
    Gam: Tensor
    g: Tensor

    @classmethod
    def of(cls, chunks: _Chunks) -> _Decays:
        LA, LG = decay_matrix(chunks.alpha), decay_matrix(chunks.gamma)
        muLG = chunks.mu[..., None] * LG
        shared = muLG.numel() == muLG.shape[-1] ** 2  # one matrix for all chunks: one large matmul
        Cm = LA @ (muLG.flatten(0, -2) if shared else muLG)
        alpha_1, gamma_1 = chunks.alpha[..., :1], chunks.gamma[..., :1]
        return cls(LA, LG, muLG, Cm, A=LA[..., 0] * alpha_1, Gam=LG[..., 0] * gamma_1, g=Cm[..., 0] * gamma_1)


def _correct(chunks: _Chunks, decays: _Decays) -> tuple[Tensor | None, ...]:
    """Solve for WU, WS, WM of W = WU + WS S0^T + WM M0^T; also return KS, KM: W^T KS, W^T KM are in the last S, M.

        (I + e LA * G) W = -e [ A K S0^T + (g - mu Gam) K M0^T + (N * G) U ],   N = Cm - mu LG,  G = K K^T

    Matrices on the left are strictly lower. With the correction in the momentum, eps replaces e, and N replaces LA.
    """
    if chunks.erase is None and chunks.residual is None:
        return (None,) * 5
    k, e = chunks.k, chunks.residual if chunks.erase is None else chunks.erase
    assert e is not None
    G = k @ k.mT
    lost = (decays.Cm - decays.muLG) * G  # zero on the diagonal already
    forget, recall = -e * decays.A, -e * (decays.g - chunks.mu * decays.Gam)
    right = torch.cat((-e[..., None] * (lost @ chunks.u), forget[..., None] * k, recall[..., None] * k), dim=-1)
    W = solve_unit_lower(e[..., None] * (lost if chunks.erase is None else decays.LA * G), right)
    WU, WS, WM = W.split((chunks.u.shape[-1], k.shape[-1], k.shape[-1]), dim=-1)
    if chunks.erase is not None:
        return WU, WS, WM, decays.LA[..., -1, :, None] * k, None
    return WU, WS, WM, decays.Cm[..., -1, :, None] * k, decays.LG[..., -1, :, None] * k


def _read(chunks: _Chunks, decays: _Decays, S: Tensor, M: Tensor, W: Tensor) -> Tensor:
    """Compute y `[B, L, H, d]` = A q S0^T + g q M0^T + (Cm * Q K^T) U + (LA * Q K^T) W.

    The residual rule has Cm in place of LA.
    """
    q = chunks.q
    QK = q @ chunks.k.mT
    y = (decays.Cm * QK) @ (chunks.u if chunks.residual is None else chunks.u + W)
    y += (decays.A[..., None] * q) @ S.mT
    y += (decays.g[..., None] * q) @ M.mT
    if chunks.erase is not None:
        y += (decays.LA * QK) @ W
    return y.permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


def decay_matrix(a: Tensor) -> Tensor:
    """Compute X[t, s] = a_t a_{t-1} ... a_{s+1} for s <= t, else 0; a is `[..., C]`, X is `[..., C, C]`.

    These are plain products: gates of 0 and 1 are exact, and the gradient does not divide by a gate.
    """
    return _DecayMatrix.apply(a)


def solve_unit_lower(N: Tensor, right: Tensor) -> Tensor:
    """Solve (I + N) X = right for X; only the entries of N `[..., C, C]` below the diagonal are used."""
    return _SolveUnitLower.apply(N, right)


class _DecayMatrix(torch.autograd.Function):
    """X = (I - N)^-1, where N has a_2, a_3, ... below its diagonal; hence dN = X^T dX X^T."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        below = torch.ones(a.shape[-1], a.shape[-1], dtype=torch.bool, device=a.device).tril(-1)
        X = torch.where(below, a[..., :, None], 1.0).cumprod(-2).tril()
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx: Any, dX: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        dN = X.mT @ dX @ X.mT
        return F.pad(dN.diagonal(-1, -2, -1), (1, 0))


class _SolveUnitLower(torch.autograd.Function):
    """Forward substitution in blocks of 16 rows, by the inverses of the diagonal blocks: mostly matmuls.

    Inverting all of I + N would be as fast, but loses two digits where e k.k is above 1.
    With Y = (I + N)^-T dX, the gradients are dright = Y and dN = -Y X^T.
    """

    @staticmethod
    def forward(ctx: Any, N: Tensor, right: Tensor) -> Tensor:
        T = _diagonal_inverses(N)
        X = torch.empty_like(right)
        for i, rows in enumerate(_block_rows(N)):
            rest = right[..., rows, :]
            if i > 0:
                rest = rest - N[..., rows, : rows.start] @ X[..., : rows.start, :]
            X[..., rows, :] = T[..., i, :, :] @ rest
        ctx.save_for_backward(N, T, X)
        return X

    @staticmethod
    def backward(ctx: Any, dX: Tensor) -> tuple[Tensor, Tensor]:
        N, T, X = ctx.saved_tensors
        Y = torch.empty_like(X)
        blocks = _block_rows(N)
        for i, rows in reversed(list(enumerate(blocks))):
            rest = dX[..., rows, :]
            if i < len(blocks) - 1:
                rest = rest - N[..., rows.stop :, rows].mT @ Y[..., rows.stop :, :]
            Y[..., rows, :] = T[..., i, :, :].mT @ rest
        return -(Y @ X.mT).tril(-1), Y


def _block_rows(N: Tensor) -> list[slice]:
    return [slice(start, start + SHORT_CHUNK) for start in range(0, N.shape[-1], SHORT_CHUNK)]


def _diagonal_inverses(N: Tensor) -> Tensor:
    """Invert the diagonal blocks of I + N: `[..., C / 16, 16, 16]`."""
    blocks = torch.stack([N[..., rows, rows] for rows in _block_rows(N)], dim=-3)
    identity = torch.eye(SHORT_CHUNK, dtype=N.dtype, device=N.device).expand_as(blocks)
    return torch.linalg.solve_triangular(blocks, identity, upper=False, unitriangular=True)


# The recurrence over chunks is a custom operator: a compiler then sees one node instead of a loop whose length it would
# specialize on, and the backward pass stores only the states.


@functools.partial(custom_op, "muonssm::chunk_states")
def chunk_states(
    S: Tensor,
    M: Tensor,
    ends: list[Tensor],
    US: Tensor,
    UM: Tensor,
    WU: Tensor | None,
    WS: Tensor | None,
    WM: Tensor | None,
    KS: Tensor | None,
    KM: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute S and M before each of n chunks and at the end, `[n + 1, B, H, d, m]`, and W `[n, B, H, C, d]`.

        W_i     = WU_i + WS_i S_i^T + WM_i M_i^T
        S_{i+1} = A_i S_i + g_i M_i + US_i + W_i^T KS_i
        M_{i+1} = Gam_i M_i + UM_i + W_i^T KM_i

    `ends` are A, g, Gam `[n, B, H, 1, 1]`; US, UM are `[n, B, H, d, m]`; WU is `[n, B, H, C, d]`; WS, WM, KS and KM are
    `[n, B, H, C, m]`. Without a correction the last five are None and W is empty; with a correction in S KM is None.
    """
    n, shape = US.shape[0], US.shape[1:]
    S_all, M_all = US.new_empty(n + 1, *shape), US.new_empty(n + 1, *shape)
    S_all[0], M_all[0] = S, M
    W = US.new_empty(0 if WU is None else WU.shape)
    for i, (A, g, Gam) in enumerate(zip(*ends, strict=True)):
        S, M, S_next, M_next = S_all[i], M_all[i], S_all[i + 1], M_all[i + 1]
        torch.addcmul(US[i], A, S, out=S_next).addcmul_(g, M)
        torch.addcmul(UM[i], Gam, M, out=M_next)
        if WU is not None and WS is not None and WM is not None and KS is not None:
            torch.add(WU[i], WS[i] @ S.mT, out=W[i]).add_(WM[i] @ M.mT)
            S_next += W[i].mT @ KS[i]
        if KM is not None:
            M_next += W[i].mT @ KM[i]
    return S_all, M_all, W


@functools.partial(custom_op, "muonssm::chunk_states_backward")
def _chunk_states_backward(
    grads: list[Tensor],
    ends: list[Tensor],
    WS: Tensor | None,
    WM: Tensor | None,
    KS: Tensor | None,
    KM: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the adjoints of all S_i, M_i and W_i from their direct gradients: the same recurrence, backward in i."""
    dS_all, dM_all, dW = (x.clone(memory_format=torch.contiguous_format) for x in grads)
    A, g, Gam = ends
    for i in reversed(range(A.shape[0])):
        dS, dM, dS_next, dM_next = dS_all[i], dM_all[i], dS_all[i + 1], dM_all[i + 1]
        dS.addcmul_(A[i], dS_next)
        dM.addcmul_(g[i], dS_next).addcmul_(Gam[i], dM_next)
        if WS is not None and WM is not None and KS is not None:
            dW[i] += KS[i] @ dS_next.mT
            if KM is not None:
                dW[i] += KM[i] @ dM_next.mT
            dS += dW[i].mT @ WS[i]
            dM += dW[i].mT @ WM[i]
    return dS_all, dM_all, dW


@chunk_states.register_fake
def _(S, M, ends, US, UM, WU, WS, WM, KS, KM):  # type: ignore[no-untyped-def]
    states = (US.shape[0] + 1, *US.shape[1:])
    return US.new_empty(states), US.new_empty(states), US.new_empty(0 if WU is None else WU.shape)


@_chunk_states_backward.register_fake
def _(grads, ends, WS, WM, KS, KM):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, ends, _, _, _, WS, WM, KS, KM = inputs
    ctx.save_for_backward(*ends, WS, WM, KS, KM, *output)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    A, g, Gam, WS, WM, KS, KM, S_all, M_all, W = ctx.saved_tensors
    dS_all, dM_all, dW = _chunk_states_backward(list(grads), [A, g, Gam], WS, WM, KS, KM)
    S, M, dUS, dUM = S_all[:-1], M_all[:-1], dS_all[1:], dM_all[1:]
    dends = [(a * b).sum((-2, -1), keepdim=True) for a, b in ((dUS, S), (dUS, M), (dUM, M))]
    dKM = None if KM is None else W @ dUM
    dcorrected = (None,) * 5 if WS is None else (dW, dW @ S, dW @ M, W @ dUS, dKM)
    return dS_all[0], dM_all[0], dends, dUS, dUM, *dcorrected


chunk_states.register_autograd(_backward, setup_context=_save)
