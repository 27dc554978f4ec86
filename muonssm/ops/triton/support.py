"""Whether Triton kernels can run on a device, and in which precision. Does not import Triton."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from ..tracing import assume_constant

INTERPRETER = "interpreter"  # name of the architecture if kernels are interpreted on a CPU


@functools.cache
def _importable() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET asks for the interpreter; Triton reads it once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


@assume_constant
def unavailable(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on `device`; None if they can. ROCm devices are also named cuda."""
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        return f"the Triton kernels run on a GPU (CUDA or ROCm), not on {device.type}"
    if not _importable():
        return "triton is not installed (pip install muonssm[gpu])"
    return None


@functools.cache
def architecture(device: torch.device) -> str:
    """Return the name of a device in `config.launch`: sm_90, gfx942, or `interpreter`."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def is_amd(architecture: str) -> bool:
    """Return whether an architecture is from AMD."""
    return architecture.startswith("gfx")


def dot_precision(dtype: torch.dtype, architecture: str) -> str:
    """Return `input_precision` for products of float32 tiles in a kernel with inputs of `dtype`.

    float32 inputs keep the accuracy of float32: three tf32 products on NVIDIA, float32 matrix units on AMD. For
    half-precision inputs one tf32 product suffices, with as many digits as float16.
    """
    if is_amd(architecture) or architecture == INTERPRETER:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def operand_dtype(dtype: torch.dtype, architecture: str) -> torch.dtype:
    """Return the dtype of tiles in products, and of intermediate results between kernels.

    bfloat16 for bfloat16 inputs. float32 for float16, because states and their gradients can leave the range of
    float16. The interpreter computes bfloat16 incorrectly, so it also uses float32.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 and architecture != INTERPRETER else torch.float32
