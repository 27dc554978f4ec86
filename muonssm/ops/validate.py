"""Argument checks of the operators. Every error names the argument, what it was, and what it may be.

Shapes, types and devices are always checked. Values are checked on CPU and outside compilation only: on a GPU that
would stop the pipeline, and a compiler cannot branch on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muonssm.checks import is_number

from .muon import Muon
from .state import MemoryState
from .tracing import is_transformed

Sizes = dict[str, int]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(tensors: Mapping[str, Tensor], layouts: Mapping[str, str]) -> Sizes:
    """Checks type, device and shape of every tensor; returns the size of each axis letter.

    `layouts` spells a shape by its letters, "B L H m"; a letter has one size wherever it stands.
    """
    sizes: Sizes = {}
    first_with: dict[str, str] = {}
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}; it may be a floating-point tensor")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is a tensor of {tensor.dtype}; it may be float64, float32, bfloat16 or float16")
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; it may be on {device}, like {next(iter(tensors))}")
        letters = layouts[name].split()
        if tensor.ndim != len(letters):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it may be [{', '.join(letters)}]")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} for [{', '.join(letters)}], so {letter} is {size}; "
                    f"it may be {sizes[letter]}, as in {first_with[letter]}"
                )
            first_with.setdefault(letter, name)
            if size == 0 and letter not in "BL":
                raise ValueError(f"{name} has shape {list(tensor.shape)}, so {letter} is 0; it may be 1 or more")
    return sizes


def check_muon(muon: Muon, steps_layout: Sequence[int], device: torch.device) -> None:
    """`muon` is a `Muon`, and a gamma tensor is a scalar, one value a head, or one a step and head."""
    if not isinstance(muon, Muon):
        raise TypeError(f"muon is of type {type(muon).__name__}; it may be a Muon (Muon.off() is plain)")
    gamma = muon.gamma
    if not isinstance(gamma, Tensor):
        return
    heads = steps_layout[-1]
    if gamma.shape not in ((), (heads,), tuple(steps_layout)):
        raise ValueError(
            f"muon.gamma has shape {list(gamma.shape)}; it may be a float, [], [{heads}] or {list(steps_layout)}"
        )
    if gamma.device != device:
        raise ValueError(f"muon.gamma is on {gamma.device}; it may be on {device}, like the inputs")
    check_lower_bound("muon.gamma", gamma, 0.0, "in [0, 1]")  # again: it may have been trained since `muon` was made
    check_upper_bound("muon.gamma", gamma, 1.0, "in [0, 1]")


def check_state(state: MemoryState | None, shape: Sequence[int], device: torch.device) -> None:
    """`state` is None, or S and M of exactly `shape` (the first axis counts sequences)."""
    if state is None:
        return
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"state is of type {type(state).__name__}; it may be None or a MemoryState(S, M)")
    for name, tensor in zip(("state.S", "state.M"), state, strict=True):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} is of {found}; it may be a floating-point tensor")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {list(tensor.shape)}; it may be {list(shape)}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; it may be on {device}, like the inputs")


def check_cu_seqlens(cu_seqlens: Tensor | None, B: int, L: int) -> list[int] | None:
    """The packed sequences' lengths, or None where nothing is packed.

    `cu_seqlens` is flash-attention's: an integer tensor [N + 1] of positions that starts at 0, never falls and ends
    at L; equal neighbours are an empty sequence.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens is of {found}; it may be an int32 or int64 tensor [N + 1]")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it may be [N + 1] with N >= 1 sequences")
    if B != 1:
        raise ValueError(f"the batch size is {B}; with cu_seqlens it may be 1, all sequences packed into one row")
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != L or min(lengths) < 0:
        raise ValueError(f"cu_seqlens is {_short(bounds)}; it may start at 0, never fall, and end at L = {L}")
    return lengths


def check_eta(eta: float) -> None:
    """`eta` is a finite number."""
    if not is_number(eta):
        raise TypeError(f"eta is of type {type(eta).__name__}; it may be a finite float, 0 or 1 in the paper")
    if not math.isfinite(eta):
        raise ValueError(f"eta is {eta!r}; it may be a finite float, 0 or 1 in the paper")


def check_upper_bound(name: str, tensor: Tensor, bound: float, meaning: str) -> None:
    """No value above `bound` (checked where values are checked)."""
    if _values_are_checked(tensor) and (tensor.detach() > bound).any():
        raise ValueError(f"{name} has a value of {tensor.detach().max().item():.6g}; it may be <= {bound:g}, {meaning}")


def check_lower_bound(name: str, tensor: Tensor, bound: float, meaning: str) -> None:
    """No value below `bound` (checked where values are checked)."""
    if _values_are_checked(tensor) and (tensor.detach() < bound).any():
        raise ValueError(f"{name} has a value of {tensor.detach().min().item():.6g}; it may be >= {bound:g}, {meaning}")


def _values_are_checked(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"{values[:6]} ... {values[-3:]}".replace("] ... [", ", ..., ")
