"""Reading the memory with a lower rank, to see how much its small singular directions matter (appendix C.1, 2).

    y_t = S_t V_k V_k^T q_t         V_k: the first k right singular vectors of S

Weights and states stay as they are; only the read is restricted to rank k. V_k comes from the memory at the end of each
segment of `stride` steps; with stride 1 every step has its own V_k, and the result is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from muonssm.checks import check_int
from muonssm.lab.core.scorer import IGNORED

from .replay import Outputs, RunSegment, Visitor, replaying


class TruncatedScores(NamedTuple):
    """Scores with the ranks k `[n]`: the loss `[n]`, and for classifiers the accuracy `[n]` in percent."""

    ranks: np.ndarray
    loss: np.ndarray
    accuracy: np.ndarray | None


class LowRankRead(Visitor):
    """Reads every segment of `stride` steps with rank k at most."""

    def __init__(self, k: int, stride: int = 1) -> None:
        self.k, self.stride = check_int("k", k, 1), check_int("stride", stride, 1)

    def segment_ends(self, layer: int, length: int) -> Sequence[int]:
        return [*range(self.stride, length, self.stride), length]

    def read_segment(self, layer: int, run: RunSegment) -> Outputs:
        y, S, M = run(None)
        if self.k >= min(S.shape[-2:]):
            return y, S, M
        V = top_directions(S, self.k)

        def project(q: Tensor) -> Tensor:
            """V V^T q, for q `[B, n, H, m]`, or `[B, n, N]` with a single head."""
            heads = q if q.ndim == 4 else q[:, :, None]
            projected = torch.einsum("bhmk,bhjk,bnhj->bnhm", V, V, heads)
            return projected if q.ndim == 4 else projected[:, :, 0]

        return run(project)[0], S, M


def top_directions(S: Tensor, k: int) -> Tensor:
    """The first k right singular vectors `[..., m, k]` of `[..., d, m]`, as eigenvectors of S^T S in float64."""
    wide = S.double()
    return torch.linalg.eigh(wide.mT @ wide).eigenvectors[..., -k:].to(S.dtype)


@torch.no_grad()
def truncation(model: nn.Module, batch: Mapping[str, Any], ranks: Sequence[int], stride: int = 1) -> TruncatedScores:
    """Compute the loss of a batch, and the accuracy of classifiers, with the memory read at each of the `ranks`."""
    losses, accuracies = [], []
    for k in ranks:
        with replaying(model.eval(), LowRankRead(k, stride)):
            outputs = model(**batch)
        losses.append(float(outputs["loss"]))
        accuracies.append(_accuracy(outputs, batch["labels"]))
    classifies = None not in accuracies
    return TruncatedScores(np.array(ranks), np.array(losses), np.array(accuracies) if classifies else None)


def _accuracy(outputs: Mapping[str, Tensor], labels: Tensor) -> float | None:
    """Accuracy in percent, from token `predictions` `[B, L]` or class `logits` `[B, classes]`; None without either."""
    if "predictions" in outputs:
        return 100 * (outputs["predictions"] == labels)[labels != IGNORED].double().mean().item()
    if outputs["logits"].ndim == 2:
        return 100 * (outputs["logits"].argmax(1) == labels).double().mean().item()
    return None
