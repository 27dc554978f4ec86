"""What processes send each other, with a count of the bytes: the only place of the package that calls collectives.

An affine map of a state, Z -> Z A + C, is a pair of tensors that have the same leading axes:

    A   `[..., k, k]`      the state after a piece as a function of the one before it
    C   `[..., n, k]`      the state after a piece that starts from zero
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """The collectives of a group of processes.

    Attributes:
        rank, size: number of this process in the group, and of all.
        bytes_sent: bytes that this process has sent so far. A broadcast to the others is counted where it starts; of a
            sum over all processes every process sends 2 (size - 1) / size times its tensor, as in a ring.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent = 0

    def pass_on(self, tensor: Tensor | None, to: int | None, source: int | None, like: Tensor | None) -> Tensor | None:
        """Send `tensor` to the process `to` and receive one shaped `like` from `source`; None where there is no one."""
        operations = []
        if to is not None and tensor is not None:
            tensor = tensor.contiguous()
            operations.append(self._operation(dist.isend, tensor, to))
            self.bytes_sent += tensor.numel() * tensor.itemsize
        received = None
        if source is not None and like is not None:
            received = torch.empty(like.shape, dtype=like.dtype, device=like.device)
            operations.append(self._operation(dist.irecv, received, source))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return received

    def _operation(self, kind: object, tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._global(peer), self.group)  # type: ignore[arg-type]

    def _global(self, rank: int) -> int:
        """Return the rank among all processes, by which torch names a process of a group."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of the process `source`, on every process."""
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.broadcast(copy, self._global(source), group=self.group)
        if self.rank == source:
            self.bytes_sent += (self.size - 1) * copy.numel() * copy.itemsize
        return copy

    def sum_to(self, tensor: Tensor, target: int) -> Tensor:
        """Return the sum of all processes' tensors on the process `target`, zeros elsewhere."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.reduce(total, self._global(target), group=self.group)
        if self.rank == target:
            return total
        self.bytes_sent += total.numel() * total.itemsize
        return torch.zeros_like(total)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all processes' tensors, on every process."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        self.bytes_sent += 2 * (self.size - 1) * total.numel() * total.itemsize // self.size
        return total

    def gather(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Return every process's `numbers`, in order."""
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        self.bytes_sent += (self.size - 1) * own.numel() * own.itemsize
        return [one.tolist() for one in every]

    def differing(self, text: str, device: torch.device) -> list[int]:
        """Return the processes whose `text` differs from this one's; every process must ask. Sends eight bytes each."""
        every = [found for (found,) in self.gather([digest(text)], device)]
        return [rank for rank, found in enumerate(every) if found != every[self.rank]]

    def prefix(self, A: Tensor, C: Tensor, backwards: bool = False) -> Tensor:
        """Return the state before this process's piece: the maps of all earlier pieces, applied to zero in order.

        With `backwards`, earlier means of higher rank. Takes 1 + ceil(log2(size - 1)) rounds of messages between pairs
        of processes. A map that reaches back to the first piece is sent without its A, which would multiply zero.
        """
        position = self.size - 1 - self.rank if backwards else self.rank
        before_A, before_C = torch.zeros_like(A), torch.zeros_like(C)
        held = (A, C)
        for distance in rounds(self.size):
            target, source = neighbors(position, distance, self.size)
            got = self._swap_maps(held, position, target, source, distance, backwards)
            if got is None:
                continue
            if distance == 0:
                before_A, before_C = got
            else:
                before_A, before_C = got[0] @ before_A, got[1] @ before_A + before_C
            held = (before_A, before_C)
        return before_C

    def _swap_maps(
        self,
        held: tuple[Tensor, Tensor],
        position: int,
        target: int | None,
        source: int | None,
        distance: int,
        backwards: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """Send the map that is held to `target`, and return the one of `source`; both are positions in the order."""
        A, C = held
        outgoing = None
        if target is not None:
            parts = [C] if reaches_the_first(position, distance) else [C, A]
            outgoing = torch.cat([part.flatten() for part in parts])
        like = None
        if source is not None:
            with_A = not reaches_the_first(source, distance)
            like = C.new_empty(C.numel() + (A.numel() if with_A else 0))
        to, sender = (self._rank_at(place, backwards) for place in (target, source))
        got = self.pass_on(outgoing, to, sender, like)
        if got is None:
            return None
        received_C = got[: C.numel()].view_as(C)
        rest = got[C.numel() :]
        return rest.view_as(A) if rest.numel() else torch.zeros_like(A), received_C

    def _rank_at(self, position: int | None, backwards: bool) -> int | None:
        if position is None:
            return None
        return self.size - 1 - position if backwards else position


def digest(text: str) -> int:
    """Return a number of 63 bits for a text, the same in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def rounds(size: int) -> list[int]:
    """Return the distances of a prefix over `size` processes: 0 stands for the first round, from each to the next."""
    distances, distance = ([0] if size > 1 else []), 1
    while distance < size - 1:
        distances.append(distance)
        distance *= 2
    return distances


def neighbors(position: int, distance: int, size: int) -> tuple[int | None, int | None]:
    """Return to whom a process sends in a round, and from whom it receives; None for nobody.

    After the first round a process holds the map of the piece before its own, so the first one holds nothing.
    """
    step = max(distance, 1)
    first = 0 if distance == 0 else 1  # the first position that holds a map to send
    target = position + step if position >= first and position + step < size else None
    source = position - step if position - step >= first else None
    return target, source


def reaches_the_first(position: int, distance: int) -> bool:
    """Return whether the map that `position` sends in a round begins with the first piece.

    In the first round it is the map of its own piece; before the round of distance D it spans D pieces up to its own.
    """
    return position == 0 if distance == 0 else position <= distance
