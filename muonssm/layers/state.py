"""`MixerState`: what a mixer needs to continue its sequences."""

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

    The first axis counts sequences, also packed ones. The size does not depend on how many steps were processed.
    """

    conv: Tensor
    memory: MemoryState

    def to(self, *arguments: Any, **options: Any) -> MixerState:
        """Move to another device or dtype, as `Tensor.to` does."""
        return self.map(lambda x: x.to(*arguments, **options))

    def detach(self) -> MixerState:
        """Detach from the graph, for truncated backpropagation."""
        return self.map(Tensor.detach)

    def reorder(self, index: Tensor) -> MixerState:
        """Select the sequences `index`, in that order, with repetitions (beam search)."""
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    def map(self, function: Callable[[Tensor], Tensor]) -> MixerState:
        """Apply `function` to every tensor."""
        return MixerState(function(self.conv), MemoryState(function(self.memory.S), function(self.memory.M)))


torch.serialization.add_safe_globals([MixerState])  # so that `torch.load` works with weights_only=True
