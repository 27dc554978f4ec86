"""The recurrence of a piece: its affine map, the exchange with the other processes, the ordinary kernels.

A piece moves the states by Z -> Z A + C, with Z = [S M] (Proposition 1). `unit_pass` computes A and C by one call of
the operator that starts from unit states. A prefix over the processes gives the state before each piece; then the
operator runs as usual. Backwards, the gradient of that state is G = g + D A^T, where D is the gradient of the state
after the piece and g that of the piece's own outputs, and a prefix in the other direction gives every process its D.

    n               rows of a batch, or 1: the segment that enters a piece, the one that leaves it
    Z, C            `[n, H, d, k]`, k = 2 m, or m without momentum       matrix memory
    A               `[n, H, k, k]`
    Z, C            `[n, H, d m, k]`, k = 2 or 1                          matrix memory without a correction: the map is
    A               `[n, H, k, k]`                                       the same for every number of a head
    Z, C            `[n, D, N, 1, k]`, k = 2 or 1                         diagonal memory
    A               `[n, D, N, k, k]`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan
from muonssm.ops.dtypes import compute_dtype, full_precision
from muonssm.ops.muon import has_momentum, is_residual

from .layout import Layout
from .states import check_first_order, final_states, gradient_of_final_states, segment_states

if TYPE_CHECKING:
    from .context import ContextParallel


class Map(NamedTuple):
    """Z -> Z A + C."""

    A: Tensor
    C: Tensor


class Piece(ABC):
    """A call of an operator on one process's piece.

    Attributes:
        n, device, dtype: rows of the batch, where it is, the dtype of its states: that of the inputs, to which the
            caller's states are cast.
        momentum: whether the map has a part for M; without momentum M neither enters a piece nor leaves it.
        inputs: the operator's tensors `[B, L, ...]`.
    """

    def __init__(self, muon: Muon, momentum: bool, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...] = ()) -> None:
        self.muon, self.momentum, self.inputs = muon, momentum, inputs
        self.n, self.device = inputs[0].shape[0], inputs[0].device
        self.dtype = compute_dtype(*inputs, *others)

    @abstractmethod
    def sizes(self) -> dict[str, Any]:
        """Return what all processes must have in common, besides the rule."""

    def description(self, state: MemoryState | None, cu_seqlens: Tensor | None) -> str:
        """Describe the call: what a process must know of the others' pieces."""
        gamma = self.muon.gamma
        tensors = [*self.tensors(), *(state or ()), *([gamma] if isinstance(gamma, Tensor) else [])]
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        rule = {f.name: getattr(self.muon, f.name) for f in fields(self.muon) if f.name != "gamma"}
        rule["gamma"] = f"tensor with {gamma.ndim} axes" if isinstance(gamma, Tensor) else gamma  # checked to fit
        packed = None if cu_seqlens is None else cu_seqlens.numel() - 1
        call = {**self.sizes(), "batch": self.n, "packed": packed, "dtype": self.dtype, "gradients": learns, **rule}
        operator = type(self).__name__.removesuffix("Piece").lower()
        return f"{operator} of " + ", ".join(f"{name} {value}" for name, value in call.items())

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all tensors of the call but gamma and the state."""

    @abstractmethod
    def cut(self, start: int, stop: int) -> Piece:
        """Return the call on the steps `start` to `stop`, without gradients."""

    @abstractmethod
    def run(self, state: MemoryState | None, bounds: Tensor | None) -> tuple[Tensor, MemoryState]:
        """Call the operator."""

    @abstractmethod
    def zero_state(self, sequences: int) -> MemoryState:
        """Return zeros for a number of sequences."""

    @abstractmethod
    def unit_pass(self, from_zero: bool) -> tuple[Map, list[Tensor]]:
        """Return the map of this (cut) piece, and what `state_gradient` needs of it; C is zero unless `from_zero`."""

    @abstractmethod
    def state_gradient(self, dy: Tensor, kept: list[Tensor]) -> Tensor:
        """Return the gradient of the state before this (cut) piece, given that of its outputs, as a Z."""

    @abstractmethod
    def join(self, S: Tensor, M: Tensor) -> Tensor:
        """Return Z of S and M."""

    @abstractmethod
    def part(self, Z: Tensor) -> MemoryState:
        """Return S and M of Z; without momentum, M is zero."""


class MemoryPiece(Piece):
    """A call of `muon_memory`."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_alpha: Tensor,
        beta: Tensor,
        *,
        eta: float,
        muon: Muon,
        inject: Tensor | None,
        impl: str,
    ) -> None:
        # The residual rule writes S_{t-1} k_t into M, so that M depends on the state before it for any gamma.
        momentum = has_momentum(muon) or is_residual(muon, eta)
        super().__init__(muon, momentum, (q, k, v, log_alpha, beta), () if inject is None else (inject,))
        if muon.orthogonalize is not None:
            raise ValueError(f"muon.orthogonalize must be None inside context_parallel, got {muon.orthogonalize!r}")
        self.eta, self.inject, self.impl = eta, inject, impl
        self.H, self.d, self.m = *v.shape[2:], q.shape[3]

    def sizes(self) -> dict[str, Any]:
        return {"heads": self.H, "values": self.d, "keys": self.m, "eta": float(self.eta)}

    def tensors(self) -> list[Tensor]:
        return [*self.inputs] if self.inject is None else [*self.inputs, self.inject]

    def cut(self, start: int, stop: int) -> MemoryPiece:
        return self._changed([x.detach()[:, start:stop] for x in self.inputs], start, stop)

    def _changed(self, inputs: list[Tensor], start: int, stop: int) -> MemoryPiece:
        inject = None if self.inject is None else self.inject.detach()[:, start:stop]
        muon = _cut_gamma(self.muon, start, stop)
        return MemoryPiece(*inputs, eta=self.eta, muon=muon, inject=inject, impl=self.impl)

    def run(self, state: MemoryState | None, bounds: Tensor | None) -> tuple[Tensor, MemoryState]:
        settings: dict[str, Any] = {"eta": self.eta, "muon": self.muon, "inject": self.inject, "impl": self.impl}
        return muon_memory(*self.inputs, state=state, cu_seqlens=bounds, **settings)

    def zero_state(self, sequences: int) -> MemoryState:
        shape = (2, sequences, self.H, self.d, self.m)
        return MemoryState(*torch.zeros(shape, dtype=self.dtype, device=self.device))

    def unit_pass(self, from_zero: bool) -> tuple[Map, list[Tensor]]:
        """Append the 2 m unit states as rows of S and M, with values of zero; rows never interact."""
        if self.eta == 0:
            return self._scalar_pass(from_zero)
        q, k, v, log_alpha, beta = self.inputs
        units = self.m * (1 + self.momentum)
        rows = self.d if from_zero else 0
        values = torch.cat([v[..., :rows], v.new_zeros(*v.shape[:3], units)], dim=-1)
        S, M = v.new_zeros(2, self.n, self.H, rows + units, self.m, dtype=self.dtype)
        S[..., rows : rows + self.m, :].diagonal(dim1=-2, dim2=-1).fill_(1)
        M[..., rows + self.m :, :].diagonal(dim1=-2, dim2=-1).fill_(1)
        extended = self._changed([q, k, values, log_alpha, beta], 0, q.shape[1])
        y, end = extended.run(MemoryState(S, M), None)
        Z = self.join(*end)
        C = Z[..., :rows, :] if rows else Z.new_zeros(self.n, self.H, self.d, units)
        return Map(Z[..., rows:, :], C), [y[..., rows:]]

    def _scalar_pass(self, from_zero: bool) -> tuple[Map, list[Tensor]]:
        """Without a correction every number of a head moves alike: a memory of one key dimension has the whole map."""
        q, _, v, log_alpha, beta = self.inputs
        units, L = 1 + self.momentum, v.shape[1]
        start = torch.eye(2, dtype=self.dtype, device=v.device)[:, :units]
        S, M = (row.expand(self.n, self.H, units)[..., None] for row in start)
        one = q.new_ones(self.n, L, self.H, 1, dtype=self.dtype)
        none = q.new_zeros(self.n, L, self.H, units, dtype=self.dtype)
        scalar = self._changed([one, torch.zeros_like(one), none, log_alpha, beta], 0, L)
        y, end = scalar.run(MemoryState(S, M), None)
        A = scalar.join(*end).unflatten(2, (units, 1)).squeeze(3)
        state = self.run(None, None)[1] if from_zero else self.zero_state(self.n)
        return Map(A, self.join(*state)), [y, q]

    def state_gradient(self, dy: Tensor, kept: list[Tensor]) -> Tensor:
        dy = dy.to(self.dtype)
        if self.eta != 0:
            return torch.einsum("blhd,blhk->bhdk", dy, kept[0].to(self.dtype))
        scales, q = (x.to(self.dtype) for x in kept)
        by_unit = [torch.einsum("blhd,blhm->bhdm", dy * scale, q) for scale in scales.split(1, dim=-1)]
        return self.join(by_unit[0], by_unit[-1])

    def join(self, S: Tensor, M: Tensor) -> Tensor:
        states = (S, M)[: 1 + self.momentum]
        if self.eta == 0:
            return torch.stack(states, dim=-1).flatten(2, 3)
        return torch.cat(states, dim=-1)

    def part(self, Z: Tensor) -> MemoryState:
        states = Z.unflatten(2, (self.d, self.m)).unbind(-1) if self.eta == 0 else Z.split(self.m, dim=-1)
        return MemoryState(states[0], states[1] if self.momentum else torch.zeros_like(states[0]))


class SelectivePiece(Piece):
    """A call of `muon_selective_scan`."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, C: Tensor, *, muon: Muon, impl: str) -> None:
        super().__init__(muon, has_momentum(muon), (x, dt, B, C), () if A is None else (A,))
        self.A, self.impl = A, impl
        self.D, self.N = x.shape[2], B.shape[2]

    def sizes(self) -> dict[str, Any]:
        return {"channels": self.D, "states": self.N, "has A": self.A is not None}

    def tensors(self) -> list[Tensor]:
        return [*self.inputs] if self.A is None else [*self.inputs, self.A]

    def cut(self, start: int, stop: int) -> SelectivePiece:
        inputs = [t.detach()[:, start:stop] for t in self.inputs]
        return self._changed(inputs, _cut_gamma(self.muon, start, stop))

    def _changed(self, inputs: list[Tensor], muon: Muon) -> SelectivePiece:
        x, dt, B, C = inputs
        return SelectivePiece(x, dt, None if self.A is None else self.A.detach(), B, C, muon=muon, impl=self.impl)

    def run(self, state: MemoryState | None, bounds: Tensor | None) -> tuple[Tensor, MemoryState]:
        x, dt, B, C = self.inputs
        return muon_selective_scan(x, dt, self.A, B, C, muon=self.muon, state=state, cu_seqlens=bounds, impl=self.impl)

    def zero_state(self, sequences: int) -> MemoryState:
        shape = (2, sequences, self.D, self.N)
        return MemoryState(*torch.zeros(shape, dtype=self.dtype, device=self.device))

    def unit_pass(self, from_zero: bool) -> tuple[Map, list[Tensor]]:
        """Run the states 1 and inputs of zero as further rows of the batch."""
        units, zero = 1 + self.momentum, torch.zeros_like(self.inputs[0])
        copies = units + from_zero
        x = torch.cat([zero] * units + [self.inputs[0]] * from_zero)
        others = [torch.cat([t] * copies) for t in self.inputs[1:]]
        muon, gamma = self.muon, self.muon.gamma
        if isinstance(gamma, Tensor) and gamma.ndim == 3:
            muon = muon.with_gamma(torch.cat([gamma] * copies))
        S, M = self.zero_state(copies * self.n)
        S[: self.n] = 1
        M[self.n : units * self.n] = 1
        _, end = self._changed([x, *others], muon).run(MemoryState(S, M), None)
        Z = self.join(*end)
        A = torch.cat(Z[: units * self.n].split(self.n), dim=-2)
        C = Z[units * self.n :] if from_zero else torch.zeros_like(Z[: self.n])
        return Map(A, C), list(self.inputs[1:])

    def state_gradient(self, dy: Tensor, kept: list[Tensor]) -> Tensor:
        """Differentiate the operator on inputs of zero, from states of zero: it is linear in its state."""
        silent = self._changed([torch.zeros_like(kept[0]), *kept], self.muon)
        state = MemoryState(*(t.requires_grad_() for t in self.zero_state(self.n)))
        with torch.enable_grad():
            y, _ = silent.run(state, None)
            dS, dM = torch.autograd.grad(y, state, dy.to(y.dtype), allow_unused=True, materialize_grads=True)
        return self.join(dS, dM)

    def join(self, S: Tensor, M: Tensor) -> Tensor:
        return torch.stack((S, M)[: 1 + self.momentum], dim=-1)[..., None, :]

    def part(self, Z: Tensor) -> MemoryState:
        S, *M = Z.squeeze(-2).unbind(-1)
        return MemoryState(S, M[0] if M else torch.zeros_like(S))


def _cut_gamma(muon: Muon, start: int, stop: int) -> Muon:
    """Return the rule for the steps `start` to `stop`, with a gamma that receives no gradients."""
    gamma = muon.gamma
    if not isinstance(gamma, Tensor):
        return muon
    gamma = gamma.detach()
    gamma = gamma[:, start:stop] if gamma.ndim == 3 else gamma
    return muon.with_gamma(gamma) if muon.gamma_is_known else replace(muon, gamma=gamma)


def run(piece: Piece, layout: Layout, context: ContextParallel, state: MemoryState | None) -> Any:
    """Run an operator on a piece; return y and the states that `context` shares."""
    unit: Map | None = None
    kept: list[Tensor] = []
    first = piece.cut(0, layout.first_length)
    if layout.carries_in and (layout.spans or torch.is_grad_enabled()):
        with torch.no_grad():
            unit, kept = first.unit_pass(from_zero=layout.spans)
    end: MemoryState | None = None
    if not layout.carries_in:  # nothing comes in, so the piece runs before the exchange, which needs its last state
        y, end = piece.run(segment_states(piece, layout, state, None), layout.bounds)
    with torch.no_grad():
        out = _outgoing(piece, layout, unit, end, state)
        carried = piece.part(context.exchange.prefix(*out))
    if end is None:
        y, end = piece.run(segment_states(piece, layout, state, carried), layout.bounds)
    first.inputs = ()  # what the backward pass needs of them is in `kept`
    A = None if unit is None else unit.A
    y, S, M = _Join.apply(first, layout, context, y, *end, A, *(state or (None, None)), *kept)
    return y, MemoryState(S, M)


def _outgoing(
    piece: Piece, layout: Layout, unit: Map | None, end: MemoryState | None, state: MemoryState | None
) -> Map:
    """Return the map from the state before this piece to the state before the next one."""
    if layout.spans and unit is not None:
        return unit
    nothing = piece.join(*piece.zero_state(piece.n))
    k = nothing.shape[-1]
    reset = nothing.new_zeros(*nothing.shape[:-2], k, k)
    if not layout.carries_out:
        return Map(reset, nothing)
    if end is None:  # the last segment begins here; the piece has not run, as it waits for what enters its first one
        tail = piece.cut(layout.last_start, layout.length)
        begin = None
        if state is not None:
            begin = MemoryState(*(x.detach()[layout.beginning][-1:].to(piece.dtype) for x in state))
        end = tail.run(begin, None)[1]
    last = (x.detach() if layout.bounds is None else x.detach()[-1:] for x in end)
    return Map(reset, piece.join(*last))


class _Join(torch.autograd.Function):
    """Pass y through, and share the last states; backwards, exchange the gradients of the states between pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        first: Piece,
        layout: Layout,
        context: ContextParallel,
        y: Tensor,
        S: Tensor,
        M: Tensor,
        A: Tensor | None,
        S0: Tensor | None,
        M0: Tensor | None,
        *kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`first` is the call on the segment that comes in, A its map, `kept` what its `state_gradient` needs.

        S0 and M0 are the caller's state: if it learns, all processes go backward, also those that do not start there.
        """
        ctx.call = first, layout, context
        ctx.save_for_backward(A, *kept)
        S, M = final_states((S, M), layout, context)
        return y.view_as(y), S, M

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order()
        (first, layout, context), (A, *kept) = ctx.call, ctx.saved_tensors
        with torch.no_grad(), full_precision(dy.device):
            dS, dM = gradient_of_final_states(grads, layout, context)
            dZ = first.join(*((dS, dM) if layout.bounds is None else (dS[:1], dM[:1])))
            R = dZ.new_zeros(*dZ.shape[:-2], dZ.shape[-1], dZ.shape[-1])
            g = torch.zeros_like(dZ)
            if A is not None:
                g = first.state_gradient(dy[:, : layout.first_length], kept) + dZ @ A.mT
                R = A.mT if layout.spans else R
            after = first.part(context.exchange.prefix(R, g, backwards=True))
            if layout.carries_out:
                dS, dM = (_add_to_last(x, extra, layout) for x, extra in zip((dS, dM), after, strict=True))
        return None, None, None, dy, dS, dM, None, None, None, *(None for _ in kept)


def _add_to_last(x: Tensor, extra: Tensor, layout: Layout) -> Tensor:
    """Add to the rows of a batch, or to the last segment of a packed row."""
    if layout.bounds is None:
        return x + extra
    return torch.cat([x[:-1], x[-1:] + extra])
