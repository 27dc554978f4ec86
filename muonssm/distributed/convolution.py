"""The short convolution of a piece: the last K - 1 inputs before it come from the process that has them.

A process whose piece is long enough sends its last inputs at once. One with fewer than K - 1 steps waits for those
before its own and passes some of them on.

    rows   `[n, K - 1, C]`, or fewer than K - 1 of a segment that also continues from before
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muonssm.ops.causal_conv import Convolved, causal_convolution, shifts

from .exchange import Exchange
from .layout import Layout
from .states import check_first_order, final_states, first_rows, gradient_of_final_states

if TYPE_CHECKING:
    from .context import ContextParallel


def convolution(
    x: Tensor,
    weights: Any,
    layout: Layout,
    context: ContextParallel,
    tail: Tensor | None,
    settings: dict[str, Any],
) -> Convolved:
    """Run `causal_convolution` on the piece x `[B, L, C]`."""
    before = weights[0].shape[2] - 1
    n, C = x.shape[0], x.shape[2]
    if tail is not None:
        tail = tail.to(x.dtype)
    zeros = x.new_zeros(n if layout.members is None else len(layout.members), before, C)
    if before == 0:  # no step needs another one
        return causal_convolution(x, *weights, tail=zeros, cu_seqlens=layout.bounds, **settings)
    carried = _Shift.apply(_last_rows(x, layout, tail, before), tail, layout, context.exchange, before)
    tails = first_rows(layout, tail, carried, zeros)
    y, end = causal_convolution(x, *weights, tail=tails, cu_seqlens=layout.bounds, **settings)
    y, end = _Join.apply(layout, context, y, end, carried)
    return Convolved(y, end)


def describe(x: Tensor, weights: Any, tail: Tensor | None, cu_seqlens: Tensor | None) -> str:
    """Describe a call: what a process must know of the others' pieces."""
    passes = torch.is_grad_enabled() and (x.requires_grad or (tail is not None and tail.requires_grad))
    learns = torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in weights)
    packed = None if cu_seqlens is None else cu_seqlens.numel() - 1
    return (
        f"convolution of batch {x.shape[0]}, packed {packed}, channels {x.shape[2]}, taps {weights[0].shape[2]}, "
        f"dtype {x.dtype}, gradients {passes}, of weights {learns}"
    )


def _last_rows(x: Tensor, layout: Layout, tail: Tensor | None, before: int) -> Tensor:
    """Return the last inputs of the segment that continues on the next process, as many as are known here."""
    part = x[:, layout.last_start :]
    if layout.spans or part.shape[1] >= before:
        return part[:, max(part.shape[1] - before, 0) :]
    begin = x.new_zeros(x.shape[0], before, x.shape[2])
    if tail is not None:
        begin = tail if layout.members is None else tail[layout.beginning][-1:]
        begin = begin if len(begin) else x.new_zeros(x.shape[0], before, x.shape[2])
    return shifts.last_rows(part, begin, None)


class _Shift(torch.autograd.Function):
    """Send the last inputs to the next process; return those of the one before. Gradients go the other way.

    Where the caller's tail learns, all processes go backward, also those that do not start from it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tail: Tensor | None, layout: Layout, exchange: Exchange, before: int) -> Tensor:
        ctx.call, ctx.count = (layout, exchange, before), rows.shape[1]
        to, source = _neighbors(exchange, forwards=True)
        like = rows.new_empty(rows.shape[0], before, rows.shape[2])
        if rows.shape[1] == before:
            got = exchange.pass_on(rows, to, source, like)
        else:
            got = exchange.pass_on(None, None, source, like)
            assert got is not None
            exchange.pass_on(torch.cat([got[:, rows.shape[1] :], rows], dim=1), to, None, None)
        return torch.zeros_like(like) if got is None or not layout.carries_in else got

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        check_first_order()
        layout, exchange, before = ctx.call
        to, source = _neighbors(exchange, forwards=False)
        grad = grad if layout.carries_in else torch.zeros_like(grad)
        if ctx.count == before:
            got = exchange.pass_on(grad, to, source, grad)
        else:
            got = exchange.pass_on(None, None, source, grad)
            passed = torch.zeros_like(grad)
            if got is not None and layout.carries_out:
                passed[:, ctx.count :] = got[:, : before - ctx.count]
            exchange.pass_on(grad + passed, to, None, None)
        got = torch.zeros_like(grad) if got is None or not layout.carries_out else got
        return got[:, before - ctx.count :], None, None, None, None


def _neighbors(exchange: Exchange, forwards: bool) -> tuple[int | None, int | None]:
    """Return whom to send to, and whom to receive from."""
    after = exchange.rank + 1 if exchange.rank + 1 < exchange.size else None
    before = exchange.rank - 1 if exchange.rank > 0 else None
    return (after, before) if forwards else (before, after)


class _Join(torch.autograd.Function):
    """Pass y through, and share the last inputs of every sequence.

    It depends on `carried`, so that the backward pass of `_Shift` runs on the first process too.
    """

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, context: ContextParallel, y: Tensor, end: Tensor, carried: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.carried = (layout, context), torch.zeros_like(carried)
        return y.view_as(y), final_states([end], layout, context)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dend: Tensor) -> tuple[None, None, Tensor, Tensor, Tensor]:
        check_first_order()
        return None, None, dy, gradient_of_final_states([dend], *ctx.call)[0], ctx.carried
