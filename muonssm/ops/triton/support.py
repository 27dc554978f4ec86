"""Whether Triton kernels can run here, and on what: decided without importing Triton."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from ..tracing import assume_constant

INTERPRETER = "interpreter"  # the architecture's name where kernels are interpreted on a CPU


@functools.cache
def _importable() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter; Triton itself reads it once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


@assume_constant
def unavailable(device: torch.device) -> str | None:
    """Why no Triton kernel can run on `device`; None if one can. ROCm's devices are called cuda, too."""
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the Triton kernels run on a GPU (CUDA or ROCm), not on {device.type}"
    if not _importable():
        return "triton is not installed (pip install muonssm[gpu])"
    return None


@functools.cache
def architecture(device: torch.device) -> str:
    """The name under which `config.launch` knows a device: sm_90, gfx942, or `interpreter`."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def is_amd(architecture: str) -> bool:
    """Whether the name is one of AMD's."""
    return architecture.startswith("gfx")


def dot_precision(dtype: torch.dtype, architecture: str) -> str:
    """`input_precision` of products of float32 tiles in a kernel whose inputs are of `dtype`.

    float32 inputs keep float32's accuracy: three tf32 products on NVIDIA, the matrix units' own float32 on AMD. With
    half-precision inputs one tf32 product has the digits of float16.
    """
    if is_amd(architecture) or architecture == INTERPRETER:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def operand_dtype(dtype: torch.dtype, architecture: str) -> torch.dtype:
    """The type of tiles that are multiplied, and of what one kernel leaves for the next.

    bfloat16 for bfloat16 inputs. float32 for float16: states and their gradients may leave float16's range. The
    interpreter computes bfloat16 wrongly, so there it is float32 as well.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 and architecture != INTERPRETER else torch.float32
