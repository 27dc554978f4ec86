"""`locked`: one process at a time works in a folder.

The lock is the kernel's (flock), on a file `lock` with pid, host and time. The kernel frees it when its process ends,
however it ends, so that the file of a killed process stops nobody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .files import naming
from .processes import is_first_process

LOCK = "lock"
_held: dict[Path, int] = {}  # file descriptors of the locks of this process, by folder


@contextmanager
def locked(folder: str | Path, argument: str = "--output") -> Iterator[None]:
    """Hold the lock of a folder, which `argument` names, inside the block; raise if another process has it.

    The folder is made if need be, and removed again if it is still empty at the end. A block inside of another one of
    the same process does nothing, and neither does one in a process after torchrun's first.
    """
    path = Path(folder).absolute().resolve()
    if path in _held or not is_first_process():
        yield
        return
    created = [place for place in (path, *path.parents) if not place.exists()]
    _held[path] = _acquire(path, folder, argument)
    try:
        yield
    finally:
        (path / LOCK).unlink(missing_ok=True)
        os.close(_held.pop(path))
        for place in created:
            with contextlib.suppress(OSError):  # it is not empty
                place.rmdir()


def _acquire(path: Path, shown: str | Path, argument: str) -> int:
    """Lock and fill the file; again if its last holder removed it in between."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{argument} must be a folder, got {str(shown)!r}, which is a file")
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue
        try:
            _flock(file, path, shown, argument)
            if _is_same(file, path / LOCK):
                _fill(file, path)
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _flock(file: int, path: Path, shown: str | Path, argument: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = _holder(path / LOCK)
        raise ValueError(f"{argument} must be a folder that is not in use, got {str(shown)!r}, which {who}") from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        print(f"warning: {path} cannot be locked; make sure that no other process uses it", file=sys.stderr)


def _is_same(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _fill(file: int, path: Path) -> None:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    content = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    try:
        with naming(path / LOCK):
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(content).encode(), 0)
    except OSError:
        (path / LOCK).unlink(missing_ok=True)
        raise


def _holder(path: Path) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return f"process {content['pid']} on {content['host']} has held since {content['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process holds"


def _close_in_child() -> None:
    """A forked process, such as a data loader's worker, must not keep the lock when this one is killed."""
    for file in _held.values():
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
