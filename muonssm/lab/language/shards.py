"""Prepared tokens: shards on disk, read through memory maps, and fixed-length blocks to train on.

tokens.json                     the manifest, written last: contents, settings and checksums
train-00000.bin                 token ids, uint16 (uint32 for vocabularies of 65,536 or more), little-endian
train-00000.documents.npy       int64 [documents, 2]: start of each document in the shard, and length of its prompt
validation-00000.bin, ...       the same for the validation set; test-00000.bin for a published test set
tokenizer.json, ...             files for transformers.AutoTokenizer

data = open_tokens(folder)
blocks = Blocks(data.train, 4096)
blocks[0]["input_ids"], blocks[0]["labels"]             # [4096] each; the labels are the next tokens
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_int
from muonssm.lab.core.files import atomic, checksum
from muonssm.lab.core.scorer import IGNORED

from .manifest import PREPARE_AGAIN, SPLITS, TEST, read_manifest, splits_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST, PROGRESS = "tokens.json", "progress.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
COPY_AGAIN = f"copy the folder again, or {PREPARE_AGAIN}"


def dtype_for(vocab_size: int) -> str:
    """The name of the smallest dtype for the ids of a vocabulary."""
    return "uint16" if vocab_size < 65536 else "uint32"


# ---- writing


class ShardWriter:
    """Writes one shard. The file gets its final name when it is closed."""

    def __init__(self, folder: Path, split: str, number: int, dtype: str) -> None:
        self.path, self.dtype = folder / f"{split}-{number:05d}.bin", DTYPES[dtype]
        self.digest, self.tokens = hashlib.sha256(), 0
        self.documents: list[tuple[int, int]] = []
        self.part = self.path.with_name(self.path.name + ".part")
        self.file = open(self.part, "wb")  # noqa: SIM115  closed by `close` or `abandon`

    def add(self, tokens: np.ndarray, prompt_length: int) -> None:
        """Add a document; its tokens include EOS."""
        content = tokens.astype(self.dtype).tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.documents.append((self.tokens, prompt_length))
        self.tokens += len(tokens)

    def close(self) -> dict[str, Any]:
        """Finish the shard on disk; return its record for the manifest."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.part.replace(self.path)
        listing = documents_path(self.path)
        with atomic(listing) as part, open(part, "wb") as file:
            np.save(file, np.array(self.documents, dtype="<i8"))
        return {
            "file": self.path.name,
            "tokens": self.tokens,
            "documents": len(self.documents),
            "sha256": self.digest.hexdigest(),
            "documents_sha256": checksum(listing),
        }

    def abandon(self) -> None:
        """Remove the unfinished file."""
        self.file.close()
        self.part.unlink(missing_ok=True)


def documents_path(shard: Path) -> Path:
    """The file beside a shard that lists its documents."""
    return shard.with_suffix(".documents.npy")


# ---- reading


class TokenSplit:
    """The tokens of one split: all of its shards as one sequence.

    Attributes:
        name: folder and split, for messages.
        tokens, documents: how many there are.
    """

    def __init__(self, folder: Path, split: str, record: dict[str, Any], dtype: str) -> None:
        self.name, self.dtype = f"{folder} ({split})", DTYPES[dtype]
        self.paths = [folder / shard["file"] for shard in record["shards"]]
        self.first_token = np.cumsum([0, *(shard["tokens"] for shard in record["shards"])])
        self.first_document = np.cumsum([0, *(shard["documents"] for shard in record["shards"])])
        self.tokens, self.documents = int(self.first_token[-1]), int(self.first_document[-1])
        self._maps: dict[tuple[str, int], np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the memory maps: pickling them would copy the data, and a worker opens its own."""
        return {**self.__dict__, "_maps": {}}

    def _shard(self, number: int) -> np.ndarray:
        key = ("tokens", number)
        if key not in self._maps:
            self._maps[key] = np.memmap(self.paths[number], dtype=self.dtype, mode="r")
        return self._maps[key]

    def _documents(self, number: int) -> np.ndarray:
        """Start within the shard and prompt length of each document: int64 `[n, 2]`."""
        key = ("documents", number)
        if key not in self._maps:
            self._maps[key] = _open_listing(documents_path(self.paths[number]))
        return self._maps[key]

    def read(self, start: int, stop: int) -> np.ndarray:
        """Copy the tokens from `start` to `stop`, across shards: uint16 or uint32 `[stop - start]`."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"start and stop must be in order and in 0 to {self.tokens}, got {start} and {stop}")
        pieces = [np.empty(0, self.dtype)]
        first = int(np.searchsorted(self.first_token, start, side="right")) - 1
        for number in range(first, len(self.paths)):
            begin = int(self.first_token[number])
            if begin >= stop:
                break
            pieces.append(self._shard(number)[max(0, start - begin) : stop - begin])
        return np.concatenate(pieces)

    def document(self, index: int) -> tuple[np.ndarray, int]:
        """The tokens of a document, and how many of them are its prompt."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document must be in 0 to {self.documents - 1}, got {index}")
        number = int(np.searchsorted(self.first_document, index, side="right")) - 1
        listing, tokens = self._documents(number), self._shard(number)
        in_shard = index - int(self.first_document[number])
        start = int(listing[in_shard, 0])
        stop = int(listing[in_shard + 1, 0]) if in_shard + 1 < len(listing) else len(tokens)
        return np.array(tokens[start:stop]), int(listing[in_shard, 1])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin within the tokens from `start` to `stop`: int64, in order."""
        positions = [np.empty(0, np.int64)]
        for number, begin in enumerate(self.first_token[:-1].tolist()):
            if begin < stop and start < self.first_token[number + 1]:
                column = self._documents(number)[:, 0]
                low, high = np.searchsorted(column, [start - begin, stop - begin])
                positions.append(column[low:high] + begin)
        return np.concatenate(positions)

    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """The number of tokens of each document, and of its prompt: int64 `[documents]` each."""
        listings = [self._documents(number) for number in range(len(self.paths))]
        if not listings:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        starts = np.concatenate([a[:, 0] + b for a, b in zip(listings, self.first_token[:-1], strict=True)])
        return np.diff(starts, append=self.tokens), np.concatenate([listing[:, 1] for listing in listings])


class PreparedTokens:
    """A prepared folder.

    Attributes:
        manifest: the content of `tokens.json`.
        train, validation: its splits; validation can be empty.
        test: a published test split; None if there is none.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.train, self.validation = (TokenSplit(folder, name, manifest[name], manifest["dtype"]) for name in SPLITS)
        self.test = TokenSplit(folder, TEST, manifest[TEST], manifest["dtype"]) if TEST in manifest else None

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer that made these tokens."""
        from .tokenizer import load_tokenizer

        return load_tokenizer(str(self.folder))


def open_tokens(folder: str | Path, check: bool = True) -> PreparedTokens:
    """Open a prepared folder and verify the sizes of its files, and with `check` their checksums."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    check_files(folder, manifest, check)
    return PreparedTokens(folder, manifest)


def check_files(folder: Path, manifest: dict[str, Any], check: bool) -> None:
    """Verify that the files of a manifest exist with the recorded sizes, and with `check` the recorded checksums.

    Tokenizer files and listings of documents are small; what they hold is always verified.
    """
    for name, expected in manifest["tokenizer"]["files"].items():
        _check_file(folder / name, expected)
    size = DTYPES[manifest["dtype"]].itemsize
    for shard in [shard for split in splits_of(manifest) for shard in manifest[split]["shards"]]:
        path = folder / shard["file"]
        _check_file(path, shard["sha256"] if check else None, shard["tokens"] * size)
        _check_file(documents_path(path), shard["documents_sha256"] if check else None)
        _check_listing(documents_path(path), shard)
        if check:
            _check_ids(path, manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path, wanted = folder / MANIFEST, "source must be a folder with prepared tokens"
    if not folder.is_dir():
        raise ValueError(f"{wanted}, got {str(folder)!r}, which is not a folder")
    if not path.is_file():
        unfinished = (folder / PROGRESS).is_file()
        reason = "whose preparation is unfinished; use --resume to continue it" if unfinished else f"without {MANIFEST}"
        raise ValueError(f"{wanted}, got {str(folder)!r}, {reason}")
    return read_manifest(path)


def _check_file(path: Path, expected: str | None, size: int | None = None) -> None:
    """Verify that a file exists, and its size and checksum where they are given."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; {COPY_AGAIN}")
    actual = path.stat().st_size
    if size is not None and actual != size:
        raise ValueError(f"{path} must have {size} bytes, got {actual}; {COPY_AGAIN}")
    if expected is not None and checksum(path) != expected:
        raise ValueError(f"{path} is damaged: its checksum differs from the recorded one; {COPY_AGAIN}")


def _open_listing(path: Path) -> np.ndarray:
    """The documents of a shard: start and prompt length of each, int64 `[documents, 2]`."""
    try:
        listing = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, EOFError, OSError, OverflowError, TypeError, SyntaxError, TokenError) as error:
        raise ValueError(f"{path} is damaged: {error}; {COPY_AGAIN}") from error
    if listing.ndim != 2 or listing.shape[1] != 2 or listing.dtype != np.int64:
        raise ValueError(f"{path} is damaged: it must be int64 [documents, 2]; {COPY_AGAIN}")
    return listing


def _check_listing(path: Path, shard: dict[str, Any]) -> None:
    """Verify the number of documents, and that they follow each other and have their prompts inside."""
    listing = _open_listing(path)
    if len(listing) != shard["documents"]:
        raise ValueError(f"{path} is damaged: documents must be {shard['documents']}, got {len(listing)}; {COPY_AGAIN}")
    starts, prompts = listing.T
    sizes = np.diff(starts, append=shard["tokens"])
    if starts[0] != 0 or (sizes < 1).any() or (prompts < 0).any() or (prompts > sizes).any():
        raise ValueError(f"{path} is damaged: documents must follow each other, with their prompts; {COPY_AGAIN}")


def _check_ids(path: Path, manifest: dict[str, Any]) -> None:
    largest = int(np.memmap(path, dtype=DTYPES[manifest["dtype"]], mode="r").max())
    if largest >= manifest["vocab_size"]:
        wanted = f"token ids must be < {manifest['vocab_size']}, the size of the vocabulary"
        raise ValueError(f"{path} is damaged: {wanted}, got {largest}; {COPY_AGAIN}")


# ---- blocks


class Blocks(Dataset):
    """Packed blocks of `length` + 1 consecutive tokens; the last token of a block is the first of the next.

    An item has `input_ids` and `labels`, int64 `[length]`; `labels[t]` is the token after `input_ids[t]`. With
    `keep_apart` it also has `document_ids`, int64 `[length]`, which number the documents of the block from 0, and a
    label is -100 where it would be the first token of another document. Tokens after the last full block are not used.
    """

    def __init__(self, split: TokenSplit, length: int, keep_apart: bool = False) -> None:
        check_int("length", length, 1)
        if not split.tokens:
            raise ValueError(
                f"split must have tokens, got {split.name}, which has 0; prepare the data with validation > 0"
            )
        if split.tokens < length + 1:
            raise ValueError(
                f"length must be <= {split.tokens - 1} for {split.name}, which has {split.tokens} tokens, got "
                f"{length}; use a smaller length, or prepare more data (the validation set's share is `--validation`)"
            )
        self.split, self.length, self.keep_apart = split, length, keep_apart

    def __len__(self) -> int:
        return (self.split.tokens - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block must be in 0 to {len(self) - 1}, got {index}")
        start = index % len(self) * self.length
        stop = start + self.length + 1
        tokens = torch.from_numpy(self.split.read(start, stop).astype(np.int64))
        inputs, labels = tokens[:-1].clone(), tokens[1:].clone()
        if not self.keep_apart:
            return {"input_ids": inputs, "labels": labels}
        begins = torch.zeros(self.length + 1, dtype=torch.int64)
        begins[torch.from_numpy(self.split.starts(start + 1, stop) - start)] = 1
        labels[begins[1:] == 1] = IGNORED
        return {"input_ids": inputs, "labels": labels, "document_ids": begins[:-1].cumsum(0)}
