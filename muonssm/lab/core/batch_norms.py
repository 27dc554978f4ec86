"""Recompute batch norm statistics from training data.

Running statistics lag behind the weights, and those of averaged weights never belonged to these weights. With small
batches, or norms over a few numbers per image, this costs much of a score.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import set_seed

from .shared_batch_norm import SharedBatchNorm


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms of a model that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@torch.no_grad()
def recompute_statistics(model: nn.Module, batches: Iterable[dict[str, Any]]) -> None:
    """Set the statistics of all batch norms to their mean over `batches`; leave the model in evaluation mode.

    Only the norms are in training mode meanwhile; dropout and the like stay in evaluation mode. Every process goes
    through the same batches, so that norms need not share them.
    """
    norms = batch_norms(model)
    before = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # plain mean over batches
        norm.train()
        if isinstance(norm, SharedBatchNorm):
            norm.shared = False
    try:
        for batch in batches:
            model(**batch)
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.eval()
            if isinstance(norm, SharedBatchNorm):
                norm.shared = True


@contextmanager
def isolated_random_state(seed: int) -> Iterator[None]:
    """Seed all random generators inside the block, and restore their states afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def draw_batches(count: int, items: int, size: int) -> list[list[int]]:
    """`items` distinct indices below `count`, in batches of nearly equal length, at most `size`."""
    chosen = torch.randperm(count)[:items]
    return [part.tolist() for part in chosen.tensor_split(-(-len(chosen) // size))]
