"""Tokenizers: load one, or train a byte-level BPE; tokenize documents.

tokenizer = load_tokenizer("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T")
tokenizer = train_bpe(texts, vocab_size=4096)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from muonssm.checks import check_int
from muonssm.lab.core.files import checksum, naming

from .corpora import Document, Unusable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EOS = "<|endoftext|>"
BYTES = "bytes"  # the name of the tokenizer whose tokens are bytes
KNOWN_EOS = (EOS, "</s>", "<|end_of_text|>", "<eos>", "[EOS]")
MIN_VOCAB_SIZE = 257  # 256 bytes and EOS
MAX_WORD = 4096  # characters; training a BPE takes time that grows with the square of a word's length
# Runs of letters and digits, or of other characters, that are longer: a word is within one such run.
LONG_RUN = re.compile(rf"(?<![^\W_])[^\W_]{{{MAX_WORD + 1},}}|(?<![\W_])[\W_]{{{MAX_WORD + 1},}}")
TOKENIZERS = "None, 'bytes', a tokenizer.json, a folder with one, or a name on the hub"


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer with an EOS token from a folder, a tokenizer.json or the hub. Code beside it is never run."""
    from transformers import AutoTokenizer

    if name == BYTES:
        return byte_tokenizer()
    path = Path(name)
    if not path.exists() and (path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".json"):
        raise ValueError(f"tokenizer must be {TOKENIZERS}, got {name!r}, which does not exist")
    refuse_code(path.parent if path.is_file() else path)
    try:
        if path.is_file() and not (path.parent / "tokenizer_config.json").is_file():
            tokenizer = _load_file(path)
        else:  # tokenizer_config.json names the special tokens of the tokenizer.json beside it
            folder, local = str(path.parent) if path.is_file() else name, path.exists()
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=local)
    except Exception as error:  # the libraries raise Exception itself for a damaged file
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"tokenizer must be {TOKENIZERS}, got {name!r}, which cannot be loaded: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer must have an EOS token, got {name!r}, which has none")
    return tokenizer


def _own_code_map() -> dict[str, str]:
    """Return the `auto_map` that our models are saved with; imported here, as it needs transformers' models."""
    from muonssm.models.language import MuonSSMConfig

    return MuonSSMConfig.code_map()


def refuse_code(folder: Path) -> None:
    """Raise if a file of a local folder asks to run code of its own, with the key `auto_map`.

    A model of this library names the two files that `save_pretrained` writes. They are not run either: its classes are
    those of this package.
    """
    for path in (folder / "tokenizer_config.json", folder / "config.json"):
        try:
            content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} must be JSON, got a damaged file: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}")
        if content.get("auto_map") and (path.name != "config.json" or content["auto_map"] != _own_code_map()):
            raise ValueError(
                f"{str(folder)!r} must be a folder without code, got the key auto_map in {path.name}, which asks to "
                f"run code; nothing was run. Remove the key if the folder can be used without the code"
            )


def _load_file(path: Path) -> PreTrainedTokenizerBase:
    """Load a lone tokenizer.json. It does not name its EOS; take the token with a usual name, if there is one."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    candidates = [token for token in KNOWN_EOS if token in tokenizer.get_added_vocab()]
    if len(candidates) == 1:
        tokenizer.eos_token = candidates[0]
    return tokenizer


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Make the tokenizer whose ids 0 to 255 are bytes of UTF-8; 256 is `<|endoftext|>`: EOS, BOS and padding."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({**{character: byte for byte, character in _byte_characters()}, EOS: 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, pad_token=EOS)


def _byte_characters() -> Iterator[tuple[int, str]]:
    """Yield each byte with its character in `ByteLevel`: itself if printable, else the next one from 256 on."""
    unused = iter(range(256, 512))
    for byte in range(256):
        printable = 33 <= byte <= 126 or (161 <= byte <= 255 and byte != 173)
        yield byte, chr(byte if printable else next(unused))


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE with `<|endoftext|>` as EOS, BOS and padding; the same texts give the same tokenizer.

    It has fewer than `vocab_size` tokens if the texts have too few pairs that occur twice. Words of more than
    `MAX_WORD` characters are cut for training, so that the time is linear in their length.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_int("vocab_size", vocab_size, MIN_VOCAB_SIZE)
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
    tokenizer.train_from_iterator((piece for text in texts for piece in cut_long_words(text)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS, pad_token=EOS)


def cut_long_words(text: str) -> Iterator[str]:
    """Yield the text in pieces without runs of more than `MAX_WORD` characters; ordinary text is one piece."""
    start = 0
    for run in LONG_RUN.finditer(text):
        for stop in range(run.start() + MAX_WORD, run.end(), MAX_WORD):
            yield text[start:stop]
            start = stop
    yield text[start:]


def sample_texts(texts: Iterable[tuple[float, str]], max_characters: int) -> list[str]:
    """Sample texts evenly from a stream of unknown length, in order, at most `max_characters` in total.

    Each text comes with its own random number in [0, 1). Texts below a threshold are kept; the threshold is halved
    whenever they have too many characters. A single text that is too long is cut.
    """
    kept: list[tuple[float, str]] = []
    threshold, total = 1.0, 0
    for number, text in texts:
        if number < threshold:
            kept.append((number, text[:max_characters]))
            total += min(len(text), max_characters)
        while total > max_characters:
            threshold /= 2
            kept = [pair for pair in kept if pair[0] < threshold] or [min(kept)]
            total = sum(len(text) for _, text in kept)
    return [text for _, text in kept]


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, str]:
    """Write the files for `AutoTokenizer.from_pretrained(folder)`; return their names with their checksums."""
    with naming(folder):
        names = sorted({Path(file).name for file in tokenizer.save_pretrained(str(folder)) if Path(file).is_file()})
    for name in names:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    return {name: checksum(folder / name) for name in names}


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The number of ids, with added tokens and gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, int64, without special tokens; names of special tokens in a text are text."""
    if not tokenizer.is_fast:
        calls = (tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False) for text in texts)
        return [np.array(call["input_ids"], dtype=np.int64) for call in calls]
    backend = tokenizer.backend_tokenizer  # takes half the time of the wrapper
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]


class EncodedDocument(NamedTuple):
    """The tokens of a document, int64, with EOS at the end unless it was truncated."""

    tokens: np.ndarray
    prompt_length: int = 0
    truncated: bool = False


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], max_length: int
) -> list[EncodedDocument | Unusable]:
    """Tokenize documents as one batch; instructions are truncated to `max_length` tokens, response and EOS included.

    Prompt and response are tokenized separately, so that the prompt has the same tokens as at generation time.
    """
    texts = encode(tokenizer, [document.text for document in documents])
    prompts = iter(encode(tokenizer, [d.prompt for d in documents if d.prompt is not None]))
    eos = tokenizer.eos_token_id
    return [
        _with_eos(document.name, text, eos)
        if document.prompt is None
        else _with_prompt(document.name, next(prompts), text, eos, max_length)
        for document, text in zip(documents, texts, strict=True)
    ]


def _with_eos(name: str, text: np.ndarray, eos: int) -> EncodedDocument | Unusable:
    return EncodedDocument(np.concatenate([text, [eos]])) if len(text) else Unusable(name, "no tokens")


def _with_prompt(
    name: str, prompt: np.ndarray, text: np.ndarray, eos: int, max_length: int
) -> EncodedDocument | Unusable:
    if len(prompt) >= max_length:
        return Unusable(name, f"prompt of {max_length} tokens or more")
    tokens = np.concatenate([prompt, text, [eos]])
    return EncodedDocument(tokens[:max_length], len(prompt), len(tokens) > max_length)
