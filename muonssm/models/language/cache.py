"""`MuonSSMCache`: what a model keeps of what it read. For mixers that is their state, whose size never grows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from muonssm.layers import MixerState

from .config import LINEAR, MuonSSMConfig


class MemoryLayer(LinearAttentionCacheLayerMixin):
    """The state of one mixer, as a layer of transformers' cache."""

    is_compileable = False  # a new state replaces the old one, so no address is fixed

    def __init__(self) -> None:
        super().__init__()
        self.state: MixerState | None = None

    def write(self, state: MixerState) -> None:
        """Keeps what a mixer returned."""
        if self.record_past:
            raise ValueError("the cache is to take steps back (assisted generation); a recurrent memory cannot")
        self.state = state
        self.has_previous_state[0] = True

    def lazy_initialization(self, *_: Any, **__: Any) -> None:
        """There is nothing to set up: a state brings its own shape."""

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0) -> Tensor:
        """transformers' own mixers use this one; ours `write`."""
        raise NotImplementedError("this layer keeps a MixerState; `write` takes one")

    update_recurrent_state = update_conv_state  # type: ignore[assignment]

    def reset(self) -> None:
        """Forgets."""
        self.state, self.has_previous_state[0] = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The states of these sequences, in this order (beam search)."""
        self.state = None if self.state is None else self.state.reorder(beam_idx)

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times."""
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def offload(self) -> None:
        """To the CPU, remembering from where."""
        if self.state is not None:
            self.device = self.state.conv.device  # type: ignore[assignment]
            self.state = self.state.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Back from there."""
        if self.state is not None and self.device is not None:
            self.state = self.state.to(self.device, non_blocking=True)

    def crop(self, tokens_to_remove: int) -> None:
        """A recurrent memory cannot take steps back."""
        if tokens_to_remove != 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}; with a recurrent memory it may be 0")

    @property
    def is_croppable(self) -> bool:
        return False


class MuonSSMCache(Cache):
    """A `MemoryLayer` for every mixer, a window of keys and values for every attention, and the count of tokens."""

    def __init__(self, config: MuonSSMConfig) -> None:
        assert config.layer_types is not None
        self.seen = 0
        window = config.sliding_window
        kinds = config.layer_types
        super().__init__([MemoryLayer() if kind == LINEAR else DynamicSlidingWindowLayer(window) for kind in kinds])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, padding included; the same for every layer."""
        return self.seen

    def reset(self) -> None:
        """Forgets everything."""
        self.seen = 0
        super().reset()

    def memory_bytes(self) -> int:
        """What the mixers' states take."""
        states = [layer.state for layer in self.layers if isinstance(layer, MemoryLayer) and layer.state is not None]
        tensors = [tensor for state in states for tensor in (state.conv, *state.memory)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def layer_of(cache: Cache | None, index: int) -> MemoryLayer | None:
    """The layer that mixer `index` reads and writes."""
    if cache is None:
        return None
    if not isinstance(cache, MuonSSMCache):
        kind = type(cache).__name__
        raise ValueError(f"past_key_values is a {kind}; it may be None or a MuonSSMCache, as a call returns it")
    layer = cache.layers[index]
    assert isinstance(layer, MemoryLayer)
    return layer
