"""Run `muonssm` in processes that tests can kill.

They are forked from a server that has imported everything, so that each starts at once, works from its first moment,
and a test of it takes seconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import shutil
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from muonssm.cli import main
from muonssm.lab.core.parallel_runs import train_all
from muonssm.lab.core.recipe import Recipe

ROOT = Path(__file__).parents[3]
CONTEXT = multiprocessing.get_context("forkserver")
NEW_USER, NEW_MOUNTS, PRIVATE, REMOUNT = 0x10000000, 0x00020000, 1 << 18 | 1 << 14, 32  # of unshare(2) and mount(2)
ENLARGED = 1 << 30


class Ended(NamedTuple):
    """How a command ended: its exit code, and what it printed to stdout and stderr."""

    code: int
    printed: str

    @property
    def last_line(self) -> str:
        """The last line that is not empty; a progress bar ends in a line of its own."""
        return [line for line in self.printed.replace("\r", "\n").splitlines() if line.strip()][-1]


class Running:
    """A command that runs."""

    def __init__(self, target, log: Path, *arguments) -> None:
        _start_server()
        threads = torch.get_num_threads()
        self.log = log
        self.process: BaseProcess = CONTEXT.Process(target=_child, args=(target, str(log), threads, arguments))
        self.process.start()

    def kill(self) -> int:
        """Send SIGKILL; return the exit code, which is another one if the command had ended."""
        self.process.kill()
        return self.wait().code

    def wait(self, seconds: float = 300) -> Ended:
        """Wait for the end."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"{self.log} did not end in {seconds} s")
        return Ended(self.process.exitcode, self.log.read_text(errors="replace"))


def start(log: Path, *arguments: str) -> Running:
    """Start `muonssm` with these arguments; stdout and stderr go to the file `log`."""
    return Running(_muonssm, log, *map(str, arguments))


def run(log: Path, *arguments: str) -> Ended:
    """Run `muonssm` to its end."""
    return start(log, *arguments).wait()


def _start_server() -> None:
    """Start the server, which takes what it preloads from its environment."""
    CONTEXT.set_forkserver_preload(["tests.lab.core.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        multiprocessing.forkserver.ensure_running()


def _child(target, log: str, threads: int, arguments: tuple) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.setsid()  # so that a kill of this process spares the server
    torch.set_num_threads(threads)
    code = target(*arguments)
    sys.stdout.flush()
    sys.exit(code)


def _muonssm(*arguments: str) -> int:
    return main(arguments)


def killed_in_checkpoint(count: int, *arguments: str) -> int:
    """Run a command that kills itself in its `count`-th torch.save, of which half is written."""
    saves, save = [], torch.save

    def killing(content, path, *others, **options):
        saves.append(path)
        if len(saves) == count:
            with open(path, "wb") as file:
                file.write(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return save(content, path, *others, **options)

    torch.save = killing
    return main(arguments)


def trained_by_a_worker(folder: str, *changes: str) -> int:
    """Train the recipe `folder` in another process, as studies do."""
    train_all({Path(folder): Recipe.load("folder", changes)}, "test", workers=1)
    return 0


# ---- a small disk


def can_mount() -> bool:
    """Whether a process can mount a file system of its own here."""
    if not sys.platform.startswith("linux"):
        return False
    process = CONTEXT.Process(target=_mount, args=(str(ROOT / "tests"), 1 << 20))
    _start_server()
    process.start()
    process.join()
    return process.exitcode == 0


def _mount(place: str, size: int, more_flags: int = 0) -> None:
    """Mount a file system in memory at `place`, which this process alone sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not more_flags:
        user = os.getuid()
        _check(libc.unshare((NEW_USER if user else 0) | NEW_MOUNTS))
        if user:
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        _check(libc.mount(None, b"/", None, PRIVATE, None))
    _check(libc.mount(b"tmpfs", place.encode(), b"tmpfs", more_flags, f"size={size}".encode()))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def on_small_disk(place: str, size: int, source: str | None, kept: str, *arguments: str) -> int:
    """Run a command on a disk of `size` bytes at `place`, then on a larger one with --resume.

    The folder `source` is copied to the disk first. What the disk has in the end goes to the folder `kept`, and what it
    had after the first attempt is printed. Returns the exit code of the first attempt, plus 100 if the second failed.
    """
    _mount(place, ENLARGED)
    if source:
        shutil.copytree(source, Path(place) / "run")
    used = os.statvfs(place)
    _mount(place, (used.f_blocks - used.f_bfree) * used.f_frsize + size, REMOUNT)
    code = main(arguments)
    sys.stdout.flush()
    print("\nleft:", *sorted(str(path.relative_to(place)) for path in Path(place).rglob("*")), flush=True)
    _mount(place, ENLARGED, REMOUNT)
    again = main([*arguments, "--resume"]) if code else 0
    shutil.copytree(place, kept)
    return code + (100 if again else 0)
