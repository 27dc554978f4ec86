"""Read files of others, plain or compressed with gzip or xz; a limit on the size also holds after decompression.

with open_decompressed(Path("rows.jsonl.xz"), 1 << 30, "corpora.MAX_FILE_BYTES") as file:
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

COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}


def inner_suffix(path: Path) -> str:
    """The suffix without that of the compression, in small letters: `.json` for `a.json` and for `a.JSON.xz`."""
    return Path(path.stem if path.suffix.lower() in COMPRESSED else path).suffix.lower()


@contextmanager
def open_decompressed(path: Path, max_bytes: int, setting: str) -> Iterator[BinaryIO]:
    """Open a regular file; decompress it if its name ends in .gz or .xz. `setting` names the limit in the error.

    Reading raises UntrustedFileError if the compressed file is damaged or has more than `max_bytes` decompressed bytes.
    """
    decompress = COMPRESSED.get(path.suffix.lower())
    with open_file(path, max_bytes, setting) as file:
        if decompress is None:
            yield file
        else:
            with decompress(file) as decompressed:
                yield io.BufferedReader(_Limited(path, decompressed, max_bytes, setting))


def read_decompressed(path: Path, max_bytes: int, setting: str) -> bytes:
    """Read a whole regular file; decompress it if its name ends in .gz or .xz."""
    if path.suffix.lower() not in COMPRESSED:
        return read_bytes(path, max_bytes, setting)
    with open_decompressed(path, max_bytes, setting) as file:
        return file.read()


class _Limited(io.RawIOBase):
    """The decompressed content, `max_bytes` at most; an error names the file."""

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
            wanted = f"must decompress to {self.max_bytes} bytes or less ({self.setting}), got more"
            raise UntrustedFileError(self.path, wanted)
        buffer[: len(content)] = content
        return len(content)
