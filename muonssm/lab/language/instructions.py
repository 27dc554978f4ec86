"""Instructions with responses: the prompt of Stanford Alpaca, and examples whose loss is that of the response alone.

prompt("Name a colour.")                                # "Below is an instruction ... ### Response:"
examples = Examples(open_tokens(folder).train, 2048)
batch = pad_examples([examples[0], examples[1]], pad_id=0)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import is_int

from .shards import IGNORED, TokenPart

FIELDS = ("instruction", "input", "output")
MULTIPLE = 8  # padded lengths are multiples of it, which suits matrix units
# The text is that of tatsu-lab/stanford_alpaca, to the letter: no newline follows the last colon.
TASK = "Below is an instruction that describes a task"
CONTEXT = ", paired with an input that provides further context"
REQUEST = ". Write a response that appropriately completes the request.\n\n"


def prompt(instruction: str, context: str = "") -> str:
    """The published prompt for an instruction; `context` is what the data set calls `input`."""
    if not context:
        return f"{TASK}{REQUEST}### Instruction:\n{instruction}\n\n### Response:"
    return f"{TASK}{CONTEXT}{REQUEST}### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:"


class Examples(Dataset):
    """Documents one by one, for a loss on what follows the prompt.

    An item has `input_ids` and `labels`, int64 `[L]` with L <= `length`; `labels[t]` is the token after `input_ids[t]`,
    or -100 where that still belongs to the prompt.

    Attributes:
        truncated: examples of which the end is left out, as they have more than `length` + 1 tokens.
        left_out: examples of which the prompt alone has more than `length` tokens.
    """

    def __init__(self, part: TokenPart, length: int) -> None:
        if not is_int(length, 1):
            raise ValueError(f"length is {length!r}; it may be an integer >= 1")
        self.part, self.length = part, length
        sizes, prompts = part.sizes()
        usable = prompts <= length
        self.chosen = np.flatnonzero(usable)
        self.left_out = int(np.count_nonzero(~usable))
        self.truncated = int(np.count_nonzero(sizes[usable] > length + 1))
        if not len(self.chosen):
            shortest = f"the shortest prompt has {prompts.min()} tokens" if len(prompts) else "it has no documents"
            raise ValueError(f"length is {length}, and no example of {part.name} fits: {shortest}")

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, prompt_length = self.part.document(int(self.chosen[index]))
        tokens = tokens[: self.length + 1].astype(np.int64)
        labels = tokens[1:].copy()
        labels[: max(0, prompt_length - 1)] = IGNORED
        return {"input_ids": torch.from_numpy(tokens[:-1]), "labels": torch.from_numpy(labels)}


def pad_examples(items: Sequence[dict[str, Tensor]], pad_id: int) -> dict[str, Tensor]:
    """A batch of examples, padded on the right to a multiple of 8.

    Returns:
        `input_ids` with `pad_id`, `labels` with -100 and `attention_mask` with 0 after the end of an example (1 before
        it); int64 `[B, L]`.
    """
    if not items:
        raise ValueError("items is empty; it may be one example or more")
    longest = max(len(item["input_ids"]) for item in items)
    shape = (len(items), -(-longest // MULTIPLE) * MULTIPLE)
    batch = {
        "input_ids": torch.full(shape, pad_id),
        "labels": torch.full(shape, IGNORED),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
    }
    for row, item in enumerate(items):
        size = len(item["input_ids"])
        batch["input_ids"][row, :size] = item["input_ids"]
        batch["labels"][row, :size] = item["labels"]
        batch["attention_mask"][row, :size] = 1
    return batch
