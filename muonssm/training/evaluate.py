"""Scores a finished run again, from its weights and its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from .folder import RunFolder


@torch.inference_mode()
def evaluate(path: str | Path) -> dict[str, Any]:
    """Scores of the validation and the test part, as in the run's metrics.json."""
    recipe, _, model = RunFolder(path).load_model()
    task, data = recipe.task, recipe.task.prepare()
    scores = {}
    for part in ("validation", "test"):
        batches = DataLoader(getattr(data, part), 64, collate_fn=lambda items: task.collate(items, training=False))
        outputs = [(model(batch["x"])["logits"], batch["labels"]) for batch in batches]
        logits, labels = (torch.cat(parts).numpy() for parts in zip(*outputs, strict=True))
        scores[part] = task.score(logits, labels)
    return scores
