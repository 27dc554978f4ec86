"""The compiled kernels of `csrc/` through ctypes: argument structs, loading, and calls. Knows nothing of tensors.

setup.py builds the shared library with the package. It is loaded on first use, after torch, and so shares torch's
OpenMP runtime.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from .tracing import assume_constant

ABI = 7
SEGMENT = 64  # time steps between two saved states
CHANNEL_GROUP = 64  # channels of one task of the selective scan
LONGEST_FILTER = 64  # taps of the causal convolution
LIBRARY = Path(__file__).parent.parent / "_native.so"
BUILD_LOG = LIBRARY.with_suffix(".log")

_Int, _Real, _Pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class Write(ctypes.Structure):
    """`Write` of csrc/arguments.h."""

    _fields_ = (
        ("steps", _Int),
        ("beta_outside", _Int),
        ("tau_inside", _Real),
        ("tau_outside", _Real),
        ("delta", _Real),
    )


def plain_fields(integers: str, reals: str = "", pointers: str = "") -> tuple[tuple[str, type], ...]:
    """Return the fields of a struct: names of integers, then of real numbers, then of pointers."""
    kinds = ((integers, _Int), (reals, _Real), (pointers, _Pointer))
    return tuple((name, kind) for names, kind in kinds for name in names.split())


def _fields(integers: str, reals: str, pointers: str) -> tuple[tuple[str, type], ...]:
    """Fields with a `Write` in front of the pointers."""
    return (*plain_fields(integers, reals, ""), ("write", Write), *plain_fields("", "", pointers))


class MemoryArguments(ctypes.Structure):
    """`MemoryArguments` of csrc/arguments.h."""

    _fields_ = _fields(
        "input threads sequences heads d m momentum residual gamma_step gamma_head",
        "eta",
        "offsets q k v log_alpha beta gamma inject S0 M0 y S M S_saved M_saved "
        "dy dS dM dq dk dv dlog_alpha dbeta dgamma dinject dS0 dM0",
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


class NormArguments(ctypes.Structure):
    """`NormArguments` of csrc/arguments.h."""

    _fields_ = plain_fields(
        "input output threads rows heads size x_step gate_step unit gate_first",
        "eps scale",
        "x gate weight y dy dx dgate dweight",
    )


class SwigluArguments(ctypes.Structure):
    """`SwigluArguments` of csrc/arguments.h."""

    _fields_ = plain_fields("input threads count", "", "g u y dy dg du")


class CrossEntropyArguments(ctypes.Structure):
    """`CrossEntropyArguments` of csrc/arguments.h."""

    _fields_ = plain_fields("input threads rows columns gradient", "scale", "logits labels losses")


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    Write,
    MemoryArguments,
    SelectiveArguments,
    ConvolutionArguments,
    MambaArguments,
    NormArguments,
    SwigluArguments,
    CrossEntropyArguments,
)
CONSTANTS = {"SEGMENT": SEGMENT, "CHANNEL_GROUP": CHANNEL_GROUP, "LONGEST_FILTER": LONGEST_FILTER}
FUNCTIONS: dict[str, type[ctypes.Structure]] = {
    "memory_forward": MemoryArguments,
    "memory_backward": MemoryArguments,
    "memory_step": MemoryArguments,
    "selective_forward": SelectiveArguments,
    "selective_backward": SelectiveArguments,
    "selective_step": SelectiveArguments,
    "convolution_forward": ConvolutionArguments,
    "convolution_backward": ConvolutionArguments,
    "mamba_step": MambaArguments,
    "norm_forward": NormArguments,
    "norm_backward": NormArguments,
    "swiglu_forward": SwigluArguments,
    "swiglu_backward": SwigluArguments,
    "cross_entropy": CrossEntropyArguments,
}


@functools.cache
def load() -> ctypes.CDLL:
    """Load the library; raise OSError with the reason if it is missing or was built from other sources."""
    if not LIBRARY.exists():
        log = BUILD_LOG.read_text().strip() if BUILD_LOG.exists() else "the package was not built"
        raise OSError(f"the C++ kernels are not built: {log}")
    library = ctypes.CDLL(str(LIBRARY))
    check_interface(library)
    library.muonssm_isa.argtypes, library.muonssm_isa.restype = (), ctypes.c_char_p
    library.muonssm_vector_bytes.argtypes, library.muonssm_vector_bytes.restype = (), _Int
    library.muonssm_expect_large.argtypes, library.muonssm_expect_large.restype = (_Pointer, _Int, _Int), None
    for name, arguments in FUNCTIONS.items():
        function = getattr(library, f"muonssm_{name}")
        function.argtypes = (ctypes.POINTER(arguments),)
        function.restype = _Int if name == "memory_step" else None
    return library


def check_interface(library: ctypes.CDLL) -> None:
    """Compare the ABI number, the size of every struct and the shared constants with those of the library."""
    library.muonssm_abi.argtypes, library.muonssm_abi.restype = (), _Int
    if (abi := library.muonssm_abi()) != ABI:
        raise _mismatch("the ABI number", ABI, abi)
    for name in ("struct_size", "constant"):
        function = getattr(library, f"muonssm_{name}")
        function.argtypes, function.restype = (ctypes.c_char_p,), _Int
    check_layout(library, STRUCTS, CONSTANTS)


def check_layout(library: ctypes.CDLL, structs: tuple[type[ctypes.Structure], ...], constants: dict[str, int]) -> None:
    """Compare the size of every struct and the shared constants with those of the library."""
    for struct in structs:
        expected, size = ctypes.sizeof(struct), library.muonssm_struct_size(struct.__name__.encode())
        if size != expected:
            raise _mismatch(f"the size of struct {struct.__name__}", expected, size)
    for name, value in constants.items():
        if (other := library.muonssm_constant(name.encode())) != value:
            raise _mismatch(name, value, other)


def _mismatch(name: str, expected: int, got: int) -> OSError:
    return OSError(f"{name} of the C++ kernels must be {expected}, got {got}; rebuild the package (pip install .)")


@assume_constant
def unavailable() -> str | None:
    """Return why the kernels cannot be used on this machine; None if they can."""
    return _unavailable()


@functools.cache
def _unavailable() -> str | None:
    try:
        load()
    except OSError as error:
        return str(error)
    return None


def isa() -> str:
    """Return the instruction set that the kernels use: portable, avx2 or avx512."""
    return load().muonssm_isa().decode()


@functools.cache
def vector_bytes() -> int:
    """Return the width of the kernels' vectors."""
    return load().muonssm_vector_bytes()


def expect_large(address: int, size: int, now: bool = False) -> None:
    """Ask the operating system for large pages for `size` bytes at `address`; a hint only.

    New memory gets them at its first use; `now` is for memory that is in use, which is copied to them.
    """
    load().muonssm_expect_large(address, size, int(now))


def call(name: str, arguments: ctypes.Structure) -> int | None:
    """Call `muonssm_NAME`; `memory_step` returns 1 if it refused its inputs and did nothing."""
    return getattr(load(), f"muonssm_{name}")(ctypes.byref(arguments))
