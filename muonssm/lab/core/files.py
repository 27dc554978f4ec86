"""Atomic writes: a file is written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path; at the end the file there replaces `path`. After an error `path` is unchanged."""
    temporary = path.with_name(path.name + ".part")
    yield temporary
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
