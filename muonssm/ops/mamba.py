"""One token through a whole Mamba mixer, by the C++ kernel in native/mamba.h: decoding without a call for each part."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from . import checks, library
from .config import Muon
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


def mamba_step(
    x: Tensor, weights: MambaWeights, tail: Tensor, memory: MemoryState, muon: Muon, impl: str
) -> MambaStep | None:
    """x `[B, 1, d_model]` one step on; None where the kernel does not apply, and the parts have to be called in turn.

    It applies without gradients, to ordinary float32 tensors on a CPU, outside compilation, autocast and torch.func.
    """
    if torch.is_grad_enabled() or impl not in ("auto", "native") or library.unavailable() is not None:
        return None
    if x.shape[0] > LARGEST_BATCH or torch.is_autocast_enabled("cpu") or checks.is_transformed():
        return None
    D, N = weights.A_log.shape
    K = weights.conv_weight.shape[2]
    given = (x.contiguous(), *weights, tail, *memory)
    shaped = tail.shape == (x.shape[0], K - 1, D) and memory.S.shape == memory.M.shape == (x.shape[0], D, N)
    if not shaped or not all(_is_usual(t) for t in given) or not library.is_plain(x):
        return None
    out = [torch.empty_like(t) for t in (given[0], tail, *memory)]
    sizes = (torch.get_num_threads(), x.shape[0], x.shape[2], D, N, weights.dt_proj.shape[1], K)
    numbers = library.make_write(library.write_numbers(muon))
    arguments = library.MambaArguments(*sizes, muon.gamma, numbers, *(t.data_ptr() for t in (*given, *out)))
    library.load().muonssm_mamba_step(ctypes.byref(arguments))
    y, tail, S, M = out
    return MambaStep(y, tail, MemoryState(S, M))


def _is_usual(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu"
