"""Atomic writes, checksums, and the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path; at the end the file there replaces `path`. After an error `path` is unchanged."""
    temporary = path.with_name(path.name + ".part")
    yield temporary
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Where data that can be made again is kept: $MUONSSM_CACHE, $XDG_CACHE_HOME/muonssm or ~/.cache/muonssm."""
    own, common = os.environ.get("MUONSSM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(common or "~/.cache").expanduser() / "muonssm"
