"""Scores a finished run again, from its weights and its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from muonssm.lab.language.shards import IGNORED

from .run_folder import RunFolder
from .task import Scorer, Task


@torch.inference_mode()
def evaluate(path: str | Path) -> dict[str, Any]:
    """Scores of the validation and the test part, as in the run's metrics.json."""
    recipe, _, model = RunFolder(path).load_model()
    data = recipe.task.prepare()
    test = data.validation if data.test is None else data.test
    parts = {"validation": data.validation, "test": test, **data.more}
    found = {name: scores(recipe.task, model, part, recipe.training.batch_size) for name, part in parts.items()}
    more = {name: found.pop(name) for name in data.more}
    return {**found, "more": more} if more else found


def scores(task: Task, model: nn.Module, part: Dataset, batch_size: int) -> dict[str, Any]:
    """All scores of a model on one part."""
    scorer = task.scorer(part)
    if scorer is not None:
        return count_scores(scorer, task, model, part, batch_size)
    kept, count, total = [], 0, 0.0
    for batch in DataLoader(part, batch_size, collate_fn=lambda items: task.collate(items, training=False)):
        out, labels = model(**batch), batch["labels"]
        counted = int((labels != IGNORED).sum())  # a batch's loss is the mean over its labels
        count, total = count + counted, total + out["loss"].item() * counted
        kept.append((labels if task.by_loss else out["logits"], labels))
    if task.by_loss:
        return task.score_loss(total / count)
    predictions, labels = (torch.cat(parts).numpy() for parts in zip(*kept, strict=True))
    return task.score(predictions, labels)


@torch.no_grad()
def count_scores(
    scorer: Scorer,
    task: Task,
    model: nn.Module,
    part: Any,
    batch_size: int,
    prepare: Callable[[Any], Any] = lambda batch: batch,
) -> dict[str, Any]:
    """What `scorer` counts on one part; `prepare` brings a batch to where the model is."""
    model.eval()
    for first in range(0, len(part), batch_size):
        items = [part[i] for i in range(first, min(first + batch_size, len(part)))]
        batch = prepare(task.collate(items, training=False))
        scorer.add(batch, model(**batch))
    return scorer.result()
