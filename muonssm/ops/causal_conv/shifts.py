"""The convolution as a sum of shifted products, in torch's own operations: any device, any derivative."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, cu_seqlens: Tensor | None, activation: str | None
) -> Tensor:
    """Compute y `[B, L, C]` from x `[B, L, C]`, weight `[C, 1, K]` and tail `[N, K - 1, C]`, all in one dtype."""
    if cu_seqlens is None:
        y = _filter(torch.cat([tail, x], dim=1), weight)
    else:  # one row [tail, sequence, tail, sequence, ...]; outputs at the tails are dropped
        before = weight.shape[2] - 1
        positions = _positions(cu_seqlens, before, x.shape[1]).to(x.device)
        row = x.new_zeros(1, x.shape[1] + tail.shape[0] * before, x.shape[2])
        row = row.index_copy(1, positions, x)
        starts = (cu_seqlens[:-1].to(x.device) + before * torch.arange(tail.shape[0], device=x.device))[:, None]
        row = row.index_copy(1, (starts + torch.arange(before, device=x.device)).flatten(), tail.flatten(0, 1)[None])
        y = _filter(row, weight).index_select(1, positions - before)
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y


def step(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor, activation: str | None) -> tuple[Tensor, Tensor]:
    """Compute y and the new tail for one step x `[B, 1, C]`, with few operations."""
    row = torch.cat([tail, x], dim=1)
    y = (row * weight[:, 0].T).sum(dim=1, keepdim=True)
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation == "silu" else y, row[:, 1:]


def last_rows(x: Tensor, tail: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the next tail: the last K - 1 rows of every sequence, with its tail in front."""
    before, L = tail.shape[1], x.shape[1]
    if cu_seqlens is None:
        rows = x[:, L - before :] if before <= L else torch.cat([tail[:, L:], x], dim=1)
        return rows.clone()  # a view would keep all of x in memory
    if L == 0:
        return tail.clone()
    bounds = cu_seqlens.to(x.device)
    # Positions count from the start of the tail.
    position = (bounds[1:] - bounds[:-1])[:, None] + torch.arange(before, device=x.device)
    new = x[0][(bounds[:-1, None] + position - before).clamp(0, L - 1)]
    old = tail.gather(1, position.clamp(max=before - 1)[..., None].expand_as(tail)) if before else tail
    return torch.where((position < before)[..., None], old, new)


def _filter(row: Tensor, weight: Tensor) -> Tensor:
    """Compute sum_j weight_j row_{t+j} for every t that has K rows."""
    K = weight.shape[2]
    L = row.shape[1] - K + 1
    y = row[:, :L] * weight[:, 0, 0]
    for j in range(1, K):
        y = torch.addcmul(y, row[:, j : j + L], weight[:, 0, j])
    return y


def _positions(cu_seqlens: Tensor, before: int, L: int) -> Tensor:
    """Return the positions of L packed steps in a row with `before` more rows in front of every sequence."""
    step = torch.arange(L, device=cu_seqlens.device)
    return step + before * torch.searchsorted(cu_seqlens[1:].contiguous(), step, right=True).add(1)
