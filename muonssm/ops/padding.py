"""Rows for the implementations: casts, lengths that do not fill a chunk, and packed sequences, handled once.

An implementation sees a batch of rows `[B, L, ...]` in one dtype whose length is a multiple of its chunk. Where a row
has to be longer than its sequence, the added steps are neutral: all their inputs are zero (log_alpha 0, no write, no
erase), gamma is 1, and mu is 0, which keeps M out of S. Both states then pass through them unchanged, exactly.

    steps    a NamedTuple of per-step tensors `[B, L, ...]`; gamma and mu may have size 1 where they do not vary
    S, M     `[B, ...]`, one state a row
    y        shaped like `steps.u`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Result = tuple[Tensor, Tensor, Tensor]  # y, S, M
Run = Callable[[Any, Tensor, Tensor], Result]


class Chunking(Protocol):
    """How long a chunk an implementation wants for rows of `length` steps; 1 if it takes any length."""

    def __call__(self, length: int) -> int: ...


def run_sequences(run: Run, chunking: Chunking, steps: Any, S: Tensor, M: Tensor, lengths: list[int] | None) -> Result:
    """`run` on one sequence a row, or on sequences of `lengths` packed into the one row there is."""
    if lengths is None:
        return _run_rows(run, chunking, steps, S, M)
    return _run_packed(run, chunking, steps, S, M, lengths)


def _run_rows(run: Run, chunking: Chunking, steps: Any, S: Tensor, M: Tensor) -> Result:
    """One sequence a row: fills the last chunk with neutral steps and cuts their outputs off again."""
    L = steps.u.shape[1]
    if L == 0:
        return steps.u, S.clone(), M.clone()
    missing = -L % chunking(L)
    if missing == 0:
        return run(steps, S, M)
    y, S, M = run(_map_steps(steps, lambda x, neutral: _extend(x, L, missing, neutral)), S, M)
    return y[:, :L].contiguous(), S, M


def _run_packed(run: Run, chunking: Chunking, steps: Any, S: Tensor, M: Tensor, lengths: list[int]) -> Result:
    """Several sequences in the one row of `steps`: lays them out in rows of their own.

    Sequences of similar length (equal number of bits, so never more than twice as long) share a batch: rows are at
    most twice as long as they need be, up to whole chunks, and batches grow in number with the log of the longest.
    """
    batches: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        batches.setdefault((length - 1).bit_length() if length else -1, []).append(i)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    outputs, positions, states = [], [], []
    for members in batches.values():
        first = starts[members]
        counts = [lengths[i] for i in members]
        count, offset = torch.tensor(counts), torch.arange(max(counts))
        live = offset < count[:, None]
        index = (first[:, None] + offset).where(live, first[:, None].clamp(max=max(sum(lengths) - 1, 0)))
        rows = _gather(steps, index.to(steps.u.device), live.to(steps.u.device))
        y, S_end, M_end = _run_rows(run, chunking, rows, S[members], M[members])
        outputs.append(y[live])
        positions.append(index[live])
        states.append((S_end, M_end))
    order = torch.cat(positions).argsort().to(S.device)
    sequence = torch.tensor([i for members in batches.values() for i in members]).argsort().to(S.device)
    S_all, M_all = (torch.cat(parts)[sequence] for parts in zip(*states, strict=True))
    return torch.cat(outputs)[order][None], S_all, M_all


def _gather(steps: Any, index: Tensor, live: Tensor) -> Any:
    """The rows `index` [n, L] of packed steps, neutral where not `live`."""
    total = steps.u.shape[1]

    def rows(x: Tensor, neutral: float) -> Tensor:
        x = x.expand(1, total, *x.shape[2:])[0]
        return torch.where(live.view(*live.shape, *(1,) * (x.ndim - 1)), x[index], neutral)

    return _map_steps(steps, rows)


def _extend(x: Tensor, length: int, missing: int, neutral: float) -> Tensor:
    x = x.expand(x.shape[0], length, *x.shape[2:])
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing), value=neutral)


def _map_steps(steps: Any, function: Callable[[Tensor, float], Tensor]) -> Any:
    """`function(tensor, its neutral value)` on every per-step tensor there is."""
    names = steps._fields
    mapped = [None if x is None else function(x, float(n == "gamma")) for n, x in zip(names, steps, strict=True)]
    return type(steps)(*mapped)
