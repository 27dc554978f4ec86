"""The states of a model after the tokens so far, in transformers' cache classes.

A mixer's state lies in transformers' `LinearAttentionLayer`, under the library's names:

conv_states[0]        `[B, C, K - 1]`, the last inputs of the short convolution, by channel and time
recurrent_states[0]   S, the memory
recurrent_states[1]   M, the momentum; conv_states[1] is empty, `[B, C, 0]`

Attention layers keep a window of keys and values, as everywhere in transformers. `DynamicCache(config=...)` and
`StaticCache(config=...)` have these layers, and the model takes both. `MuonSSMCache`, which the model makes itself,
also counts tokens: transformers' classes leave that to attention layers, and a pure model has none.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from muonssm.layers import MixerState
from muonssm.ops import MemoryState

from .config import MuonSSMConfig

SLOTS = range(2)  # S and M


class TokenCount(Cache):
    """Counts tokens, with padding, also where no attention layer does."""

    seen: Any  # None if nobody counted: in a cache that came out of an exported program

    def advance(self, tokens: int) -> None:
        """Count more tokens."""
        if self.seen is not None:
            self.seen += tokens

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens so far; the same for every layer."""
        if any(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return super().get_seq_length(layer_idx)
        if self.seen is None:
            raise ValueError("past_key_values must have counted its tokens, got the output of an exported program")
        return self.seen

    def reset(self) -> None:
        """Forget everything."""
        self.seen = self.seen * 0 if isinstance(self.seen, Tensor) else 0
        super().reset()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        self._change(lambda x: x.repeat_interleave(repeats, dim=0), lambda x: x.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select the sequences `indices`, in that order."""
        self._change(lambda x: x[indices.to(x.device)], lambda x: x.batch_select_indices(indices))

    def _change(self, state: Callable[[Tensor], Tensor], attention: Callable[[Any], None]) -> None:
        """Apply `state` to every tensor of the mixers' layers, and `attention` to the other layers."""
        for layer in self.layers:
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                attention(layer)
            elif layer.has_previous_state[0]:
                for states in (layer.conv_states, layer.recurrent_states):
                    states.update({slot: state(states[slot]) for slot in SLOTS})  # type: ignore[arg-type]

    def crop(self, tokens_to_remove: int) -> None:
        """Raise unless nothing is to be removed: a recurrent memory cannot undo steps."""
        if tokens_to_remove != 0:
            raise ValueError(f"tokens_to_remove must be 0 with a recurrent memory, got {tokens_to_remove}")

    def memory_bytes(self) -> int:
        """Return the size of the mixers' states in bytes."""
        layers = [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        states = [states for layer in layers for states in (layer.conv_states, layer.recurrent_states)]
        return sum(x.numel() * x.element_size() for by_slot in states for x in by_slot.values() if x is not None)


class CacheSnapshot:
    """The state of a `MuonSSMCache` after some tokens; `MuonSSMCache.restore` returns to it, as often as wanted."""

    def __init__(self, seen: int, layers: list[tuple[Any, ...]]) -> None:
        self.seen, self.layers = seen, layers


class MuonSSMCache(TokenCount, DynamicCache):
    """A cache of a `MuonSSMForCausalLM`: states of the mixers, windows of keys and values, and the number of tokens.

    `snapshot` and `restore` keep the state after a prefix that several continuations share, and take back tokens:

        model(prefix, past_key_values=cache)
        start = cache.snapshot()
        for continuation in continuations:
            cache.restore(start)
            model(continuation, past_key_values=cache)
    """

    is_compileable = False  # outside a compiled graph every step replaces the states

    def __init__(self, config: MuonSSMConfig, offloading: bool = False) -> None:
        super().__init__(config=config, offloading=offloading)
        self.seen = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> MuonSSMCache:
        other = copy.copy(self)
        other.__dict__ = {name: copy.deepcopy(x, memo) for name, x in self.__dict__.items() if name != "_snapshots"}
        return other

    def reset(self) -> None:
        """Forget everything."""
        held = self.held()
        for layer in self.layers:  # transformers' reset writes zeros into the tensors
            if held is not None and isinstance(layer, LinearAttentionLayer) and held(layer):
                for states in (layer.conv_states, layer.recurrent_states):
                    states.update({slot: states[slot].clone() for slot in SLOTS})  # type: ignore[union-attr]
        super().reset()

    def snapshot(self) -> CacheSnapshot:
        """Return the state as a value.

        On a CPU nothing is copied, so this takes microseconds: the torch path replaces states and never changes
        them, and native decoding copies a state that a living snapshot holds before it changes it.
        """
        result = CacheSnapshot(self.seen, [_saved(layer) for layer in self.layers])
        self._remember(result)
        return result

    def restore(self, snapshot: CacheSnapshot) -> None:
        """Return to a snapshot of this cache, or of a copy of it."""
        if not isinstance(snapshot, CacheSnapshot):
            raise TypeError(f"snapshot must be a CacheSnapshot, got {type(snapshot).__name__}")
        if len(snapshot.layers) != len(self.layers):
            raise ValueError(f"snapshot must have {len(self.layers)} layers, got {len(snapshot.layers)}")
        self.seen = snapshot.seen
        self._remember(snapshot)
        for layer, saved in zip(self.layers, snapshot.layers, strict=True):
            _restore(layer, saved)

    def _remember(self, snapshot: CacheSnapshot) -> None:
        """Know about a snapshot as long as it lives."""
        self.__dict__.setdefault("_snapshots", weakref.WeakSet()).add(snapshot)

    def held(self) -> Callable[[Any], bool] | None:
        """Return a function that says whether a snapshot holds the state of a layer; None if there are no snapshots."""
        snapshots = self.__dict__.get("_snapshots")  # missing before the first one, and where `count_tokens` made this
        if not snapshots:
            return None
        held = {id(saved[-1]) for snapshot in snapshots for saved in snapshot.layers if saved}
        return lambda layer: isinstance(layer, LinearAttentionLayer) and id(layer.recurrent_states[0]) in held


def _saved(layer: Any) -> tuple[Any, ...]:
    """Return what `_restore` needs; the last one of a mixer's layer is S. Empty at the start."""
    if isinstance(layer, LinearAttentionLayer):
        if not layer.has_previous_state[0]:
            return ()
        conv, memory = layer.conv_states, layer.recurrent_states
        saved = (conv[0], conv[1], memory[1], memory[0])
        return saved if memory[0].is_cpu else tuple(x.clone() for x in saved)  # type: ignore[union-attr]
    return (layer.keys, layer.values, layer.cumulative_length) if layer.is_initialized else ()


def _restore(layer: Any, saved: tuple[Any, ...]) -> None:
    if not saved and isinstance(layer, LinearAttentionLayer):
        layer.has_previous_state[0] = layer.has_previous_state[1] = False
    elif not saved:
        layer.reset()
    elif isinstance(layer, LinearAttentionLayer):
        if not saved[-1].is_cpu:
            saved = tuple(x.clone() for x in saved)
        layer.conv_states[0], layer.conv_states[1], layer.recurrent_states[1], layer.recurrent_states[0] = saved
        layer.has_previous_state[0] = layer.has_previous_state[1] = True
    else:
        # Other tensors over the same numbers: what was appended behind them belongs to another continuation.
        layer.keys, layer.values = saved[0].view_as(saved[0]), saved[1].view_as(saved[1])
        layer.cumulative_length, layer.is_initialized = saved[2], True


class MuonSSMStaticCache(TokenCount, StaticCache):
    """A `StaticCache` that counts tokens, for models without attention layers.

    The number is a tensor, as in transformers' static layers: compiled code would be compiled again for another int.
    """

    def __init__(self, config: MuonSSMConfig, max_cache_len: int, **options: Any) -> None:
        super().__init__(config, max_cache_len, **options)
        self.seen = torch.zeros((), dtype=torch.long)


def count_tokens(cache: Cache | None, device: torch.device) -> None:
    """Make a cache that cannot count tokens do so, in place; it has to be empty."""
    if not isinstance(cache, DynamicCache | StaticCache) or isinstance(cache, TokenCount):
        return
    if any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        return
    if cache.has_previous_state():
        name = type(cache).__name__
        raise ValueError(
            f"past_key_values must be a MuonSSMCache to continue from, got a {name} with states, which has not counted "
            "its tokens; make it by MuonSSMCache(model.config)"
        )
    static = isinstance(cache, StaticCache)
    cache.__class__ = MuonSSMStaticCache if static else MuonSSMCache
    cache.seen = torch.zeros((), dtype=torch.long, device=device) if static else 0  # type: ignore[union-attr]


def read_state(cache: Cache | None, index: int) -> MixerState | None:
    """Return the state of mixer `index`; None at the start."""
    if cache is None:
        return None
    layer = _layer(cache, index)
    if not layer.has_previous_state[0]:
        return None
    conv, memory = layer.conv_states[0], layer.recurrent_states
    assert conv is not None
    return MixerState(conv.transpose(1, 2).contiguous(), MemoryState(memory[0], memory[1]))  # type: ignore[arg-type]


def write_state(cache: Cache, index: int, state: MixerState) -> None:
    """Store the state that mixer `index` returned.

    On a CPU the cache refers to the new tensors. Elsewhere, and in compiled code, their values are copied to the
    tensors that the cache has, whose addresses a captured graph knows.
    """
    layer = _layer(cache, index)
    if layer.record_past:
        raise ValueError("past_key_values must not record past steps: a recurrent memory cannot undo them")
    conv = state.conv.transpose(1, 2)
    if not conv.is_cpu or torch.compiler.is_compiling():
        empty = conv[..., :0]
        for slot, tail, memory in zip(SLOTS, (conv, empty), state.memory, strict=True):
            layer.update_conv_state(tail, slot, conv_kernel_size=tail.shape[-1])
            layer.update_recurrent_state(memory, slot)
        return
    if not layer.has_previous_state[0]:
        _initialize(layer, conv)
    layer.conv_states[0] = conv
    layer.recurrent_states[0], layer.recurrent_states[1] = state.memory


def _initialize(layer: LinearAttentionLayer, conv: Tensor) -> None:
    """Set what `LinearAttentionLayer.lazy_initialization` sets, which would also import torch's compiler."""
    layer.device, layer.dtype = conv.device, conv.dtype  # type: ignore[assignment]
    layer.conv_states[1] = conv.new_empty((*conv.shape[:2], 0))
    for slot, size in zip(SLOTS, (conv.shape[-1], 0), strict=True):
        layer.conv_kernel_size[slot] = size
        layer.is_conv_states_initialized[slot] = layer.is_recurrent_states_initialized[slot] = True
        layer.has_previous_state[slot] = True


def _layer(cache: Cache, index: int) -> LinearAttentionLayer:
    layers = getattr(cache, "layers", ())
    layer = layers[index] if index < len(layers) else None
    if not isinstance(layer, LinearAttentionLayer) or layer.number_of_states != 2:
        raise TypeError(
            "past_key_values must be a MuonSSMCache(model.config), DynamicCache(config=model.config) or "
            f"StaticCache(model.config, ...), got a {type(cache).__name__} without a state for mixer {index}"
        )
    return layer


# torch.export sees a cache as its tensors, by transformers' functions. A number of tokens that is an int is no part of
# it, so that an exported decoding step of a pure model serves every step; a static cache's is a tensor like the others.


def _flatten(cache: Any) -> tuple[list[Any], Any]:
    from transformers.exporters.exporter_dynamo import _pytree_flatten

    shell = cache.__class__.__new__(cache.__class__)
    shell.__dict__.update(cache.__dict__, seen=cache.seen if isinstance(cache.seen, Tensor) else None)
    return _pytree_flatten(shell)


def _flatten_with_keys(cache: Any) -> tuple[list[tuple[Any, Any]], Any]:
    leaves, context = _flatten(cache)
    return [(pytree.SequenceKey(index), leaf) for index, leaf in enumerate(leaves)], context


def _unflatten(leaves: Any, context: Any) -> Any:
    from transformers.exporters.exporter_dynamo import _pytree_unflatten

    return _pytree_unflatten(leaves, context)


for _cls in (MuonSSMCache, MuonSSMStaticCache):
    pytree.register_pytree_node(
        _cls,
        _flatten,
        _unflatten,
        serialized_type_name=f"{_cls.__module__}:{_cls.__qualname__}",
        flatten_with_keys_fn=_flatten_with_keys,
    )
