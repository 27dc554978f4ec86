"""What a decoding step is: the one place that decides it.

A decoding step advances every sequence by one time step, `[B, 1, ...]`, and records no gradients. The kernels have a
single-step form for it. The three functions go from the shape alone to everything that a direct call needs:

    is_one_step       one time step per sequence             the choice of `auto`, the convolution
    is_decoding_step  and no gradients are recorded           the single-step kernels of `native` and `triton`
    is_direct_step    and nothing of torch is in between      the shortcuts past checks and dispatch, on a CPU
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .tracing import is_transformed_eagerly

_ORDINARY = frozenset({Tensor, torch.nn.Parameter})


def is_one_step(length: int, packed: bool) -> bool:
    """Return whether every sequence of a call has exactly one time step.

    Packed sequences never count: their lengths are data, and one of them can be empty.
    """
    return length == 1 and not packed


def is_decoding_step(length: int, packed: bool, recorded: bool) -> bool:
    """Return whether a single-step kernel serves a call: one step per sequence, no gradients `recorded`."""
    return is_one_step(length, packed) and not recorded


def is_direct_step(tensors: Sequence[Any], packed: bool = False) -> bool:
    """Return whether `tensors` are a decoding step that can go straight to a C++ kernel.

    `tensors[0]` is the input `[B, L, ...]`. All must be ordinary CPU tensors without gradients, outside compilation
    and torch.func. Shapes, dtypes and values are not checked.
    """
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:  # a step takes some ten microseconds, so this loop has to be short
        if type(tensor) not in _ORDINARY or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
            return False
    shape = tensors[0].shape
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if len(shape) < 2 or not is_decoding_step(shape[1], packed, recorded):
        return False
    return not is_transformed_eagerly()
