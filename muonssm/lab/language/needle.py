"""The needle in a haystack as a task: prompts in, greedy answers out, scored by variant, length and depth.

    result = run_needle(model, tokenizer, NeedleTest(lengths=(2048, 4096)))
    print(table(result))

A result is JSON: `settings`, and `cells`, one for every variant and length. To go on with a run that was stopped, give
as `done` what `save` was called with last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from muonssm.checks import is_int
from muonssm.lab.core.library_output import hide_length_warning
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

BINS = 10  # of depth, in a cell
SHOWN = 3  # wrong answers that a cell keeps
Result = dict[str, Any]


@dataclass(frozen=True)
class NeedleTest:
    """All cells of a run; `NeedleConfig` explains what one is.

    Attributes:
        lengths: tokens of prompt and answer.
        variants: which of `"pk"`, `"number"` and `"uuid"`.
        samples: of every cell.
        answer_tokens: how many the model writes.
        seed: of the samples.
        batch_size: prompts that the model reads at once; those of a batch have equally many tokens, so none is padded.
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
            if not isinstance(value, (tuple, list)) or not value or any(value.count(one) > 1 for one in value):
                raise ValueError(f"{name} is {value!r}; it may be a tuple of one or more, each once")
            object.__setattr__(self, name, tuple(value))
        if not is_int(self.batch_size, 1):
            raise ValueError(f"batch_size is {self.batch_size!r}; it may be an integer >= 1")
        self.cells()  # which checks the rest

    def cells(self) -> list[NeedleConfig]:
        """One configuration for every variant and length."""
        rest = (self.samples, self.answer_tokens, self.seed)
        return [NeedleConfig(variant, length, *rest) for variant in self.variants for length in self.lengths]


def run_needle(
    model: Any,
    tokenizer: Any,
    test: NeedleTest,
    essay: str | None = None,
    done: Result | None = None,
    save: Callable[[Result], None] | None = None,
    progress: bool = True,
) -> Result:
    """Asks the model for every needle, and scores what it says.

    Args:
        model: with `generate(input_ids, attention_mask, max_new_tokens, ...)` as transformers has it.
        tokenizer: as transformers has them; it may be without a token for padding.
        test: what to ask.
        essay: the haystack of `"number"` and `"uuid"`; None takes the Python reference.
        done: what `save` got from an earlier run of this model. Its cells stay as they are, the others are added.
        save: called with the result after every cell.
        progress: whether a bar is shown.
    """
    from tqdm import tqdm

    essay = default_essay() if essay is None else essay
    result = _begin(test, essay, done)
    there = {(cell["variant"], cell["length"]) for cell in result["cells"]}
    missing = [config for config in test.cells() if (config.variant, config.length) not in there]
    for config in missing:  # now, and not after hours of other cells
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


def _begin(test: NeedleTest, essay: str, done: Result | None) -> Result:
    """An empty result, or `done` if its cells are of the same kind."""
    asked = {name: value for name, value in asdict(test).items() if name in ("samples", "answer_tokens", "seed")}
    settings = {**asked, "essay": hashlib.sha256(" ".join(essay.split()).encode()).hexdigest()[:16]}
    if done is None:
        return {"settings": settings, "cells": []}
    if not {"settings", "cells"} <= set(done):
        raise ValueError(f"done has {sorted(done)}; it may be None, or what save was called with: settings and cells")
    check_same_settings(settings, done["settings"])
    return {"settings": settings, "cells": list(done["cells"])}


def _answer(
    model: Any, tokenizer: Any, samples: Sequence[NeedleSample], test: NeedleTest, tick: Callable[[int], Any]
) -> list[str]:
    """What the model says to every sample, in their order."""
    answers = [""] * len(samples)
    training = getattr(model, "training", False)
    if training:
        model.eval()
    try:
        for batch in _batches(samples, test.batch_size):
            ids = torch.tensor([encode(tokenizer, samples[i].prompt) for i in batch])
            for i, new in zip(batch, _generate(model, tokenizer, ids, test.answer_tokens), strict=True):
                answers[i] = tokenizer.decode(new.tolist(), skip_special_tokens=True)
            tick(len(batch))
    finally:
        if training:
            model.train()
    return answers


def _batches(samples: Sequence[NeedleSample], size: int) -> Iterator[list[int]]:
    """Indices of samples whose prompts have equally many tokens, at most `size` at once."""

    def tokens(i: int) -> int:
        return samples[i].tokens

    for _, group in groupby(sorted(range(len(samples)), key=tokens), key=tokens):
        same = list(group)
        yield from (same[i : i + size] for i in range(0, len(same), size))


def _generate(model: Any, tokenizer: Any, ids: Tensor, most: int) -> Tensor:
    """The most likely tokens after `ids` `[B, T]`, at most `most`: `[B, <= most]`."""
    ids = ids.to(getattr(model, "device", "cpu"))
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = getattr(tokenizer, "eos_token_id", None) if pad is None else pad
    filling = {} if pad is None else {"pad_token_id": pad}  # behind answers that end before others of the batch
    with torch.no_grad(), hide_length_warning():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            do_sample=False,
            num_beams=1,
            **filling,
        )
    return out[:, ids.shape[1] :]


def _cell(config: NeedleConfig, samples: Sequence[NeedleSample], answers: Sequence[str]) -> dict[str, Any]:
    bins: list[dict[str, Any]] = []
    pairs = list(zip(answers, samples, strict=True))
    for i in range(BINS):
        inside = [is_found(answer, sample) for answer, sample in pairs if min(int(sample.depth * BINS), BINS - 1) == i]
        share = 100 * sum(inside) / len(inside) if inside else None
        bins.append({"from": i / BINS, "to": (i + 1) / BINS, "samples": len(inside), "score": share})
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
        "depths": bins,
        "tokens": sum(sample.tokens for sample in samples) / len(samples),
        "repeated": sum(sample.repeated for sample in samples),
        "wrong": wrong[:SHOWN],
    }


def by_cell(result: Result) -> tuple[list[str], list[int], dict[tuple[str, int], dict[str, Any]]]:
    """The variants, the lengths in order, and the cell of each pair that was run."""
    cells = {(cell["variant"], cell["length"]): cell for cell in result["cells"]}
    variants = [variant for variant in VARIANTS if any(variant == name for name, _ in cells)]
    return variants, sorted({length for _, length in cells}), cells


def table(result: Result) -> str:
    """Scores by variant and length, for a terminal."""
    variants, lengths, cells = by_cell(result)
    lines = [f"needles found, % of {result['settings']['samples']} samples"]
    lines.append(f"{'tokens':<8}" + "".join(f"{length:>9}" for length in lengths))
    for variant in variants:
        scores = (cells.get((variant, length)) for length in lengths)
        lines.append(f"{variant:<8}" + "".join(f"{'-' if c is None else format(c['score'], '.1f'):>9}" for c in scores))
    for (variant, length), cell in cells.items():
        if cell["repeated"]:
            how = f"the essay is shorter than the haystack in {cell['repeated']} of {cell['samples']} samples"
            lines.append(f"{variant} {length}: {how}, and begins anew there")
    return "\n".join(lines)
