"""Argument checks of the operators, in the wording of `muonssm.checks`: "NAME must be ..., got ...".

Types, shapes and devices are always checked. Values are checked on a CPU and outside compilation only: on a GPU the
check would stop the pipeline, and a compiler cannot branch on values.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonssm.checks import check_number

from .muon import Muon, check_gamma_values
from .state import MemoryState
from .tracing import is_transformed

Sizes = dict[str, int]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_dense(name: str, tensor: Tensor) -> None:
    """Refuse layouts that the operators do not serve: sparse, nested and mkldnn tensors."""
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a dense tensor (layout torch.strided), got {layout}")


def check_tensors(tensors: Mapping[str, Tensor], layouts: Mapping[str, str]) -> Sizes:
    """Check type, device and shape of every tensor; return the size of each axis letter.

    `layouts` spells a shape by its letters, "B L H m". A letter has the same size in all tensors.
    """
    sizes: Sizes = {}
    first_with: dict[str, str] = {}
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be a tensor of float64, float32, bfloat16 or float16, got {_type(tensor)}")
        check_dense(name, tensor)
        device = tensor.device if device is None else device
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, like {next(iter(tensors))}, got {tensor.device}")
        letters = layouts[name].split()
        shape = f"[{', '.join(letters)}]"
        if tensor.ndim != len(letters):
            raise ValueError(f"{name} must have shape {shape}, got {list(tensor.shape)}")
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name} must have shape {shape} with {letter} = {sizes[letter]}, like {first_with[letter]}, "
                    f"got {list(tensor.shape)}"
                )
            first_with.setdefault(letter, name)
            if size == 0 and letter not in "BL":
                raise ValueError(f"{name} must have shape {shape} with {letter} >= 1, got {list(tensor.shape)}")
    return sizes


def check_muon(muon: Muon, steps_layout: Sequence[int], device: torch.device) -> None:
    """Check that `muon` is a `Muon`; a gamma tensor is a scalar, `[H]` or `[B, L, H]` (the `steps_layout`)."""
    if not isinstance(muon, Muon):
        raise TypeError(f"muon must be a Muon (Muon.off() for the plain backbone), got {_type(muon)}")
    gamma = muon.gamma
    if not isinstance(gamma, Tensor):
        return
    heads = steps_layout[-1]
    # By the number of axes: comparing [B, L, H] with [H] would tie B to H where sizes are symbols.
    shapes: dict[int, tuple[int, ...]] = {0: (), 1: (heads,), 3: tuple(steps_layout)}
    if gamma.shape != shapes.get(gamma.dim()):
        wanted = f"[], [{heads}] or {list(steps_layout)}"
        raise ValueError(f"muon.gamma must be a float or have shape {wanted}, got {list(gamma.shape)}")
    if gamma.device != device:
        raise ValueError(f"muon.gamma must be on {device}, like the inputs, got {gamma.device}")
    if gamma.numel() and not muon.gamma_is_known and _values_are_checked(gamma):
        check_gamma_values("muon.gamma", gamma)  # training can change gamma after `muon` was made


def check_state(state: MemoryState | None, shape: Sequence[int], device: torch.device) -> None:
    """Check that `state` is None, or S and M of exactly `shape` (the first axis counts sequences)."""
    if state is None:
        return
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"state must be None or a MemoryState(S, M), got {_type(state)}")
    for name, tensor in zip(("state.S", "state.M"), state, strict=True):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point tensor, got {_type(tensor)}")
        check_dense(name, tensor)
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, like the inputs, got {tensor.device}")


class Packed(NamedTuple):
    """Bounds of packed sequences, checked, and their lengths: None in compiled code, which cannot read them."""

    cu_seqlens: Tensor
    lengths: list[int] | None

    @property
    def sequences(self) -> int:
        """Count the sequences."""
        return self.cu_seqlens.numel() - 1


def check_cu_seqlens(cu_seqlens: Tensor | None, B: int, L: int, is_piece: bool = False) -> Packed | None:
    """Return checked bounds of packed sequences, or None if nothing is packed.

    `cu_seqlens` follows flash-attention: an integer tensor [N + 1] of positions that starts at 0, never decreases and
    ends at L. Equal neighbors are an empty sequence. Of a piece they are bounds in the whole row, which is not here to
    compare them with.
    """
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor [N + 1], got {_type(cu_seqlens)}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"cu_seqlens must have shape [N + 1] with N >= 1 sequences, got {list(cu_seqlens.shape)}")
    if B != 1:
        raise ValueError(f"the batch size must be 1 with cu_seqlens, all sequences in one row, got {B}")
    if is_piece:
        return Packed(cu_seqlens, None)
    if not torch.compiler.is_compiling():
        return Packed(cu_seqlens, read_lengths(cu_seqlens, L))
    from .checked_bounds import checked_bounds

    return Packed(checked_bounds(cu_seqlens, L), None)


def read_lengths(cu_seqlens: Tensor, L: int) -> list[int]:
    """Return the lengths of packed sequences, from bounds with valid values."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != L or min(lengths) < 0:
        raise ValueError(f"cu_seqlens must start at 0, never decrease and end at L = {L}, got {_short(bounds)}")
    return lengths


def longest_sequence(packed: Packed | None, L: int) -> int:
    """Return the length of the longest sequence, or the upper bound L where lengths cannot be read."""
    return L if packed is None or packed.lengths is None else max(packed.lengths)


def lengths_of(packed: Packed | None, L: int) -> list[int] | None:
    """Return the lengths of packed sequences; compiled code stops here to read them."""
    if packed is None or packed.lengths is not None:
        return None if packed is None else packed.lengths
    return read_lengths(packed.cu_seqlens, L)


def check_eta(eta: float) -> None:
    """Check that `eta` is a finite number."""
    check_number("eta", eta)


def check_upper_bound(name: str, tensor: Tensor, bound: float, meaning: str) -> None:
    """Check that no value is above `bound`, where values are checked."""
    if _values_are_checked(tensor) and (tensor.detach() > bound).any():
        raise ValueError(f"{name} must be <= {bound:g} ({meaning}), got a value of {tensor.detach().max().item():.6g}")


def check_lower_bound(name: str, tensor: Tensor, bound: float, meaning: str) -> None:
    """Check that no value is below `bound`, where values are checked."""
    if _values_are_checked(tensor) and (tensor.detach() < bound).any():
        raise ValueError(f"{name} must be >= {bound:g} ({meaning}), got a value of {tensor.detach().min().item():.6g}")


def _values_are_checked(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and not is_transformed()


def _type(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else f"a value of type {type(value).__name__}"


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"{values[:6]} ... {values[-3:]}".replace("] ... [", ", ..., ")
