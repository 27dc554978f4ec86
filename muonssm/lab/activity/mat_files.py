"""Read one matrix of numbers from a MATLAB 5 file. Everything wrong with a file is a `DamagedFileError`.

A compressed element says how large it becomes, and can lie. So elements are decompressed here, up to a limit, before
scipy parses what was checked: one real matrix, whose sizes the file can hold.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from muonssm.lab.core.untrusted import UntrustedFileError, read_bytes

from .recordings import DamagedFileError

HEADER = 128  # bytes: a text, the version and the byte order
COMPRESSED = 15  # the type of a compressed element
MAX_BYTES = 1 << 26  # of a file, and of its elements when they are decompressed
HERE = "muonssm.lab.activity.mat_files"


def read_matrix(path: Path, name: str) -> np.ndarray:
    """Read the matrix `name` as float64 `[rows, columns]`."""
    try:
        content = read_bytes(path, MAX_BYTES, f"{HERE}.MAX_BYTES")
    except UntrustedFileError as error:
        raise DamagedFileError(error.reason) from error
    return _parse(_decompress(content), name)


def _decompress(content: bytes) -> bytes:
    """Return the same file with all elements decompressed, `MAX_BYTES` at most."""
    order = {b"IM": "<", b"MI": ">"}.get(content[HEADER - 2 : HEADER])
    if order is None or not content.startswith(b"MATLAB 5.0"):
        raise DamagedFileError(f"must be a MATLAB 5 file, got one that begins with {content[:10]!r}")
    parts, size = [content[:HEADER]], HEADER
    for kind, element in _elements(content, order):
        parts.append(_inflate(element[8:], MAX_BYTES - size) if kind == COMPRESSED else element)
        size += len(parts[-1])
    plain = b"".join(parts)
    if any(kind == COMPRESSED for kind, _ in _elements(plain, order)):
        raise DamagedFileError("must be compressed once, got an element that is compressed twice")
    return plain


def _elements(content: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the bytes of every element, its 8 bytes of type and size included."""
    place = HEADER
    while place < len(content):
        if place + 8 > len(content):
            raise DamagedFileError(f"must have whole elements, got {len(content) - place} bytes after the last one")
        kind, count = struct.unpack_from(f"{order}II", content, place)
        end = place + 8 + count
        if end > len(content):
            raise DamagedFileError(f"must be whole, got an element that ends {end - len(content)} bytes after the file")
        yield kind, content[place:end]
        place = end


def _inflate(data: bytes, limit: int) -> bytes:
    inflating = zlib.decompressobj()
    try:
        part = inflating.decompress(data, max(1, limit))
    except zlib.error as error:
        raise DamagedFileError(f"must have elements compressed by zlib: {error}") from error
    if inflating.unconsumed_tail:
        raise DamagedFileError(
            f"must have {MAX_BYTES} bytes or less when it is decompressed ({HERE}.MAX_BYTES), got more"
        )
    if not inflating.eof:
        raise DamagedFileError("must be whole, got a part of a compressed element")
    return part


def _parse(content: bytes, name: str) -> np.ndarray:
    """Parse a matrix of an uncompressed file, after a look at its type and sizes."""
    from scipy.io import loadmat, whosmat

    try:
        listed = whosmat(io.BytesIO(content))
    except Exception as error:  # scipy raises whatever its parser meets
        raise DamagedFileError(f"must be a MATLAB 5 file, got one that cannot be parsed: {error!s:.200}") from error
    found = {variable: (shape, kind) for variable, shape, kind in listed}
    if len(found) < len(listed):  # scipy would read all of them, and only the last one is checked here
        raise DamagedFileError(f"must have every variable once, got {len(listed)} variables with {len(found)} names")
    if name not in found:
        names = ", ".join(map(repr, found)) or "none"
        raise DamagedFileError(f"must have the variable {name!r}, got {names:.200}")
    shape, kind = found[name]
    # A number takes one byte or more: MATLAB stores small integers in one.
    if kind not in ("double", "single") or len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] > len(content):
        raise DamagedFileError(f"must have a matrix of numbers as {name!r}, got {kind} of sizes {shape!s:.100}")
    try:
        values = loadmat(io.BytesIO(content), variable_names=[name])[name]
    except Exception as error:
        raise DamagedFileError(f"must have {name!r} whole, which cannot be parsed: {error!s:.200}") from error
    if values.shape != tuple(shape) or values.dtype.kind not in "fiu":
        raise DamagedFileError(f"must have real numbers as {name!r}, got {values.dtype} of sizes {values.shape}")
    return values.astype(np.float64)
