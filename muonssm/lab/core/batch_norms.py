"""Statistics of batch norms, computed anew from the training data.

Running statistics lag behind the weights, and those of averaged weights are none that these weights ever gave. Where
batches are small, or a norm sees a few numbers of each image, that costs much of a score.
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


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Those that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


@torch.no_grad()
def renew(model: nn.Module, batches: Iterable[dict[str, Any]]) -> None:
    """Makes the statistics of all batch norms their mean over `batches`; leaves the model in evaluation.

    Only the norms are in training meanwhile: dropout, and whatever else differs, is as in evaluation.
    """
    norms = batch_norms(model)
    before = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean, every batch alike
        norm.train()
    try:
        for batch in batches:
            model(**batch)
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.eval()


@contextmanager
def apart(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, and afterwards as if none had been drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        set_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def drawn(count: int, items: int, size: int) -> list[list[int]]:
    """`items` numbers below `count`, none twice, in parts of nearly one length and at most `size`."""
    chosen = torch.randperm(count)[:items]
    return [part.tolist() for part in chosen.tensor_split(-(-len(chosen) // size))]
