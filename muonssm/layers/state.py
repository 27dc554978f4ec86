"""`MixerState`: what a mixer hands on to the continuation of its sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonssm.ops import MemoryState


class MixerState(NamedTuple):
    """The last inputs of the short convolution, and the memory.

        conv    `[B, K - 1, C]`, in the dtype of the activations
        memory  `MemoryState(S, M)`, `[B, ...]` each, float32 (float64 for float64 inputs)

    The first axis counts sequences, packed ones too. Its size does not depend on how much was read.
    """

    conv: Tensor
    memory: MemoryState

    def to(self, *arguments: Any, **options: Any) -> MixerState:
        """On another device, or in another dtype, as `Tensor.to`."""
        return self.map(lambda x: x.to(*arguments, **options))

    def detach(self) -> MixerState:
        """The same values, cut from the graph (truncated back-propagation)."""
        return self.map(Tensor.detach)

    def reorder(self, index: Tensor) -> MixerState:
        """The states of the sequences `index`, in that order; an index may repeat (beam search)."""
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    def map(self, function: Callable[[Tensor], Tensor]) -> MixerState:
        """The same with `function` of every tensor."""
        return MixerState(function(self.conv), MemoryState(function(self.memory.S), function(self.memory.M)))


# `torch.load` of a file with such a state needs no more than its default, weights_only=True.
torch.serialization.add_safe_globals([MixerState])
