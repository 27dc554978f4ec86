"""Where a cache keeps the state of a layer, and how a program gets at it.

A program changes states in place. It reads and writes them through the accessors of this file, one per kind of cache
layer, and leaves them where the torch path finds them:

    tail    [B, K - 1, C], any strides
    S, M    [B, ...], contiguous but for the first axis
    keys    [B, heads, tokens, size], a view of the end of a larger buffer, and values
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .program import MixerSlot, UnsupportedError, WindowSlot


class States(NamedTuple):
    """The state of a mixer as a program sees it."""

    tail: Tensor
    S: Tensor
    M: Tensor


class LayerAccess(Protocol):
    """How to read and replace the state of a cache's layer."""

    def key(self, layer: Any) -> Any:
        """Return a tensor that is another object whenever the state was replaced; None without a state."""

    def read(self, layer: Any) -> States | None:
        """Return the state, or None at the start of a sequence."""

    def write(self, layer: Any, states: States) -> None:
        """Replace the state."""


class MixerAccess:
    """The states of this library's models: `conv_states[0]` `[B, C, K - 1]`, `recurrent_states` S and M."""

    def key(self, layer: Any) -> Tensor | None:
        """Return S, which every new state replaces."""
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def read(self, layer: Any) -> States | None:
        """Return the state."""
        if not layer.has_previous_state[0]:
            return None
        return States(layer.conv_states[0].transpose(1, 2), layer.recurrent_states[0], layer.recurrent_states[1])

    def write(self, layer: Any, states: States) -> None:
        """Replace the state."""
        if not layer.has_previous_state[0]:
            layer.device, layer.dtype = states.S.device, states.S.dtype
            for slot, size in enumerate((states.tail.shape[1], 0)):
                layer.conv_kernel_size[slot] = size
                layer.is_conv_states_initialized[slot] = layer.is_recurrent_states_initialized[slot] = True
                layer.has_previous_state[slot] = True
        tail = states.tail.transpose(1, 2)
        layer.conv_states[0], layer.conv_states[1] = tail, tail[..., :0]
        layer.recurrent_states[0], layer.recurrent_states[1] = states.S, states.M


class StackedAccess:
    """The states of upcycled models: `conv_states[0]` `[B, C, K]`, `recurrent_states[0]` `[B, 2, ...]` with S and M."""

    def key(self, layer: Any) -> Tensor | None:
        """Return S and M, which every new state replaces."""
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def read(self, layer: Any) -> States | None:
        """Return the state; the cache holds one step more than a tail."""
        memory = self.key(layer)
        if memory is None:
            return None
        return States(layer.conv_states[0][..., 1:].transpose(1, 2), memory[:, 0], memory[:, 1])

    def write(self, layer: Any, states: States) -> None:
        """Replace the state."""
        tail = torch.nn.functional.pad(states.tail.transpose(1, 2), (1, 0)).contiguous()
        memory = torch.stack([states.S, states.M], dim=1)
        if layer.has_previous_state[0]:
            layer.conv_states[0], layer.recurrent_states[0] = tail, memory
        else:
            layer.update_conv_state(tail, conv_kernel_size=tail.shape[-1])
            layer.update_recurrent_state(memory)


def why_not_cache(cache: Any, length: int) -> str | None:
    """Return why a program cannot use a cache; None if it can."""
    layers = getattr(cache, "layers", None)
    if not layers:
        return "there is no cache, or one without layers"
    if getattr(cache, "offloading", False):
        return "the cache is offloaded"
    for layer in layers:
        if type(layer).__name__ not in ("LinearAttentionLayer", "DynamicSlidingWindowLayer"):
            return f"the cache has a {type(layer).__name__}"
        if layer.record_past:
            return "the cache records past steps"
    return None


class BoundMixer:
    """Sets the addresses of a state in the steps of a mixer."""

    def __init__(self, slot: MixerSlot) -> None:
        self.slot = slot
        self.bound: Any = _nothing

    def bind(self, layer: Any, access: LayerAccess, batch: int, own: bool) -> None:
        """Point the steps to the layer's state; `own` copies it first, because a snapshot holds it too."""
        key = access.key(layer)
        if key is not None and self.bound() is key and not own:
            return
        states = access.read(layer)
        tail, memory = ((batch, *shape) for shape in self.slot.shapes)
        if states is None:
            states = States(torch.zeros(tail), torch.zeros(memory), torch.zeros(memory))
        elif states.tail.shape != tail or states.S.shape != memory or states.M.shape != memory:
            raise UnsupportedError("the state has another shape")
        elif any(t.dtype != torch.float32 or not t.is_cpu for t in states):
            raise UnsupportedError("the state is not float32 on a CPU")
        if own or key is None or 0 in states.tail.stride() or not all(map(_is_dense, states[1:])):
            states = States(*(t.detach().clone(memory_format=torch.contiguous_format) for t in states))
            access.write(layer, states)
            states = access.read(layer)
        assert states is not None
        convolve, memory_step = self.slot.convolve, self.slot.memory
        convolve.tail = states.tail.data_ptr()
        convolve.tail_sequence, convolve.tail_step, convolve.tail_channel = states.tail.stride()
        memory_step.S, memory_step.S_step = states.S.data_ptr(), states.S.stride(0)
        memory_step.M, memory_step.M_step = states.M.data_ptr(), states.M.stride(0)
        self.bound = weakref.ref(access.key(layer))


def _nothing() -> None:
    return None


def _is_dense(t: Tensor) -> bool:
    """Whether all axes but the first are contiguous, and sequences do not share numbers."""
    return t[0].is_contiguous() and (t.shape[0] == 1 or t.stride(0) >= t[0].numel())


class BoundWindow:
    """Appends the keys and values of a call behind those of an attention layer's cache.

    The layer's tensors become views of the last `window` - 1 tokens in buffers with room for later ones. A full buffer
    is replaced by a new one, so that a snapshot's views keep their numbers.
    """

    def __init__(self, slot: WindowSlot) -> None:
        self.slot = slot
        self.keys: Any = _nothing
        self.end = self.capacity = 0  # tokens in the buffers, and room

    def bind(self, layer: Any, batch: int, length: int) -> int:
        """Make room for `length` more tokens; return the number of tokens before them."""
        keys = layer.keys if layer.is_initialized else None
        if keys is not None and keys.numel():
            if keys.dtype != torch.float32 or not keys.is_cpu:
                raise UnsupportedError("the keys are not float32 on a CPU")
            if keys.shape[0] != batch:
                raise UnsupportedError("the keys have another number of sequences")
        if keys is None or self.keys() is not keys or self.end + length > self.capacity:
            self._move(layer, batch, length)
        self.slot.attend.past = self.end
        return self.end

    def _move(self, layer: Any, batch: int, length: int) -> None:
        """Copy what the window still needs into new buffers."""
        step = self.slot.attend
        if not layer.is_initialized:
            empty = torch.empty(batch, step.key_heads, 0, step.size)
            layer.lazy_initialization(empty, empty)
            layer.keys, layer.values = empty, empty
        kept = min(layer.keys.shape[2], step.window - 1)
        self.end, self.capacity = kept, kept + length + max(64, kept // 4)
        buffers = [torch.empty(batch, step.key_heads, self.capacity, step.size) for _ in range(2)]
        if kept:
            for buffer, tensor in zip(buffers, (layer.keys, layer.values), strict=True):
                buffer[:, :, :kept] = tensor[:, :, -kept:]
        layer.keys, layer.values = (buffer[:, :, :kept] for buffer in buffers)
        step.keys, step.values = (buffer.data_ptr() for buffer in buffers)
        step.cache_sequence, step.cache_head = buffers[0].stride()[:2]

    def advance(self, layer: Any, length: int) -> None:
        """Show the layer its new keys and values."""
        self.end += length
        begin = max(0, self.end - (self.slot.attend.window - 1))
        batch, heads, _, size = layer.keys.shape
        shape, strides = (batch, heads, self.end - begin, size), layer.keys.stride()
        layer.keys = layer.keys.as_strided(shape, strides, begin * size)
        layer.values = layer.values.as_strided(shape, strides, begin * size)
        layer.cumulative_length += length
        self.keys = weakref.ref(layer.keys)
