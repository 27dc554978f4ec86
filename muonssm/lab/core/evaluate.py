"""Scoring a model on a split: during training, at its end, and again from a run folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .matmul import fast_matmuls
from .run_folder import RunFolder
from .task import Task


def evaluate(path: str | Path) -> dict[str, Any]:
    """Score a finished run again from its weights and data; the result has the form of its metrics.json."""
    recipe, _, model = RunFolder(path).load_model()
    data = recipe.task.load_data()
    score = functools.partial(score_split, recipe.task, model, batch_size=recipe.training.batch_size)
    scores = {"validation": score(data.validation)}
    scores["test"] = score(data.validation if data.test is None else data.test)
    if data.extra_tests:
        scores["extra_tests"] = {name: score(split) for name, split in data.extra_tests.items()}
    return scores


@torch.no_grad()
@fast_matmuls()
def score_split(
    task: Task,
    model: nn.Module,
    split: Dataset,
    batch_size: int,
    to_device: Callable[[Any], Any] = lambda batch: batch,
    rank: int = 0,
    processes: int = 1,
    pieces: int = 1,
) -> dict[str, Any]:
    """All scores of a model on one split; the scores are the same for any number of processes.

    Args:
        to_device: moves a batch, or this process's piece of it, to where the model is.
        rank, processes: this process scores batches `rank`, `rank + processes`, ... All processes call the model
            equally often, because sharded weights need all of them at once: a process without a batch left repeats
            the first and drops the outputs.
        pieces: number of processes that share each batch (`training.context`), besides.
    """
    scorer = task.scorer(split)
    starts = range(0, len(split), batch_size)  # type: ignore[arg-type]
    batches = [list(range(start, min(start + batch_size, len(split)))) for start in starts]  # type: ignore[arg-type]
    missing = -len(batches) % processes
    own = [*batches, *batches[:1] * missing][rank::processes]
    counts = len(batches[rank::processes])
    model.eval()
    collate = functools.partial(task.collate, training=False)
    generator = None if task.eval_draws_random else torch.Generator()
    loader = DataLoader(split, batch_sampler=own, collate_fn=collate, generator=generator)
    for number, items in enumerate(loader):
        batch = to_device(items)
        outputs = model(**batch)
        if number < counts:
            scorer.add(batch, outputs)
    if processes * pieces > 1:
        shares: list[Any] = [None] * (processes * pieces)
        torch.distributed.all_gather_object(shares, scorer.collected())
        scorer.replace(shares)
    return scorer.result()
