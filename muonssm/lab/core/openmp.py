"""How the threads of OpenMP wait for each other, and how many there should be.

A training step has thousands of parallel regions. libgomp's threads spin at the end of each until the last one arrives.
If another process wants the core of one of them, that one sleeps for milliseconds, and the others spin meanwhile on the
cores that it could continue on: a step can take 25 times as long. Threads that sleep after a short while leave their
cores free, and the system moves work there at once. Threads that sleep immediately (OMP_WAIT_POLICY=passive) make a
quiet step of a small model a tenth slower, as every region then wakes them up.

libgomp reads its settings once, when it is loaded, which `import torch` does. So the `muonssm` command sets them before
it imports torch, and processes that train several runs inherit them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPINS, FEW = "GOMP_SPINCOUNT", "1000"  # iterations: some ten microseconds, about the time between two regions
SETTINGS = (SPINS, "OMP_WAIT_POLICY", "KMP_BLOCKTIME")  # what a user can have chosen already
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "max 100000", or microseconds of CPU time per period


def usable_cores() -> int:
    """Return the number of cores that this process can use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no quota
        return cores


def let_waiting_threads_sleep() -> bool:
    """Make threads sleep when they wait for long, here and in children; return whether that could still be set.

    Nothing changes if torch is loaded already, or if the user has chosen how threads wait.
    """
    if "torch" in sys.modules or any(name in os.environ for name in SETTINGS):
        return False
    os.environ[SPINS] = FEW
    return True


@contextmanager
def children_that_sleep() -> Iterator[None]:
    """Make threads sleep when they wait for long in the processes that are started inside the block."""
    chosen = any(name in os.environ for name in SETTINGS)
    if not chosen:
        os.environ[SPINS] = FEW
    try:
        yield
    finally:
        if not chosen:
            del os.environ[SPINS]
