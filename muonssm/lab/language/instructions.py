"""Instructions with responses: the prompt of Stanford Alpaca, and examples with the loss on the response only.

prompt("Name a color.")                                 # "Below is an instruction ... ### Response:"
examples = Examples(open_tokens(folder).train, 2048)
batch = pad_examples([examples[0], examples[1]], pad_id=0)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_int
from muonssm.lab.core.scorer import IGNORED

from .shards import TokenSplit

FIELDS = ("instruction", "input", "output")
PAD_MULTIPLE = 8  # padded lengths are multiples of 8, which suits matrix units
# The exact text of tatsu-lab/stanford_alpaca: no newline follows the last colon.
TASK = "Below is an instruction that describes a task"
CONTEXT = ", paired with an input that provides further context"
REQUEST = ". Write a response that appropriately completes the request.\n\n"


def prompt(instruction: str, context: str = "") -> str:
    """The published Alpaca prompt for an instruction; `context` is the data set's `input`."""
    if not context:
        return f"{TASK}{REQUEST}### Instruction:\n{instruction}\n\n### Response:"
    return f"{TASK}{CONTEXT}{REQUEST}### Instruction:\n{instruction}\n\n### Input:\n{context}\n\n### Response:"


class Examples(Dataset):
    """One document per item, with the loss on what follows the prompt.

    An item has `input_ids` and `labels`, int64 `[L]` with L <= `length`; `labels[t]` is the token after `input_ids[t]`,
    or -100 where that token belongs to the prompt.

    Attributes:
        truncated: number of examples with more than `length` + 1 tokens, which are cut.
        left_out: number of examples whose prompt alone has more than `length` tokens.
    """

    def __init__(self, split: TokenSplit, length: int) -> None:
        check_int("length", length, 1)
        self.split, self.length = split, length
        sizes, prompt_lengths = split.sizes()
        usable = prompt_lengths <= length
        self.documents = np.flatnonzero(usable)
        self.left_out = int(np.count_nonzero(~usable))
        self.truncated = int(np.count_nonzero(sizes[usable] > length + 1))
        if not len(self.documents):
            if not len(prompt_lengths):
                raise ValueError(f"split must have documents, got {split.name}, which has none")
            least = prompt_lengths.min()
            raise ValueError(f"length must be >= {least}, the shortest prompt of {split.name}, got {length}")

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens, prompt_length = self.split.document(int(self.documents[index]))
        tokens = tokens[: self.length + 1].astype(np.int64)
        labels = tokens[1:].copy()
        labels[: max(0, prompt_length - 1)] = IGNORED
        return {"input_ids": torch.from_numpy(tokens[:-1]), "labels": torch.from_numpy(labels)}


def pad_examples(items: Sequence[dict[str, Tensor]], pad_id: int) -> dict[str, Tensor]:
    """Make a batch of examples, padded on the right to a multiple of 8.

    Returns:
        `input_ids`, `labels` and `attention_mask`, int64 `[B, L]`; after the end of an example they are `pad_id`, -100
        and 0.
    """
    if not items:
        raise ValueError("items must have one example or more, got none")
    longest = max(len(item["input_ids"]) for item in items)
    shape = (len(items), -(-longest // PAD_MULTIPLE) * PAD_MULTIPLE)
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
