"""`muonssm eval RUN --weights`: the perplexity of weights packed as bfloat16 or int8, beside that of float32.

Every token of the validation set is read by native decoding, 16 sequences at a time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.checks import check_int
from muonssm.lab.core.run_folder import RunFolder
from muonssm.layers.decoding.weights import check_weights
from muonssm.models.language import MuonSSMCache
from muonssm.ops.decode_steps import MOST_ROWS

from .pretrained import check_finite
from .task import LanguageTask


def packed_perplexities(folder: str | Path, weights: Sequence[str], limit: int | None = None) -> dict[str, float]:
    """Return the perplexity on the validation set with float32 and with each of `weights`.

    Args:
        folder: a finished language run.
        weights: names of formats.
        limit: use only the first sequences of the validation set.
    """
    for name in weights:
        check_weights(name)
    if limit is not None:
        check_int("limit", limit, 1)
    recipe, metadata, model = RunFolder(folder).load_model()
    if not isinstance(recipe.task, LanguageTask):
        raise ValueError(f"RUN must be a language run, got one of {type(recipe.task).__name__}")
    if metadata.get("kind") == "instructions":
        raise ValueError(f"RUN must be a run on text for --weights, got {str(folder)!r}, a run on instructions")
    check_finite(model, folder)
    split = recipe.task.load_data().validation
    count = len(split) if limit is None else min(limit, len(split))  # type: ignore[arg-type]
    items = [split[i] for i in range(count)]
    if any("document_ids" in item for item in items):
        raise ValueError("data.keep_apart must be False for --weights: packed documents are not decoded natively")
    names = ["float32", *(name for name in weights if name != "float32")]
    models = (copy.deepcopy(model.eval()).prepare_decoding(name, drop=name != "float32") for name in names)
    return dict(zip(names, (perplexity(each, items) for each in models), strict=True))


@torch.no_grad()
def perplexity(model: Any, items: Sequence[dict[str, Tensor]]) -> float:
    """Return exp of the mean loss over all tokens, token by token; labels are the next tokens."""
    total, count = 0.0, 0
    for start in range(0, len(items), MOST_ROWS):
        batch = items[start : start + MOST_ROWS]
        ids, labels = (torch.stack([item[name] for item in batch]) for name in ("input_ids", "labels"))
        cache = MuonSSMCache(model.config)
        for t in range(ids.shape[1]):
            logits = model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
            total += F.cross_entropy(logits, labels[:, t], reduction="sum").item()
            count += int((labels[:, t] != -100).sum())
    return math.exp(min(total / count, 700.0))
