"""Tokenizers: one that is given, or a byte-level BPE trained on the source; and texts to tokens.

tokenizer = load_tokenizer("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T")
tokenizer = train_bpe(texts, vocab_size=4096)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .corpora import Document, Lost
from .shards import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "<|endoftext|>"
KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
LEAST = 257  # tokens of a byte-level vocabulary: 256 bytes and EOS
MAY_BE = "None, a tokenizer.json, a folder with one, or a name on the hub"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, of a tokenizer.json, or of the hub; it has an EOS token."""
    from transformers import AutoTokenizer

    path = Path(name)
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json"):
        raise ValueError(f"tokenizer is {name!r}, which is not there; it may be {MAY_BE}")
    try:
        if path.is_file() and not (path.parent / "tokenizer_config.json").is_file():
            tokenizer = _from_file(path)
        else:  # beside a tokenizer.json, that file has the names of its special tokens
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent) if path.is_file() else name)
    except Exception as error:  # the libraries raise Exception itself for a damaged file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"tokenizer is {name!r}, which cannot be loaded: {reason}; it may be {MAY_BE}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer is {name!r}, which has no EOS token; it may be one that has, or None")
    return tokenizer


def _from_file(path: Path) -> PreTrainedTokenizerBase:
    """A tokenizer.json does not say which token is EOS: it is the one of a usual name, if there is only one."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    usual = [token for token in KNOWN_EOS if token in tokenizer.get_added_vocab()]
    if len(usual) == 1:
        tokenizer.eos_token = usual[0]
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE with `<|endoftext|>` as EOS, BOS and padding; the same texts give the same one.

    It has fewer tokens than `vocab_size` where the texts have too few pairs that occur twice.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < LEAST:
        raise ValueError(f"vocab_size is {vocab_size!r}; it may be an integer >= {LEAST}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, pad_token=EOS)


def spread(texts: Iterable[tuple[float, str]], characters: int) -> list[str]:
    """Texts from all over a source, of at most so many characters together, in order.

    Each comes with a number in [0, 1) that is its alone. Those below a bar are kept; whenever they are too many, the
    bar is halved. So the choice needs one pass, and no knowledge of how much is to come. A single text that is too long
    is cut.
    """
    kept: list[tuple[float, str]] = []
    bar, total = 1.0, 0
    for number, text in texts:
        if number < bar:
            kept.append((number, text[:characters]))
            total += min(len(text), characters)
        while total > characters:
            bar /= 2
            kept = [pair for pair in kept if pair[0] < bar] or [min(kept)]
            total = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, str]:
    """Writes what `AutoTokenizer.from_pretrained(folder)` needs; the files' names, with their checksums."""
    names = sorted({Path(file).name for file in tokenizer.save_pretrained(str(folder)) if Path(file).is_file()})
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    return {name: checksum(folder / name) for name in names}


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many ids there are, with those of added tokens and any gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, int64, without special tokens: not even those whose names stand in the text."""
    if not tokenizer.is_fast:
        calls = (tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False) for text in texts)
        return [np.array(call["input_ids"], dtype=np.int64) for call in calls]
    backend = tokenizer.backend_tokenizer  # itself, as its results are half as costly as the wrapper's
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in found]


class Encoded(NamedTuple):
    """A document as tokens: int64, with EOS at the end unless the end was left out."""

    tokens: np.ndarray
    prompt_length: int = 0
    truncated: bool = False


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], max_length: int
) -> list[Encoded | Lost]:
    """Each document as tokens, all at once; an instruction has at most `max_length`, its response and EOS with it.

    Prompt and response are tokenised apart: the prompt has the same tokens here as where a response is asked for.
    """
    eos = [tokenizer.eos_token_id]
    texts = encode(tokenizer, [document.text for document in documents])
    prompts = iter(encode(tokenizer, [d.prompt for d in documents if d.prompt is not None]))
    found: list[Encoded | Lost] = []
    for document, text in zip(documents, texts, strict=True):
        if document.prompt is None:
            lost = Lost(document.name, "has no tokens")
            found.append(Encoded(np.concatenate([text, eos])) if len(text) else lost)
            continue
        prompt = next(prompts)
        tokens = np.concatenate([prompt, text, eos])
        if len(prompt) >= max_length:
            found.append(Lost(document.name, f"has a prompt of {max_length} tokens or more"))
        else:
            found.append(Encoded(tokens[:max_length], len(prompt), len(tokens) > max_length))
    return found
