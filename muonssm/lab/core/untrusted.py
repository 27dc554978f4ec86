"""Read files that others wrote: regular files alone, up to a size, and errors that name the file and the reason.

A pipe or a device is never opened: reading one can wait or go on forever. A link counts as what it points to.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 1 << 30  # of a file
MAX_LINE = 1_000_000  # characters in a line of a text file
HERE = "muonssm.lab.core.untrusted"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class UntrustedFileError(ValueError):
    """A file that cannot be used; `reason` is the message without the file's name, such as "must be ..., got ..."."""

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path, self.reason = Path(path), reason


def check_regular_file(path: str | Path) -> os.stat_result:
    """Check without opening it that this is a regular file, or a link to one; a missing file is FileNotFoundError."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # loops of links, names that are too long or have a zero byte
        raise UntrustedFileError(path, f"must be a regular file, got an error: {_describe(error)}") from error
    _check_kind(path, status)
    return status


def _check_kind(path: str | Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise UntrustedFileError(path, f"must be a regular file, got {kind}")


@contextmanager
def open_file(path: str | Path, max_bytes: int | None = None, setting: str = f"{HERE}.MAX_BYTES") -> Iterator[BinaryIO]:
    """Open a regular file for reading; `setting` is the name of the limit, for the error."""
    check_regular_file(path)
    limit = MAX_BYTES if max_bytes is None else max_bytes
    try:
        file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115 (the errors of reading are the caller's)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UntrustedFileError(path, f"must be a file that can be read, got an error: {_describe(error)}") from error
    with file:
        status = os.fstat(file.fileno())
        _check_kind(path, status)  # again: another file can have taken its place
        if status.st_size > limit:
            raise UntrustedFileError(path, f"must have {limit} bytes or less ({setting}), got {status.st_size}")
        yield file


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _describe(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def read_bytes(path: str | Path, max_bytes: int | None = None, setting: str = f"{HERE}.MAX_BYTES") -> bytes:
    """Read a regular file of `max_bytes` or less; None is `MAX_BYTES`."""
    with open_file(path, max_bytes, setting) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = file.read(size + 1)
        except OSError as error:
            raise UntrustedFileError(path, f"must be a file that can be read, got {_describe(error)}") from error
    if len(content) > size:
        raise UntrustedFileError(path, f"must keep its size while it is read, got more than its {size} bytes")
    return content


def read_text(path: str | Path, max_bytes: int | None = None, setting: str = f"{HERE}.MAX_BYTES") -> str:
    """Read a text file in UTF-8, with or without a byte order mark; every line ends with "\\n"."""
    try:
        text = read_bytes(path, max_bytes, setting).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UntrustedFileError(path, f"must be UTF-8 text, got byte {error.start} that is not") from error
    if "\0" in text:
        raise UntrustedFileError(path, f"must be UTF-8 text, got a zero at character {text.index(chr(0))}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: str | Path, max_bytes: int | None = None, setting: str = f"{HERE}.MAX_BYTES") -> list[str]:
    """Read the lines of a text file, without their ends; each has `MAX_LINE` characters or less."""
    lines = read_text(path, max_bytes, setting).split("\n")
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE:
            wanted = f"lines of {MAX_LINE} characters or less ({HERE}.MAX_LINE)"
            raise UntrustedFileError(path, f"must have {wanted}, got {len(line)} in line {number}")
    return lines


def read_json(
    path: str | Path, max_bytes: int | None = None, setting: str = f"{HERE}.MAX_BYTES", finite: bool = True
) -> Any:
    """Read a JSON file; if `finite` is set, numbers that are not finite as floats are refused."""
    text = read_text(path, max_bytes, setting)
    parsers: dict[str, Any] = {"parse_float": _parse_finite, "parse_constant": _parse_finite, "parse_int": _parse_int}
    try:
        return json.loads(text, **parsers if finite else {})
    except (ValueError, RecursionError) as error:
        raise UntrustedFileError(path, f"is not valid JSON: {error}") from error


def printable(text: str) -> str:
    """Text of others for a terminal: control characters, and bytes that are not UTF-8, are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _parse_int(text: str) -> int:
    _parse_finite(text)
    return int(text)


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"numbers must be finite, got {text}")
    return value
