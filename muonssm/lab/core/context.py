"""`training.context`: consecutive processes share the sequences of their batches, each with a piece of every one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from .processes import Processes


class ContextShare(NamedTuple):
    """Which batches a process trains on, and which piece of their sequences it has.

    Attributes:
        size: number of processes that share a batch.
        piece: number of this process among them.
        batch: number of its batch.
        batches: number of batches in a step.
    """

    size: int
    piece: int
    batch: int
    batches: int

    @classmethod
    def of(cls, process: Processes, size: int) -> ContextShare:
        """The share of a process."""
        return cls(size, process.rank % size, process.rank // size, process.total // size)

    def group(self) -> Callable[[], AbstractContextManager[Any]]:
        """Connect the processes that share a batch; return the context in which their models run."""
        if self.size == 1:
            return nullcontext
        import torch.distributed as dist

        from muonssm.distributed import context_parallel

        own, _ = dist.new_subgroups(self.size)
        return lambda: context_parallel(own, states="own")

    def shard(self, loader: Any) -> Any:
        """Let accelerate's data loader give processes that share a batch the same one."""
        sampler = loader.batch_sampler
        if self.size > 1:
            # With one batch per step there is nothing to even out: the last one is as on a single process.
            sampler.num_processes, sampler.process_index = self.batches, self.batch
            sampler.even_batches = self.batches > 1
        return loader
