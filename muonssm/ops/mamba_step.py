"""One decoding step of a whole Mamba mixer, by the C++ kernel in csrc/mamba.h.

x, y      [B, 1, d_model]
tail      [B, K - 1, D]    the last inputs of the convolution
S, M      [B, D, N]        the memory's state
"""

from __future__ import annotations

import ctypes
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu_library, launch
from .decoding import is_direct_step
from .muon import Muon
from .state import MemoryState

LARGEST_BATCH = 16  # the kernel multiplies row by row; for more sequences a matrix product is faster


class MambaWeights(NamedTuple):
    """The parameters of a Mamba mixer without projection biases, `[out, in]`; `conv_weight` is `[D, 1, K]`."""

    in_proj: Tensor
    conv_weight: Tensor
    conv_bias: Tensor
    x_proj: Tensor
    dt_proj: Tensor
    dt_bias: Tensor
    A_log: Tensor
    skip: Tensor
    out_proj: Tensor


class MambaStep(NamedTuple):
    """The output y, the convolution's new tail and the memory's new state."""

    y: Tensor
    tail: Tensor
    memory: MemoryState


class Norm(NamedTuple):
    """The weight and epsilon of an RMS norm before the mixer."""

    weight: Tensor
    eps: float


def mamba_step(
    x: Tensor,
    weights: MambaWeights,
    tail: Tensor,
    memory: MemoryState,
    muon: Muon,
    impl: str = "auto",
    norm: Norm | None = None,
) -> MambaStep | None:
    """Advance x `[B, 1, d_model]` through the mixer; None if the kernel cannot run this call.

    With `norm`, y is a whole residual block: x + mixer(norm(x)). The kernel runs decoding steps (see `decoding`) of
    contiguous float32 tensors outside autocast.
    """
    tensors = (x, *weights, tail, *memory) if norm is None else (x, norm.weight, *weights, tail, *memory)
    if impl not in ("auto", "native") or not is_direct_step(tensors) or not _fits(x, weights, tail, memory):
        return None
    if cpu_library.unavailable() is not None or torch.is_autocast_enabled("cpu"):
        return None
    x = x.contiguous()
    tensors = (x, *tensors[1:])
    if set(map(_dtype, tensors)) != _FLOAT32 or not all(map(Tensor.is_contiguous, tensors)):
        return None
    D, N = weights.A_log.shape
    y, new_tail, S, M = out = tuple(map(torch.empty_like, (x, tail, *memory)))
    sizes = (x.shape[0], x.shape[2], D, N, weights.dt_proj.shape[1], weights.conv_weight.shape[2])
    addresses: list[int | None] = [*map(Tensor.data_ptr, tensors + out)]
    if norm is None:
        addresses.insert(1, None)
    numbers = (muon.gamma, 0.0 if norm is None else norm.eps, _write_struct(muon))
    arguments = cpu_library.MambaArguments(torch.get_num_threads(), *sizes, *numbers, *addresses)
    cpu_library.load().muonssm_mamba_step(ctypes.byref(arguments))
    return MambaStep(y, new_tail, MemoryState(S, M))


# `map` with this stays in C: every microsecond of overhead counts in a decoding step.
_dtype = operator.attrgetter("dtype")
_FLOAT32 = {torch.float32}


def _fits(x: Tensor, weights: MambaWeights, tail: Tensor, memory: MemoryState) -> bool:
    """Return whether the shapes agree and the batch is small enough for the kernel."""
    B, (D, N), K = x.shape[0], weights.A_log.shape, weights.conv_weight.shape[2]
    if B > LARGEST_BATCH or x.shape[1:] != (1, weights.in_proj.shape[1]) or tail.shape != (B, K - 1, D):
        return False
    return memory.S.shape == memory.M.shape == (B, D, N)


_structs: dict[int, tuple[Muon, cpu_library.Write]] = {}  # by id, as hashing a Muon takes longer; keeps it alive


def _write_struct(muon: Muon) -> cpu_library.Write:
    known = _structs.get(id(muon))
    if known is None:
        if len(_structs) >= 256:
            _structs.clear()
        known = _structs[id(muon)] = muon, launch.write_struct(launch.write_numbers(muon))
    return known[1]
