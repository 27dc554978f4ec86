"""Lengths that do not fill a chunk, and packed sequences, handled once for all implementations.

An implementation gets a batch `[B, L, ...]` in one dtype whose length is a multiple of its chunk. Sequences that are
shorter are padded with neutral steps: all their inputs are zero (log_alpha 0, no write, no erase), gamma is 1, and mu
is 0, which keeps M out of S. Both states pass through neutral steps unchanged, exactly.

    steps    a NamedTuple of per-step tensors `[B, L, ...]`; gamma and mu have size 1 on axes where they do not vary
    S, M     `[B, ...]`, one state per sequence
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


class ChunkLength(Protocol):
    """Returns the chunk length that an implementation wants for `length` steps; 1 if it takes any length."""

    def __call__(self, length: int) -> int: ...


def run_sequences(
    run: Run, chunk_length: ChunkLength, steps: Any, S: Tensor, M: Tensor, lengths: list[int] | None
) -> Result:
    """Call `run` on a batch, or on sequences of `lengths` that are packed into a batch of one."""
    if lengths is None:
        return _run_batch(run, chunk_length, steps, S, M)
    return _run_packed(run, chunk_length, steps, S, M, lengths)


def _run_batch(run: Run, chunk_length: ChunkLength, steps: Any, S: Tensor, M: Tensor) -> Result:
    """Fill the last chunk with neutral steps, run, and cut their outputs off."""
    L = steps.u.shape[1]
    if L == 0:
        return steps.u, S.clone(), M.clone()
    missing = -L % chunk_length(L)
    if missing == 0:
        return run(steps, S, M)
    y, S, M = run(_map_steps(steps, lambda x, neutral: _extend(x, L, missing, neutral)), S, M)
    return y[:, :L].contiguous(), S, M


def _run_packed(run: Run, chunk_length: ChunkLength, steps: Any, S: Tensor, M: Tensor, lengths: list[int]) -> Result:
    """Unpack the sequences into batches of similar length, run each batch, and pack the outputs again.

    Lengths with the same number of bits share a batch, so none is more than twice as long as another: padding at most
    doubles the work, up to whole chunks, and the number of batches grows with the log of the longest sequence.
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
        batch = _gather(steps, index.to(steps.u.device), live.to(steps.u.device))
        y, S_end, M_end = _run_batch(run, chunk_length, batch, S[members], M[members])
        outputs.append(y[live])
        positions.append(index[live])
        states.append((S_end, M_end))
    order = torch.cat(positions).argsort().to(S.device)
    sequence = torch.tensor([i for members in batches.values() for i in members]).argsort().to(S.device)
    S_all, M_all = (torch.cat(ends)[sequence] for ends in zip(*states, strict=True))
    return torch.cat(outputs)[order][None], S_all, M_all


def _gather(steps: Any, index: Tensor, live: Tensor) -> Any:
    """Take the packed steps at `index` [n, L]; neutral steps where not `live`."""
    total = steps.u.shape[1]

    def take(x: Tensor, neutral: float) -> Tensor:
        x = x.expand(1, total, *x.shape[2:])[0]
        return torch.where(live.view(*live.shape, *(1,) * (x.ndim - 1)), x[index], neutral)

    return _map_steps(steps, take)


def _extend(x: Tensor, length: int, missing: int, neutral: float) -> Tensor:
    x = x.expand(x.shape[0], length, *x.shape[2:])
    return F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing), value=neutral)


def _map_steps(steps: Any, function: Callable[[Tensor, float], Tensor]) -> Any:
    """Apply `function(tensor, neutral value)` to every per-step tensor that is not None."""
    names = steps._fields
    mapped = [None if x is None else function(x, float(n == "gamma")) for n, x in zip(names, steps, strict=True)]
    return type(steps)(*mapped)
