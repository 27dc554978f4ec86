"""Check tokens.json and progress.json field by field: an error names the file and the field.

Names of files are those that `prepare` writes, so that none leads out of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from muonssm.checks import is_int
from muonssm.lab.core.files import read_json

FORMAT = 1
KINDS = ("text", "instructions")
SPLITS = ("train", "validation")
TEST = "test"  # a third split, of data sets with a published one
ID_BYTES = {"uint16": 2, "uint32": 4}  # dtypes of token ids
PREPARE_AGAIN = "prepare the data again, into a new folder"
TOKENIZER_FILE = re.compile(r"[\w-][\w.-]{0,99}")
SHARD_FILE = re.compile(r"(train|validation|test)-[0-9]{5,9}\.bin")
CHECKSUM = re.compile(r"[0-9a-f]{64}")


class DamagedFileError(ValueError):
    """A file whose content is not what `prepare` writes."""

    def __init__(self, path: Path, field: str, wanted: str, value: Any) -> None:
        super().__init__(f"{path} is damaged: {field} must be {wanted}, got {value!r:.100}; {PREPARE_AGAIN}")


class Fields:
    """The fields of an object in a JSON file; `place` is the object's own name there."""

    def __init__(self, path: Path, content: Any, place: str = "") -> None:
        self.path, self.content, self.place = path, content, place
        if not isinstance(content, dict):
            raise DamagedFileError(path, place, "an object", content)

    def name(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def get(self, key: str, wanted: str, is_valid: Callable[[Any], bool]) -> Any:
        """The value of a field that is valid; otherwise raise an error that says what is wanted."""
        if key not in self.content:
            raise DamagedFileError(self.path, self.name(key), f"present and {wanted}", None)
        if not is_valid(self.content[key]):
            raise DamagedFileError(self.path, self.name(key), wanted, self.content[key])
        return self.content[key]

    def integer(self, key: str, least: int = 0) -> int:
        return self.get(key, f"an integer >= {least}", lambda value: is_int(value, least))

    def matching(self, key: str, wanted: str, pattern: re.Pattern[str]) -> str:
        return self.get(key, wanted, lambda value: isinstance(value, str) and bool(pattern.fullmatch(value)))

    def one_of(self, key: str, choices: Collection[str]) -> str:
        wanted = f"one of {', '.join(choices)}"
        return self.get(key, wanted, lambda value: isinstance(value, str) and value in choices)

    def list_of(self, key: str) -> list[Any]:
        return self.get(key, "a list", lambda value: isinstance(value, list))

    def inner(self, key: str) -> Fields:
        """The fields of an object within this one."""
        return Fields(self.path, self.get(key, "an object", lambda value: isinstance(value, dict)), self.name(key))


def read_manifest(path: Path) -> dict[str, Any]:
    """Read tokens.json, with all fields that are used later."""
    content = read_json(path, dict)
    fields = Fields(path, content)
    if fields.integer("format", 1) != FORMAT:
        raise ValueError(f"format must be {FORMAT} in {path}, got {content['format']!r:.100}; {PREPARE_AGAIN}")
    fields.one_of("kind", KINDS)
    fields.inner("source").get("name", "text", lambda value: isinstance(value, str))
    _check_tokenizer(fields)
    _check_counts(fields)
    for split in splits_of(content):
        _check_shards(fields.inner(split))
        for key in ("tokens", "documents"):
            total = sum(shard[key] for shard in content[split]["shards"])
            if fields.inner(split).integer(key) != total:
                raise DamagedFileError(path, f"{split}.{key}", f"{total}, the sum over the shards", content[split][key])
    return content


def splits_of(manifest: dict[str, Any]) -> tuple[str, ...]:
    """The splits of a prepared folder."""
    return (*SPLITS, TEST) if TEST in manifest else SPLITS


def read_progress(path: Path) -> dict[str, Any]:
    """Read progress.json, the state of a job; `tokenizer` is None before there is one."""
    content = read_json(path, dict)
    fields = Fields(path, content)
    fields.inner("config")
    fields.inner("source")
    if fields.get("tokenizer", "null or an object", lambda value: isinstance(value, dict | None)) is not None:
        _check_tokenizer(fields)
    _check_counts(fields)
    fields.integer("shards")
    number, batch = fields.integer("number"), fields.inner("batch")
    batch.get("number", f"an integer in 0 to {number}", lambda value: is_int(value) and 0 <= value <= number)
    batch.get("position", "null, a list or an object", lambda value: isinstance(value, list | dict | None))
    for split in SPLITS:
        _check_shards(fields.inner(split))
    return content


def _check_tokenizer(fields: Fields) -> None:
    files = fields.inner("tokenizer").inner("files")
    for name in files.content:
        if not TOKENIZER_FILE.fullmatch(name):
            raise DamagedFileError(fields.path, "a key of tokenizer.files", "the name of a file in the folder", name)
        files.matching(name, "a SHA-256", CHECKSUM)
    size = fields.integer("vocab_size", 1)
    fields.get("eos_id", f"an integer in 0 to {size - 1}", lambda value: is_int(value) and 0 <= value < size)
    fields.one_of("dtype", ID_BYTES)


def _check_counts(fields: Fields) -> None:
    fields.integer("truncated")
    left_out = fields.inner("left_out")
    for reason in left_out.content:
        record = left_out.inner(reason)
        record.integer("count")
        record.get("names", "a list of text", lambda value: isinstance(value, list) and all(map(_is_text, value)))


def _check_shards(split: Fields) -> None:
    for number, shard in enumerate(split.list_of("shards")):
        fields = Fields(split.path, shard, split.name(f"shards[{number}]"))
        fields.matching("file", "the name of a shard, as in train-00000.bin", SHARD_FILE)
        for key in ("tokens", "documents"):
            fields.integer(key, 1)
        for key in ("sha256", "documents_sha256"):
            fields.matching(key, "a SHA-256", CHECKSUM)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)
