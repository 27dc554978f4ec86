"""Read files of others that may be packed with gzip or xz; the limit on their size is also one on what they unpack to.

with open_unpacked(Path("rows.jsonl.xz"), 1 << 30, "corpora.MAX_FILE_BYTES") as file:
    for line in file:
        ...
"""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from muonssm.lab.core.untrusted import UntrustedFileError, open_file, read_bytes

PACKED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def inner_suffix(path: Path) -> str:
    """The suffix of what is packed, in small letters: `.json` for `a.json` and for `a.JSON.xz`."""
    return Path(path.stem if path.suffix.lower() in PACKED else path).suffix.lower()


@contextmanager
def open_unpacked(path: Path, max_bytes: int, setting: str) -> Iterator[BinaryIO]:
    """Open a regular file, unpacked if its name ends in .gz or .xz; `setting` is the name of the limit, for the error.

    A damaged packed file, and one that unpacks to more than `max_bytes`, raises UntrustedFileError when it is read.
    """
    unpack = PACKED.get(path.suffix.lower())
    with open_file(path, max_bytes, setting) as file:
        if unpack is None:
            yield file
        else:
            with unpack(file) as unpacked:
                yield io.BufferedReader(_Limited(path, unpacked, max_bytes, setting))


def read_unpacked(path: Path, max_bytes: int, setting: str) -> bytes:
    """Read a regular file as a whole, unpacked if its name ends in .gz or .xz."""
    if path.suffix.lower() not in PACKED:
        return read_bytes(path, max_bytes, setting)
    with open_unpacked(path, max_bytes, setting) as file:
        return file.read()


class _Limited(io.RawIOBase):
    """The unpacked content; an error names the file."""

    def __init__(self, path: Path, file: BinaryIO, max_bytes: int, setting: str) -> None:
        self.path, self.file, self.max_bytes, self.setting = path, file, max_bytes, setting
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            content = self.file.read(len(buffer))
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            kind = {".gz": "a gzip", ".xz": "an xz"}[self.path.suffix.lower()]
            raise UntrustedFileError(self.path, f"must be {kind} file, got a damaged one: {error}") from error
        self.count += len(content)
        if self.count > self.max_bytes:
            wanted = f"must unpack to {self.max_bytes} bytes or less ({self.setting}), got more"
            raise UntrustedFileError(self.path, wanted)
        buffer[: len(content)] = content
        return len(content)
