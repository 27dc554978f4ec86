"""What `training.precision = "auto"` means on this machine."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .cpu import cpu_fields

CPU_FLAGS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}  # in /proc/cpuinfo; without them bfloat16 is slower


class Precision(NamedTuple):
    """`"float32"` or `"bfloat16"`, and why."""

    name: str
    reason: str


def choose_precision(setting: str) -> Precision:
    """Return the precision of a recipe; `"auto"` takes bfloat16 where the device multiplies it faster than float32.

    The choice depends on the device alone, not on a measurement, so that all runs of a comparison get the same one.
    """
    if setting != "auto":
        return Precision(setting, "as the recipe says")
    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bfloat16", "the GPU has bfloat16 matmuls")
        return Precision("float32", "the GPU has no bfloat16 matmuls")
    flags = cpu_fields().get("flags", "").split()
    found = [name for flag, name in CPU_FLAGS.items() if flag in flags]
    if found:
        return Precision("bfloat16", f"the CPU multiplies it faster than float32 ({found[0]})")
    return Precision("float32", "the CPU has no instructions for products of bfloat16")
