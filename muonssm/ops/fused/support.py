"""Whether the kernels of csrc/rows.h can run a call."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import cpu_library, launch
from ..tracing import is_transformed_eagerly

SMALL = 1 << 14  # numbers; below, torch's operations cost less than the call of a kernel


def has_kernel(x: Tensor) -> bool:
    """Return whether a kernel of csrc/rows.h supports x: an ordinary tensor on the CPU, in eager mode, not small."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu" or x.numel() < SMALL:
        return False
    if x.dtype not in launch.INPUT_TYPES or torch.jit.is_tracing() or is_transformed_eagerly():
        return False
    return cpu_library.unavailable() is None


def computed_in(x: Tensor) -> torch.dtype:
    """Return the dtype in which the kernels compute: float64 for float64, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
