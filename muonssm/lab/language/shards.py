"""DataSplits tokens: shards on disk, read through memory maps, and blocks of them to train on.

tokens.json                     the manifest, written last: what there is, and its checksums
train-00000.bin                 token after token, uint16 (uint32 for a vocabulary of 65536 or more), little-endian
train-00000.documents.npy       for each document of the shard, where it begins in it and how many tokens its prompt
                                has: int64 [n, 2]
validation-00000.bin, ...       the same for the validation part
tokenizer.json, ...             what transformers.AutoTokenizer loads from this folder

data = open_tokens(folder)
blocks = Blocks(data.train, 4096)
blocks[0]["input_ids"], blocks[0]["labels"]             # [4096] each; labels are the next tokens
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import is_int
from muonssm.lab.core.files import atomic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
MANIFEST, PROGRESS = "tokens.json", "progress.json"
PARTS = ("train", "validation")
IGNORED = -100  # a label that no loss counts
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
AGAIN = "prepare the data again, into a new folder"


def dtype_for(vocab_size: int) -> str:
    """The name of the smallest type for ids of that vocabulary."""
    return "uint16" if vocab_size < 65536 else "uint32"


# writing


def write_json(path: Path, content: Any) -> None:
    """A JSON file, all of it or nothing."""
    with atomic(path) as part:
        part.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardWriter:
    """Writes one shard; it has its name once it is closed."""

    def __init__(self, folder: Path, part: str, number: int, dtype: str) -> None:
        self.path, self.dtype = folder / f"{part}-{number:05d}.bin", DTYPES[dtype]
        self.digest, self.tokens = hashlib.sha256(), 0
        self.documents: list[tuple[int, int]] = []
        self.part = self.path.with_name(self.path.name + ".part")
        self.file = open(self.part, "wb")  # noqa: SIM115  closed by `close` or `abandon`

    def add(self, tokens: np.ndarray, prompt_length: int) -> None:
        """One document, its EOS with it."""
        content = tokens.astype(self.dtype).tobytes()
        self.file.write(content)
        self.digest.update(content)
        self.documents.append((self.tokens, prompt_length))
        self.tokens += len(tokens)

    def close(self) -> dict[str, Any]:
        """Brings the shard to disk; its record for the manifest."""
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
        """Leaves no file behind."""
        self.file.close()
        self.part.unlink(missing_ok=True)


def documents_path(shard: Path) -> Path:
    """The file beside a shard that says where its documents begin."""
    return shard.with_suffix(".documents.npy")


# reading


class TokenPart:
    """The tokens of one part: all of its shards as if they were one.

    Attributes:
        name: the part's folder and name, for messages.
        tokens, documents: how many there are.
    """

    def __init__(self, folder: Path, part: str, record: dict[str, Any], dtype: str) -> None:
        self.name, self.dtype = f"{folder} ({part})", DTYPES[dtype]
        self.paths = [folder / shard["file"] for shard in record["shards"]]
        self.first_token = np.cumsum([0, *(shard["tokens"] for shard in record["shards"])])
        self.first_document = np.cumsum([0, *(shard["documents"] for shard in record["shards"])])
        self.tokens, self.documents = int(self.first_token[-1]), int(self.first_document[-1])
        self._maps: dict[tuple[str, int], np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the maps: a worker that gets this opens its own, where pickling them would copy the data."""
        return {**self.__dict__, "_maps": {}}

    def _shard(self, number: int) -> np.ndarray:
        key = ("tokens", number)
        if key not in self._maps:
            self._maps[key] = np.memmap(self.paths[number], dtype=self.dtype, mode="r")
        return self._maps[key]

    def _documents(self, number: int) -> np.ndarray:
        """Starts within the shard and prompt lengths: int64 `[n, 2]`."""
        key = ("documents", number)
        if key not in self._maps:
            self._maps[key] = np.load(documents_path(self.paths[number]), mmap_mode="r")
        return self._maps[key]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop`, over the borders of shards; a copy, uint16 or uint32 `[stop - start]`."""
        if not 0 <= start <= stop <= self.tokens:
            raise ValueError(f"start and stop are {start} and {stop}; they may be in order, from 0 to {self.tokens}")
        found = [np.empty(0, self.dtype)]
        first = int(np.searchsorted(self.first_token, start, side="right")) - 1
        for number in range(first, len(self.paths)):
            begin = int(self.first_token[number])
            if begin >= stop:
                break
            found.append(self._shard(number)[max(0, start - begin) : stop - begin])
        return np.concatenate(found)

    def document(self, index: int) -> tuple[np.ndarray, int]:
        """The tokens of a document, and how many of them are its prompt."""
        if not 0 <= index < self.documents:
            raise IndexError(f"document is {index}; it may be 0 to {self.documents - 1}")
        number = int(np.searchsorted(self.first_document, index, side="right")) - 1
        listing, tokens = self._documents(number), self._shard(number)
        here = index - int(self.first_document[number])
        start = int(listing[here, 0])
        stop = int(listing[here + 1, 0]) if here + 1 < len(listing) else len(tokens)
        return np.array(tokens[start:stop]), int(listing[here, 1])

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin within the tokens from `start` to `stop`: int64, in order."""
        found = [np.empty(0, np.int64)]
        for number, begin in enumerate(self.first_token[:-1].tolist()):
            if begin < stop and start < self.first_token[number + 1]:
                column = self._documents(number)[:, 0]
                low, high = np.searchsorted(column, [start - begin, stop - begin])
                found.append(column[low:high] + begin)
        return np.concatenate(found)

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
        manifest: what `tokens.json` says.
        train, validation: its parts; validation has no tokens where none were set aside.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        self.train, self.validation = (TokenPart(folder, part, manifest[part], manifest["dtype"]) for part in PARTS)

    @property
    def tokenizer_path(self) -> Path:
        """The folder that `transformers.AutoTokenizer.from_pretrained` takes."""
        return self.folder

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that made these tokens."""
        from .tokenizer import load_tokenizer

        return load_tokenizer(str(self.folder))


def open_tokens(folder: str | Path, check: bool = True) -> PreparedTokens:
    """A prepared folder, after a check of its files: their sizes, and with `check` their checksums."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    check_files(folder, manifest, check)
    return PreparedTokens(folder, manifest)


def check_files(folder: Path, manifest: dict[str, Any], check: bool) -> None:
    """That the files of a manifest are there and have the recorded sizes, and with `check` the checksums.

    Those of the tokenizer are small; their checksums are always compared.
    """
    for name, expected in manifest["tokenizer"]["files"].items():
        _check_file(folder / name, expected)
    size = DTYPES[manifest["dtype"]].itemsize
    for shard in [shard for part in PARTS for shard in manifest[part]["shards"]]:
        path = folder / shard["file"]
        _check_file(path, shard["sha256"] if check else None, shard["tokens"] * size)
        _check_file(documents_path(path), shard["documents_sha256"] if check else None)
        _check_listing(documents_path(path), shard)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; it may be one with prepared tokens")
    if not path.is_file():
        if (folder / PROGRESS).is_file():
            raise ValueError(f"{folder} has no {MANIFEST}: its preparation did not finish; resume takes it up")
        raise ValueError(f"{folder} has no {MANIFEST}; it may be a folder with prepared tokens")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"{path} has format {manifest['format']!r}, and this version reads {FORMAT}; {AGAIN}")
        shards = [shard for part in PARTS for shard in manifest[part]["shards"]]
        keys = {"file", "tokens", "documents", "sha256", "documents_sha256"}
        whole = all(keys <= set(shard) for shard in shards) and manifest["dtype"] in DTYPES
        whole = whole and {"files"} <= set(manifest["tokenizer"]) and {"kind", "vocab_size", "eos_id"} <= set(manifest)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged; {AGAIN}")
    return manifest


def _check_file(path: Path, expected: str | None, size: int | None = None) -> None:
    """That a file is there, has `size` bytes and the checksum `expected`, as far as these are given."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; copy the folder again, or {AGAIN}")
    found = path.stat().st_size
    if size is not None and found != size:
        raise ValueError(f"{path} has {found} bytes and should have {size}; copy the folder again, or {AGAIN}")
    if expected is not None and checksum(path) != expected:
        raise ValueError(f"{path} is damaged: its checksum is not the recorded one; copy the folder again, or {AGAIN}")


def _check_listing(path: Path, shard: dict[str, Any]) -> None:
    try:
        listing = np.load(path, mmap_mode="r")
    except (ValueError, EOFError):
        listing = np.empty(0)
    if listing.shape != (shard["documents"], 2) or listing.dtype != np.int64:
        raise ValueError(f"{path} is damaged; copy the folder again, or {AGAIN}")


# blocks


class Blocks(Dataset):
    """Packed blocks of `length` + 1 tokens, one after the other; the last token of one is the first of the next.

    An item has `input_ids` and `labels`, int64 `[length]`; `labels[t]` is the token after `input_ids[t]`. With
    `keep_apart` it has `document_ids` too, int64 `[length]`, which count the documents of a block from 0, and a label
    is -100 where it would be the first token of another document. Tokens after the last whole block are not used.
    """

    def __init__(self, part: TokenPart, length: int, keep_apart: bool = False) -> None:
        if not is_int(length, 1):
            raise ValueError(f"length is {length!r}; it may be an integer >= 1")
        if not part.tokens:
            raise ValueError(f"{part.name} has 0 tokens; prepare the data with a validation above 0")
        if part.tokens < length + 1:
            raise ValueError(
                f"length is {length}, for which a block has {length + 1} tokens, and {part.name} has {part.tokens}; "
                f"length may be {part.tokens - 1} at most, or there may be more data"
            )
        self.part, self.length, self.keep_apart = part, length, keep_apart

    def __len__(self) -> int:
        return (self.part.tokens - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block is {index}; it may be 0 to {len(self) - 1}")
        start = index % len(self) * self.length
        stop = start + self.length + 1
        tokens = torch.from_numpy(self.part.read(start, stop).astype(np.int64))
        inputs, labels = tokens[:-1].clone(), tokens[1:].clone()
        if not self.keep_apart:
            return {"input_ids": inputs, "labels": labels}
        begins = torch.zeros(self.length + 1, dtype=torch.int64)
        begins[torch.from_numpy(self.part.starts(start + 1, stop) - start)] = 1
        labels[begins[1:] == 1] = IGNORED
        return {"input_ids": inputs, "labels": labels, "document_ids": begins[:-1].cumsum(0)}
