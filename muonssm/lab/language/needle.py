"""The needle in a haystack as an evaluation: greedy answers to prompts, scored by variant, length and depth.

    result = run_needle(model, tokenizer, NeedleTest(lengths=(2048, 4096)))
    print(table(result))

A result is JSON: `settings`, and `cells`, one per variant and length. To resume an interrupted run, pass the last value
that `save` was called with as `earlier_result`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.checks import check_int
from muonssm.lab.core.library_output import hide_length_warning
from muonssm.lab.core.paper import read_table, scores_by_variant
from muonssm.lab.core.resume import check_same_settings

from .needle_prompts import (
    VARIANTS,
    NeedleConfig,
    NeedleSample,
    check_room,
    default_essay,
    encode,
    is_found,
    make_needle,
    score_needle,
)

BINS = 10  # of depth, per cell
MAX_WRONG = 3  # wrong answers kept per cell
Result = dict[str, Any]


@dataclass(frozen=True)
class NeedleTest:
    """All cells of a run; see `NeedleConfig` for one cell.

    Attributes:
        lengths: tokens of prompt and answer.
        variants: any of `"pk"`, `"number"` and `"uuid"`.
        samples: samples per cell.
        answer_tokens: the most tokens of an answer.
        seed: seed of the samples.
        batch_size: prompts per batch; the prompts of a batch have the same length, so none is padded.
    """

    lengths: tuple[int, ...] = (2048, 4096, 8192)
    variants: tuple[str, ...] = VARIANTS
    samples: int = 500
    answer_tokens: int = 128
    seed: int = 0
    batch_size: int = 8

    def __post_init__(self) -> None:
        for name in ("lengths", "variants"):
            value = getattr(self, name)
            wanted = f"{name} must be a tuple of one or more distinct values, got {value!r}"
            if not isinstance(value, (tuple, list)):
                raise TypeError(wanted)
            if not value or any(value.count(each) > 1 for each in value):
                raise ValueError(wanted)
            object.__setattr__(self, name, tuple(value))
        check_int("batch_size", self.batch_size, 1)
        self.cells()  # checks the other fields

    def cells(self) -> list[NeedleConfig]:
        """One configuration per variant and length."""
        rest = (self.samples, self.answer_tokens, self.seed)
        return [NeedleConfig(variant, length, *rest) for variant in self.variants for length in self.lengths]


def paper_needle(backbone: str) -> dict[str, dict[str, dict[int, float]]]:
    """The paper's scores of a 170M model, by variant of the model, needle and length; empty where it has none."""
    rows = read_table(Path(__file__).with_name("paper.toml"))["needle"]
    scores: dict[str, dict[str, dict[int, float]]] = {}
    for needle in VARIANTS:
        for variant, row in scores_by_variant(rows, backbone=backbone, needle=needle).items():
            scores.setdefault(variant, {})[needle] = {int(length): score for length, score in row.items()}
    return scores


def run_needle(
    model: Any,
    tokenizer: Any,
    test: NeedleTest,
    essay: str | None = None,
    earlier_result: Result | None = None,
    save: Callable[[Result], None] | None = None,
    progress: bool = True,
) -> Result:
    """Generate an answer to every prompt and score it.

    Args:
        model: a model with transformers' `generate(input_ids, attention_mask, max_new_tokens, ...)`.
        tokenizer: a transformers tokenizer; it needs no padding token.
        test: the cells to run.
        essay: the haystack of `"number"` and `"uuid"`; None: the Python reference.
        earlier_result: a result of this model; its cells are kept and the others are added.
        save: called with the result after every cell.
        progress: whether to show a progress bar.
    """
    from tqdm import tqdm

    essay = default_essay() if essay is None else essay
    result = _resume(test, essay, earlier_result)
    finished = {(cell["variant"], cell["length"]) for cell in result["cells"]}
    missing = [config for config in test.cells() if (config.variant, config.length) not in finished]
    for config in missing:  # before the first cell runs, which can take hours
        check_room(config, tokenizer, essay)
    with tqdm(total=len(missing) * test.samples, unit="sample", disable=not progress) as bar:
        for config in missing:
            bar.set_description(f"{config.variant} {config.length}")
            samples = make_needle(config, tokenizer, essay)
            answers = _answer(model, tokenizer, samples, test, bar.update)
            result = {**result, "cells": [*result["cells"], _cell(config, samples, answers)]}
            if save is not None:
                save(result)
    return result


def _resume(test: NeedleTest, essay: str, earlier_result: Result | None) -> Result:
    """The earlier result, if its settings are the same; or an empty one."""
    asked = {name: value for name, value in asdict(test).items() if name in ("samples", "answer_tokens", "seed")}
    settings = {**asked, "essay": hashlib.sha256(" ".join(essay.split()).encode()).hexdigest()[:16]}
    if earlier_result is None:
        return {"settings": settings, "cells": []}
    if not {"settings", "cells"} <= set(earlier_result):
        raise ValueError(f"earlier_result must have the keys settings and cells, got {sorted(earlier_result)}")
    check_same_settings(settings, earlier_result["settings"])
    return {"settings": settings, "cells": list(earlier_result["cells"])}


def _answer(
    model: Any, tokenizer: Any, samples: Sequence[NeedleSample], test: NeedleTest, update: Callable[[int], Any]
) -> list[str]:
    """The model's answer to every sample, in their order; `update` is called with the size of every batch."""
    answers = [""] * len(samples)
    training = getattr(model, "training", False)
    if training:
        model.eval()
    try:
        for batch in _batches(samples, test.batch_size):
            ids = torch.tensor([encode(tokenizer, samples[i].prompt) for i in batch])
            for i, new in zip(batch, _generate(model, tokenizer, ids, test.answer_tokens), strict=True):
                answers[i] = tokenizer.decode(new.tolist(), skip_special_tokens=True)
            update(len(batch))
    finally:
        if training:
            model.train()
    return answers


def _batches(samples: Sequence[NeedleSample], size: int) -> Iterator[list[int]]:
    """Yield the indices of at most `size` samples whose prompts have the same number of tokens."""

    def tokens(i: int) -> int:
        return samples[i].tokens

    for _, group in groupby(sorted(range(len(samples)), key=tokens), key=tokens):
        indices = list(group)
        yield from (indices[i : i + size] for i in range(0, len(indices), size))


def _generate(model: Any, tokenizer: Any, ids: Tensor, max_new_tokens: int) -> Tensor:
    """Continue `ids` `[B, T]` greedily: `[B, <= max_new_tokens]`."""
    ids = ids.to(getattr(model, "device", "cpu"))
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = getattr(tokenizer, "eos_token_id", None) if pad is None else pad
    padding = {} if pad is None else {"pad_token_id": pad}  # after answers that end before others of the batch
    with torch.no_grad(), hide_length_warning():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            **padding,
        )
    return out[:, ids.shape[1] :]


def _cell(config: NeedleConfig, samples: Sequence[NeedleSample], answers: Sequence[str]) -> dict[str, Any]:
    """The scores of one variant and length, as JSON."""
    pairs = list(zip(answers, samples, strict=True))
    wrong = [
        {"key": sample.key, "value": sample.answer, "depth": sample.depth, "answer": answer}
        for answer, sample in pairs
        if not is_found(answer, sample)
    ]
    return {
        "variant": config.variant,
        "length": config.length,
        "samples": len(samples),
        "score": score_needle(answers, samples),
        "depths": [_bin(pairs, i) for i in range(BINS)],
        "tokens": sum(sample.tokens for sample in samples) / len(samples),
        "repeated": sum(sample.repeated for sample in samples),
        "wrong": wrong[:MAX_WRONG],
    }


def _bin(pairs: Sequence[tuple[str, NeedleSample]], i: int) -> dict[str, Any]:
    """The score of the samples in bin `i` of the depth."""
    inside = [is_found(answer, sample) for answer, sample in pairs if min(int(sample.depth * BINS), BINS - 1) == i]
    score = 100 * sum(inside) / len(inside) if inside else None
    return {"from": i / BINS, "to": (i + 1) / BINS, "samples": len(inside), "score": score}


def by_cell(result: Result) -> tuple[list[str], list[int], dict[tuple[str, int], dict[str, Any]]]:
    """The variants, the lengths in ascending order, and the cells by variant and length."""
    cells = {(cell["variant"], cell["length"]): cell for cell in result["cells"]}
    variants = [variant for variant in VARIANTS if any(variant == name for name, _ in cells)]
    return variants, sorted({length for _, length in cells}), cells


def table(result: Result) -> str:
    """Scores by variant and length, as text."""
    variants, lengths, cells = by_cell(result)
    lines = [f"needles found, % of {result['settings']['samples']} samples"]
    lines.append(f"{'tokens':<8}" + "".join(f"{length:>9}" for length in lengths))
    for variant in variants:
        scores = (cells.get((variant, length)) for length in lengths)
        lines.append(f"{variant:<8}" + "".join(f"{'-' if c is None else format(c['score'], '.1f'):>9}" for c in scores))
    for (variant, length), cell in cells.items():
        if cell["repeated"]:
            count = f"{cell['repeated']} of {cell['samples']} samples"
            lines.append(f"{variant} {length}: the essay is shorter than the haystack in {count} and is repeated there")
    return "\n".join(lines)
