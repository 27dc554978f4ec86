"""Reading a memory of lower rank: what the singular directions beyond the first k are good for (appendix C.1, 2).

    y_t = S_t V_k V_k^T q_t         V_k: the first k right singular vectors of S

The weights and the memory that is carried on stay as they are; only what is read is cut down to rank k. V_k belongs
to the memory at the end of each segment of `stride` steps: exact with stride 1, where every step has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from muonssm.lab.language.shards import IGNORED

from .replay import Result, Segment, Visitor, replaying


class Truncated(NamedTuple):
    """What is left with the ranks k `[n]`: the loss, and where the model classifies, the percentage that is right."""

    ranks: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray | None


class Truncation(Visitor):
    """Reads with rank k at most."""

    def __init__(self, k: int, stride: int = 1) -> None:
        if k < 1 or stride < 1:
            raise ValueError(f"k is {k} and stride {stride}; they may be integers >= 1")
        self.k, self.stride = k, stride

    def stops(self, layer: int, length: int) -> Sequence[int]:
        return [*range(self.stride, length, self.stride), length]

    def read(self, layer: int, segment: Segment) -> Result:
        y, S, M = segment(None)
        if self.k >= min(S.shape[-2:]):
            return y, S, M
        V = top_directions(S, self.k)

        def cut(q: Tensor) -> Tensor:
            """q `[B, n, H, m]`, or `[B, n, N]` where there is one head."""
            heads = q if q.ndim == 4 else q[:, :, None]
            seen = torch.einsum("bhmk,bhjk,bnhj->bnhm", V, V, heads)
            return seen if q.ndim == 4 else seen[:, :, 0]

        return segment(cut)[0], S, M


def top_directions(S: Tensor, k: int) -> Tensor:
    """The first k right singular vectors `[..., m, k]` of `[..., d, m]`, by the eigenvectors of S^T S."""
    wide = S.double()
    return torch.linalg.eigh(wide.mT @ wide).eigenvectors[..., -k:].to(S.dtype)


@torch.no_grad()
def truncation(model: nn.Module, batch: Mapping[str, Any], ranks: Sequence[int], stride: int = 1) -> Truncated:
    """The loss of a batch, and the accuracy, while the memory is read with each of the `ranks`."""
    losses, accuracies = [], []
    for k in ranks:
        with replaying(model.eval(), Truncation(k, stride)):
            out = model(**batch)
        losses.append(float(out["loss"]))
        accuracies += _accuracy(out["predictions" if "predictions" in out else "logits"], batch["labels"])
    return Truncated(np.array(ranks), np.array(losses), np.array(accuracies) if accuracies else None)


def _accuracy(logits: Tensor, labels: Tensor) -> list[float]:
    """In percent; of logits `[B, classes]`, or of tokens that were found `[B, L]`; otherwise nothing."""
    if not logits.is_floating_point():
        return [100 * (logits == labels)[labels != IGNORED].double().mean().item()]
    if logits.ndim == 2:
        return [100 * (logits.argmax(1) == labels).double().mean().item()]
    return []
