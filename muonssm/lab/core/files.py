"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """What is written to the path given becomes `path` at the end; after an error it is as it was before."""
    part = path.with_name(path.name + ".part")
    yield part
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    part.replace(path)
