"""Atomic writes, JSON files whose errors name them, checksums, and the cache folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import untrusted

LEFTOVER = re.compile(r".+\.[0-9]+-[0-9a-f]{8}\.part")  # what `atomic` calls its temporary files
JSON_LIMIT = 1 << 28  # bytes; a larger file is none of ours
WRITE_FAILURES = (  # words of errors that torch raises when it cannot write
    "PytorchStreamWriter",
    "inline_container",
    "unexpected pos",
    "open file failed",
    "iostream error",
)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path; at the end the file there replaces `path`.

    After an error or an interrupt `path` is unchanged and the temporary file is gone. An error of the disk names
    `path`.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    with naming(path):
        try:
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an error of writing that does not say where into an OSError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and not LEFTOVER.fullmatch(Path(error.filename).name)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        reason = str(error).partition("\n")[0]
        by_torch = isinstance(error, RuntimeError) and any(words in reason for words in WRITE_FAILURES)
        by_rust = type(error).__name__ == "SafetensorError" or re.search(r"\(os error \d+\)", reason)  # also tokenizers
        if not (by_torch or by_rust):
            raise
        raise OSError(errno.EIO, f"cannot be written ({reason})", str(path)) from error


def sentence(error: BaseException) -> str:
    """An error in one sentence; one of the disk without its number, if it says where."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left of `atomic` writes into a folder; call it with the folder locked."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if LEFTOVER.fullmatch(path.name) and path.is_file():
            path.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; what UTF-8 cannot write, as in names of files, is escaped."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_json(path: Path, kind: type = object, finite: bool = True) -> Any:
    """The content of a JSON file, a `kind` (dict, list); an error names the file. NaN is refused if `finite`."""
    if not path.is_file():
        raise ValueError(f"{path} must be a JSON file, and is not there")
    try:
        content = untrusted.read_json(path, JSON_LIMIT, f"{__name__}.JSON_LIMIT", finite)
    except untrusted.UntrustedFileError as error:
        raise ValueError(f"{path} is damaged: it {error.reason}") from error
    if not isinstance(content, kind):
        names: dict[type, str] = {dict: "an object", list: "a list"}
        raise ValueError(f"{path} is damaged: it must hold {names.get(kind, kind.__name__)}, got {_short(content)}")
    return content


def _short(content: Any) -> str:
    text = repr(content)
    return text if len(text) < 60 else f"{text[:60]}..."


def checksum(path: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal."""
    untrusted.check_regular_file(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """Where data that can be made again is kept: $MUONSSM_CACHE, $XDG_CACHE_HOME/muonssm or ~/.cache/muonssm."""
    own, common = os.environ.get("MUONSSM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(common or "~/.cache").expanduser() / "muonssm"
