"""enwik8, the first 10^8 bytes of an English Wikipedia: bytes as tokens, in the published splits.

    prepare_enwik8(Path("enwik8.gz"), Path("tokens"))

The first 90 million bytes are for training, the next 5 million for validation, the last 5 million for testing, each as
one document without EOS, as in the literature. Another file is refused, unless `other_file` is set: it is split at the
same shares of its bytes, rounded down.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np

from muonssm.checks import check_bool
from muonssm.lab.core.files import remove_leftovers, write_json
from muonssm.lab.core.lock import LOCK, locked

from .compressed_files import read_decompressed
from .manifest import FORMAT, TEST
from .shards import MANIFEST, ShardWriter, dtype_for, open_tokens
from .tokenizer import BYTES, byte_tokenizer, save_tokenizer, vocabulary_size

NAME = "enwik8"
SIZE, MD5 = 100_000_000, "a1fa5ffddb56f4953e226637dabbb36a"  # of the published file
BOUNDS = {"train": (0, 90), "validation": (90, 95), TEST: (95, 100)}  # percent of the bytes
LEAST = 100  # bytes, so that every split has some
OWN_FILE = re.compile(  # what this module writes
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|tokens)\.json"
    r"|(train|validation|test)-00000\.(bin|bin\.part|documents\.npy)"
)
MAX_BYTES = 1 << 30  # after decompression
HERE = "muonssm.lab.language.enwik8"


def read_enwik8(path: Path, other_file: bool = False) -> tuple[bytes, str]:
    """Read enwik8, also gzipped; return its bytes and their md5."""
    content = read_decompressed(path, MAX_BYTES, f"{HERE}.MAX_BYTES")
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if not other_file and md5 != MD5:
        raise ValueError(
            f"--from must be enwik8, {SIZE} bytes with the md5 {MD5}, got {str(path)!r} with {len(content)} bytes and "
            f"{md5}; --other-file accepts it"
        )
    if len(content) < LEAST:
        raise ValueError(f"--from must have {LEAST} bytes or more, got {str(path)!r} with {len(content)}")
    return content, md5


def prepare_enwik8(file: Path, output: Path, resume: bool = False, other_file: bool = False) -> dict[str, Any]:
    """Fill the folder `output` with the bytes of enwik8 as tokens; return its manifest.

    Args:
        file: enwik8 or enwik8.gz.
        output: a new or empty folder.
        resume: finish an interrupted job from its start, which takes seconds, or return a finished one.
        other_file: accept any other file of `LEAST` bytes or more, for tests and texts of your own.
    """
    check_bool("other_file", other_file)
    content, md5 = read_enwik8(Path(file), other_file)
    source = {"name": NAME, "file": Path(file).name, "bytes": len(content), "md5": md5, "published": md5 == MD5}
    with locked(output):
        _check_folder(output, resume)
        if (output / MANIFEST).is_file():
            return _finished(output, source)
        for path in output.iterdir():
            if path.name != LOCK:
                path.unlink()
        manifest = _write(content, source, output)
        write_json(output / MANIFEST, manifest)
    return manifest


def _check_folder(output: Path, resume: bool) -> None:
    """Raise unless the folder is empty, or has nothing but what this module writes and `resume` is set."""
    remove_leftovers(output)
    names = sorted({path.name for path in output.iterdir()} - {LOCK})
    if names and not resume:
        advice = "use --resume to continue a job, or another --output"
        raise ValueError(f"output must be a new or empty folder, got {str(output)!r}, which has {names[0]}; {advice}")
    foreign = [name for name in names if not OWN_FILE.fullmatch(name)]
    if foreign:
        wanted = f"output must have a job of {NAME} to resume"
        raise ValueError(f"{wanted}, got {str(output)!r}, which has {foreign[0]}; use another --output")


def _finished(output: Path, source: dict[str, Any]) -> dict[str, Any]:
    """The manifest of a finished job; raise if it was made from another file."""
    manifest = open_tokens(output, check=False).manifest
    before = {key: manifest["source"].get(key) for key in ("name", "md5")}
    if before != {key: source[key] for key in before}:
        wanted = f"the file of the job in {output}, with the md5 {before['md5']}"
        got = f"{source['file']!r} with {source['md5']}"
        raise ValueError(f"--from must be {wanted}, got {got}; or use another --output")
    return manifest


def _write(content: bytes, source: dict[str, Any], output: Path) -> dict[str, Any]:
    """Write the tokenizer and a shard per split; return the manifest."""
    tokenizer = byte_tokenizer()
    size = vocabulary_size(tokenizer)
    manifest: dict[str, Any] = {"format": FORMAT, "kind": "text", "source": source, "config": {"source": NAME}}
    manifest |= {"tokenizer": {"name": BYTES, "files": save_tokenizer(tokenizer, output)}}
    manifest |= {"vocab_size": size, "eos_id": int(tokenizer.eos_token_id), "dtype": dtype_for(size)}
    manifest |= {"left_out": {}, "truncated": 0}
    tokens = np.frombuffer(content, np.uint8)
    for split, (low, high) in BOUNDS.items():
        writer = ShardWriter(output, split, 0, manifest["dtype"])
        try:
            writer.add(tokens[len(tokens) * low // 100 : len(tokens) * high // 100], 0)
            shard = writer.close()
        finally:
            writer.abandon()
        manifest[split] = {"documents": shard["documents"], "tokens": shard["tokens"], "shards": [shard]}
    return manifest
