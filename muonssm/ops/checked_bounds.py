"""Bounds of packed sequences in compiled code: an operator checks their values when the code runs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .custom_op import custom_op, offer_decompositions
from .validate import read_lengths


@functools.partial(custom_op, "muonssm::checked_bounds")
def checked_bounds(cu_seqlens: Tensor, length: int) -> Tensor:
    """Return a copy of `cu_seqlens` after the checks of `read_lengths`; on a GPU without, as it would have to wait."""
    if cu_seqlens.device.type == "cpu":
        read_lengths(cu_seqlens, length)
    return cu_seqlens.clone()


@checked_bounds.register_fake
def fake(cu_seqlens, length):  # type: ignore[no-untyped-def]
    """Allocate the result of `checked_bounds`."""
    offer_decompositions()
    return torch.empty_like(cu_seqlens)
