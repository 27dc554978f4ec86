"""The processes that torchrun started: the only place that reads RANK and WORLD_SIZE."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple


class Processes(NamedTuple):
    """The number of this process, and of all."""

    rank: int
    total: int


def processes() -> Processes:
    """Which process this is; raise if the variables do not fit together, because it would train for nobody."""
    rank, count = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    both = f"RANK={rank!r} and WORLD_SIZE={count!r}".replace("None", "nothing")
    try:
        found = Processes(int(rank or 0), int(count or 1))
    except ValueError as error:
        raise ValueError(f"RANK and WORLD_SIZE must be integers, got {both}") from error
    if not 0 <= found.rank < found.total or (found.total > 1 and rank is None):
        raise ValueError(
            f"RANK must be in 0 to WORLD_SIZE - 1, got {both}; start with torchrun, which sets both, or unset them"
        )
    return found


def is_first_process() -> bool:
    """Whether this process writes files and prints."""
    return processes().rank == 0


def leave_group() -> None:
    """End the connection to the other processes. Without it, a thread of gloo can abort the process at its exit."""
    torch = sys.modules.get("torch")  # no command that did not need torch imports it here
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
