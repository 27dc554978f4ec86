"""The compiled kernels in `csrc/`, through ctypes: a plain shared library that knows nothing of torch or Python.

It is built with the package (see setup.py) and loaded on first use, after torch, whose OpenMP runtime it then shares.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .dtypes import widen
from .muon import Muon

ABI = 3
SEGMENT = 64  # steps between two saved states
INPUT_TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
PLACE = Path(__file__).parent.parent / "_native.so"
BUILD_LOG = PLACE.with_suffix(".log")

_Int, _Real, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Write(ctypes.Structure):
    """`Write` of csrc/arguments.h."""

    _fields_ = (("steps", _Int), ("tau_inside", _Real), ("tau_outside", _Real), ("delta", _Real))


def _fields(integers: str, reals: str, pointers: str) -> tuple[tuple[str, type], ...]:
    head = [(name, _Int) for name in integers.split()] + [(name, _Real) for name in reals.split()]
    return (*head, ("write", Write), *((name, _Pointer) for name in pointers.split()))


class MemoryArguments(ctypes.Structure):
    """`MemoryArguments` of csrc/arguments.h."""

    _fields_ = _fields(
        "input threads sequences heads d m momentum gamma_step gamma_head",
        "eta",
        "offsets q k v log_alpha beta gamma S0 M0 y S M S_saved M_saved "
        "dy dS dM dq dk dv dlog_alpha dbeta dgamma dS0 dM0",
    )


class SelectiveArguments(ctypes.Structure):
    """`SelectiveArguments` of csrc/arguments.h."""

    _fields_ = _fields(
        "input threads sequences D N momentum gamma_step",
        "",
        "offsets x dt B C A gamma S0 M0 y S M S_saved M_saved dy dS dM dx ddt dA dB dC dgamma dS0 dM0",
    )


class ConvolutionArguments(ctypes.Structure):
    """`ConvolutionArguments` of csrc/arguments.h."""

    _fields_ = (
        *((name, _Int) for name in ("input", "threads", "sequences", "channels", "K", "x_step", "silu")),
        *((name, _Pointer) for name in ("offsets", "x", "tail", "weight", "bias", "y", "dy")),
        *((name, _Pointer) for name in ("dx", "dtail", "dweight", "dbias")),
    )


class MambaArguments(ctypes.Structure):
    """`MambaArguments` of csrc/arguments.h."""

    _fields_ = _fields(
        "threads sequences d_model D N R K",
        "gamma norm_eps",
        "x norm in_proj conv_weight conv_bias x_proj dt_proj dt_bias A_log skip out_proj tail S0 M0 y tail_out S M",
    )


def constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compiler.assume_constant_result` does, without its import of the whole compiler (over a second)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@functools.cache
def load() -> ctypes.CDLL:
    """The library; raises OSError with the reason where there is none."""
    if not PLACE.exists():
        log = BUILD_LOG.read_text().strip() if BUILD_LOG.exists() else "the package was not built"
        raise OSError(f"the C++ kernels are not built: {log}")
    library = ctypes.CDLL(str(PLACE))
    library.muonssm_isa.restype = ctypes.c_char_p
    library.muonssm_abi.restype = library.muonssm_vector_bytes.restype = _Int
    if library.muonssm_abi() != ABI:
        raise OSError(f"the C++ kernels have interface {library.muonssm_abi()}, not {ABI}: build the package again")
    library.muonssm_expect_large.argtypes, library.muonssm_expect_large.restype = (_Pointer, _Int), None
    for operator, arguments in (("memory", MemoryArguments), ("selective", SelectiveArguments)):
        for kind in ("forward", "backward", "step"):
            function = getattr(library, f"muonssm_{operator}_{kind}")
            function.argtypes, function.restype = (ctypes.POINTER(arguments),), _Int if kind == "step" else None
    for function in (library.muonssm_convolution_forward, library.muonssm_convolution_backward):
        function.argtypes, function.restype = (ctypes.POINTER(ConvolutionArguments),), None
    library.muonssm_mamba_step.argtypes = (ctypes.POINTER(MambaArguments),)
    library.muonssm_mamba_step.restype = None
    return library


@constant
def unavailable() -> str | None:
    """Why the kernels cannot be used on this machine; None if they can."""
    return _unavailable()


@functools.cache
def _unavailable() -> str | None:
    try:
        load()
    except OSError as error:
        return str(error)
    return None


def isa() -> str:
    """The instruction set the kernels use here: portable, avx2 or avx512."""
    return load().muonssm_isa().decode()


@functools.cache
def _vector_bytes() -> int:
    return load().muonssm_vector_bytes()


@constant
def _lanes(itemsize: int) -> int:
    return _vector_bytes() // itemsize


def padded(size: int, dtype: torch.dtype) -> int:
    """`size` in whole vectors."""
    lanes = _lanes(dtype.itemsize)
    return (size + lanes - 1) // lanes * lanes


def write_numbers(muon: Muon) -> list[float]:
    """The fields of `Write` for `muon`."""
    steps = {None: -1, "frobenius": 0}.get(muon.normalization, muon.ns_steps)
    inside, outside = (muon.tau, 1.0) if muon.tau_position == "inside" else (1.0, muon.tau)
    return [float(steps), float(inside), float(outside), float(muon.delta)]


def make_write(numbers: list[float]) -> Write:
    """The struct from the numbers."""
    return Write(int(numbers[0]), *numbers[1:])


def has_momentum(muon: Muon) -> bool:
    """False only where gamma is the number 0, known before any tensor is looked at."""
    return isinstance(muon.gamma, Tensor) or muon.gamma != 0


def common_dtype(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors in one dtype the kernels read, contiguous: their own if they share one, else that of computation."""
    kinds = {x.dtype for x in tensors}
    shared = len(kinds) == 1 and (dtype == torch.float64) == (torch.float64 in kinds)
    return tuple(x.contiguous() if shared else widen(x, dtype).contiguous() for x in tensors)


def narrow_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient in the dtype of its input; float16 saturates, as in `dtypes.widen`."""
    if dtype == torch.float16:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)
    return x.to(dtype)


def sequence_offsets(B: int, L: int, cu_seqlens: Tensor | None) -> Tensor:
    """Where each sequence begins and the last ends, in steps of the flattened batch, int64."""
    if cu_seqlens is not None:
        return cu_seqlens.to("cpu", torch.int64).contiguous()
    return torch.arange(B + 1) * L


def is_plain(x: Tensor) -> bool:
    """An ordinary tensor outside compilation: the kernels may be called directly, without the dispatcher's detour."""
    return type(x) is Tensor and not torch.compiler.is_compiling()


def call(operator: str, kind: str, arguments: ctypes.Structure) -> None:
    """`muonssm_OPERATOR_KIND` of the library."""
    getattr(load(), f"muonssm_{operator}_{kind}")(ctypes.byref(arguments))


LARGE = 32 << 20  # malloc keeps smaller blocks for the next time, larger ones are always new


def empty(like: Tensor, shape: Any) -> Tensor:
    """`like.new_empty(shape)`, in large pages where it is large: first touching small ones costs more than the work."""
    tensor = like.new_empty(shape)
    size = tensor.numel() * tensor.itemsize
    if size >= LARGE:
        load().muonssm_expect_large(tensor.data_ptr(), size)
    return tensor


def materialize(
    given: Sequence[Tensor | None], like: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The gradients that came in, with zeros for those that did not."""
    return [
        x.new_zeros(tuple(shape)) if gradient is None else gradient
        for gradient, x, shape in zip(given, like, shapes, strict=True)
    ]


def address(tensor: Tensor | None) -> int | None:
    """Where the data of a contiguous tensor begins; nowhere if it has none."""
    return None if tensor is None or tensor.numel() == 0 else tensor.data_ptr()


def saved_segments(steps: int, sequences: int) -> int:
    """Room for the states before every started segment: one more a sequence than whole segments at most."""
    return steps // SEGMENT + sequences
