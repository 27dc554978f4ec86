"""What `native` and `triton` make of a call before their kernels see it.

inputs    the operator's arguments as the caller gave them
tensors   the same, contiguous, in the dtypes that the kernels read; gamma is `[B, L, H]`, size 1 where constant
S, M      initial states in the dtype of computation, or None
offsets   bounds of the sequences in the flattened batch, int64 `[N + 1]`
settings  the operator's numbers: eta and whether the correction goes into M (memory only), whether there is momentum,
          the five numbers of the write
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu_library
from .decoding import is_decoding_step
from .dtypes import gamma_tensor, saturate, widen
from .memory.types import MemoryInputs
from .muon import Muon, has_momentum, is_residual, steps_of
from .tracing import assume_constant

INPUT_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # `Input` of csrc/arguments.h
LARGE = 32 << 20  # bytes; malloc reuses smaller blocks, larger ones are always new


class MemoryCall(NamedTuple):
    """A call of `muon_memory`, ready for the kernels."""

    tensors: list[Tensor]  # q, k, v, log_alpha, beta, gamma, and inject if it is given
    S: Tensor | None
    M: Tensor | None
    offsets: Tensor
    settings: tuple[float, bool, bool, list[float]]
    recorded: bool  # gradients will be asked for
    step: bool  # a decoding step, for the single-step kernel


def prepare_memory(
    inputs: MemoryInputs,
    eta: float,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    cu_seqlens: Tensor | None,
    dtype: torch.dtype,
) -> MemoryCall:
    """Cast q, k and v to one dtype of theirs, gates and states to `dtype`; make everything contiguous."""
    q, k, v, log_alpha, beta, inject = inputs
    vectors = common_dtype((q, k, v), dtype)
    gates = [widen(x, dtype).contiguous() for x in (log_alpha, beta)]
    gamma = gamma_tensor(muon.gamma, dtype, v.device).contiguous()
    S, M = (widen(x, dtype).contiguous() for x in state) if state else (None, None)
    tensors = [*vectors, *gates, gamma]
    if inject is not None:
        tensors.append(widen(inject, dtype).contiguous())
    recorded = records_gradients((*tensors, S, M))
    B, L = v.shape[:2]
    step = is_decoding_step(L, cu_seqlens is not None, recorded)
    settings = memory_settings(eta, muon, inject is not None)
    return MemoryCall(tensors, S, M, sequence_offsets(B, L, cu_seqlens), settings, recorded, step)


class SelectiveCall(NamedTuple):
    """A call of `muon_selective_scan`, ready for the kernels."""

    tensors: list[Tensor]  # x, dt, B, C, gamma
    A: Tensor | None
    S: Tensor | None
    M: Tensor | None
    settings: tuple[bool, list[float]]
    recorded: bool  # gradients will be asked for
    step: bool  # a decoding step, for the single-step kernel


def prepare_selective(
    vectors: Sequence[Tensor],
    A: Tensor | None,
    muon: Muon,
    state: tuple[Tensor, ...] | None,
    packed: bool,
    dtype: torch.dtype,
) -> SelectiveCall:
    """Cast gamma and the states to `dtype`; x, dt, B, C and A keep theirs. Make everything contiguous."""
    gamma = gamma_tensor(muon.gamma, dtype, vectors[0].device)
    tensors = [t.contiguous() for t in (*vectors, gamma)]
    A = None if A is None else A.contiguous()
    S, M = (widen(t, dtype).contiguous() for t in state) if state else (None, None)
    recorded = records_gradients((*tensors, A, S, M))
    step = is_decoding_step(vectors[0].shape[1], packed, recorded)
    return SelectiveCall(tensors, A, S, M, (has_momentum(muon), write_numbers(muon)), recorded, step)


def records_gradients(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether autograd records an operation on `tensors`."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def is_eager(x: Tensor) -> bool:
    """Return whether x is an ordinary tensor outside compilation: a kernel then needs no detour over the dispatcher."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


def common_dtype(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the tensors contiguous and in one dtype: their own if they share one, else the computation's `dtype`."""
    dtypes = {x.dtype for x in tensors}
    shared = len(dtypes) == 1 and (dtype == torch.float64) == (torch.float64 in dtypes)
    return tuple(x.contiguous() if shared else widen(x, dtype).contiguous() for x in tensors)


def narrow_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a gradient to the dtype of its input; float16 saturates, as in `dtypes.widen`."""
    return saturate(x, dtype).to(dtype) if dtype == torch.float16 else x.to(dtype)


def sequence_offsets(B: int, L: int, cu_seqlens: Tensor | None) -> Tensor:
    """Return where each sequence begins and the last one ends, in steps of the flattened batch, int64 on the CPU."""
    if cu_seqlens is not None:
        return cu_seqlens.to("cpu", torch.int64).contiguous()
    return torch.arange(B + 1) * L


def memory_settings(eta: float, muon: Muon, injected: bool) -> tuple[float, bool, bool, list[float]]:
    """Return eta, whether the correction goes into M, whether every step computes M, and the numbers of the write."""
    residual = is_residual(muon, eta)
    return float(eta), residual, has_momentum(muon) or residual or injected, write_numbers(muon)


def write_numbers(muon: Muon) -> list[float]:
    """Return the fields of `cpu_library.Write`: steps (-1 for no normalization), beta outside, tau inside, tau outside,
    delta."""
    inside, outside = (muon.tau, 1.0) if muon.tau_position == "inside" else (1.0, muon.tau)
    outside_beta = float(muon.beta_position == "outside")
    return [float(steps_of(muon)), outside_beta, float(inside), float(outside), float(muon.delta)]


def write_struct(numbers: list[float]) -> cpu_library.Write:
    """Build the struct from `write_numbers`."""
    return cpu_library.Write(int(numbers[0]), int(numbers[1]), *numbers[2:])


@assume_constant
def _lanes(itemsize: int) -> int:
    return cpu_library.vector_bytes() // itemsize


def padded(size: int, dtype: torch.dtype) -> int:
    """Round `size` up to whole vectors of the C++ kernels."""
    lanes = _lanes(dtype.itemsize)
    return (size + lanes - 1) // lanes * lanes


def saved_segments(length: int, sequences: int) -> int:
    """Return an upper bound on the segments that sequences of `length` steps in total start."""
    return length // cpu_library.SEGMENT + sequences


def empty(like: Tensor, shape: Any) -> Tensor:
    """Allocate `like.new_empty(shape)`; if it is large, in large pages, whose first use costs less."""
    tensor = like.new_empty(shape)
    size = tensor.numel() * tensor.itemsize
    if size >= LARGE:
        cpu_library.expect_large(tensor.data_ptr(), size)
    return tensor


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a contiguous tensor's data; None (a null pointer) if it is None or empty."""
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def materialize(
    gradients: Sequence[Tensor | None], like: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Replace gradients that are None by zeros of the given shapes."""
    return [
        x.new_zeros(tuple(shape)) if gradient is None else gradient
        for gradient, x, shape in zip(gradients, like, shapes, strict=True)
    ]
