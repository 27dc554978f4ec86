"""`MuonSSMCache`: the state of a model after the tokens so far; the state of a mixer does not grow with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from muonssm.layers import MixerState

from .config import LINEAR, MuonSSMConfig


class MemoryLayer(LinearAttentionCacheLayerMixin):
    """The state of one mixer, as a layer of transformers' cache."""

    is_compileable = False  # every step replaces the state by a new one, so no address is fixed

    def __init__(self) -> None:
        super().__init__()
        self.state: MixerState | None = None

    def write(self, state: MixerState) -> None:
        """Store the state that a mixer returned."""
        if self.record_past:
            raise ValueError("past_key_values must not record past steps: a recurrent memory cannot undo them")
        self.state = state
        self.has_previous_state[0] = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """Do nothing: a state has its own shape."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0) -> Tensor:
        """Raise: only transformers' own mixers call this method; ours call `write`."""
        raise NotImplementedError("this layer holds a MixerState; use `write`")

    update_recurrent_state = update_conv_state  # type: ignore[assignment]

    def reset(self) -> None:
        """Forget the state."""
        self.state, self.has_previous_state[0] = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the sequences `beam_idx`, in that order (beam search)."""
        self.state = None if self.state is None else self.state.reorder(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """Move the state to the CPU and remember its device."""
        if self.state is not None:
            self.device = self.state.conv.device  # type: ignore[assignment]
            self.state = self.state.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Move the state back to its device."""
        if self.state is not None and self.device is not None:
            self.state = self.state.to(self.device, non_blocking=True)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise unless nothing is to be removed: a recurrent memory cannot undo steps."""
        if tokens_to_remove != 0:
            raise ValueError(f"tokens_to_remove must be 0 with a recurrent memory, got {tokens_to_remove}")

    @property
    def is_croppable(self) -> bool:
        return False


class MuonSSMCache(Cache):
    """A `MemoryLayer` per mixer, a window of keys and values per attention layer, and the number of tokens so far."""

    def __init__(self, config: MuonSSMConfig) -> None:
        assert config.layer_types is not None
        self.seen = 0
        window = config.sliding_window
        super().__init__(
            [MemoryLayer() if name == LINEAR else DynamicSlidingWindowLayer(window) for name in config.layer_types]
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens so far, with padding; the same for every layer."""
        return self.seen

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0
        super().reset()

    def memory_bytes(self) -> int:
        """Return the size of the mixers' states in bytes."""
        states = [layer.state for layer in self.layers if isinstance(layer, MemoryLayer) and layer.state is not None]
        tensors = [tensor for state in states for tensor in (state.conv, *state.memory)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def layer_of(cache: Cache | None, index: int) -> MemoryLayer | None:
    """Return the cache layer of mixer `index`."""
    if cache is None:
        return None
    if not isinstance(cache, MuonSSMCache):
        raise TypeError(f"past_key_values must be None or a MuonSSMCache, got {type(cache).__name__}")
    layer = cache.layers[index]
    assert isinstance(layer, MemoryLayer)
    return layer
