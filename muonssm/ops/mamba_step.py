"""One token through a whole Mamba mixer, by the C++ kernel in csrc/mamba.h: decoding without a call for each part."""

from __future__ import annotations

import ctypes
import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu_library, validate
from .muon import Muon
from .state import MemoryState

LARGEST_BATCH = 16  # the kernel goes row by row; many sequences are a matrix product


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
    """What came out: y `[B, 1, d_model]`, the convolution's new tail and the memory's new state."""

    y: Tensor
    tail: Tensor
    memory: MemoryState


class Norm(NamedTuple):
    """An RMS norm before the mixer."""

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
    """x `[B, 1, d_model]` one step on; None where the kernel does not apply, and the parts have to be called in turn.

    With `norm`, y is a whole residual block: x + mixer(norm(x)). The kernel applies without gradients, to ordinary
    float32 tensors on a CPU, outside compilation, autocast and torch.func.
    """
    if torch.is_grad_enabled() or impl not in ("auto", "native") or cpu_library.unavailable() is not None:
        return None
    if x.shape[0] > LARGEST_BATCH or torch.is_autocast_enabled("cpu") or validate.is_transformed():
        return None
    D, N = weights.A_log.shape
    K = weights.conv_weight.shape[2]
    x = x.contiguous()
    given = (x, *weights, tail, *memory) if norm is None else (x, norm.weight, *weights, tail, *memory)
    shaped = x.shape[1:] == (1, weights.in_proj.shape[1]) and tail.shape == (x.shape[0], K - 1, D)
    shaped = shaped and memory.S.shape == memory.M.shape == (x.shape[0], D, N)
    if not shaped or torch.compiler.is_compiling() or not _TYPES.issuperset(map(type, given)):
        return None
    if set(map(_KIND, given)) != _USUAL or not all(map(Tensor.is_contiguous, given)):
        return None
    y, new_tail, S, M = out = tuple(map(torch.empty_like, (x, tail, *memory)))
    sizes = (torch.get_num_threads(), x.shape[0], x.shape[2], D, N, weights.dt_proj.shape[1], K)
    addresses: list[int | None] = [*map(Tensor.data_ptr, given + out)]
    if norm is None:
        addresses.insert(1, None)
    numbers = (muon.gamma, 0.0 if norm is None else norm.eps, _write(muon))
    arguments = cpu_library.MambaArguments(*sizes, *numbers, *addresses)
    cpu_library.load().muonssm_mamba_step(ctypes.byref(arguments))
    return MambaStep(y, new_tail, MemoryState(S, M))


# What a step does besides computing counts: these run in C, and `Muon` is a frozen value.
_KIND = operator.attrgetter("dtype", "device")
_USUAL = {(torch.float32, torch.device("cpu"))}
_TYPES = {Tensor, torch.nn.Parameter}


@functools.lru_cache
def _write(muon: Muon) -> cpu_library.Write:
    return cpu_library.make_write(cpu_library.write_numbers(muon))
