"""Which library multiplies float32 matrices on a CPU, in training and evaluation.

torch takes MKL, whose kernels use AVX2 alone on CPUs of AMD. oneDNN, which torch also contains, uses AVX-512: on Zen 5,
whose vector units have 512 bits, that is twice as fast; on Zen 4, whose units have 256, there is nothing to gain. torch
multiplies with oneDNN where it may round float32 to bfloat16, `torch.set_float32_matmul_precision("medium")`. oneDNN
does so with AMX alone; without AMX its products have full float32 precision, which is checked before it is used.

The choice depends on the CPU and the setting, not on a measurement, so that a resumed run continues with the same bits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from .cpu import cpu_fields

SETTING = "MUONSSM_MATMUL"  # "onednn", "torch" (its own choice), or "auto", the default
ZEN_5 = 26  # CPU family
SIZES = ((64, 256, 64), (512, 192, 1160), (4096, 64, 32))  # rows, terms and columns of checked products
TOLERANCE = 1e-5  # relative error: some 3e-7 in float32, 3e-3 with bfloat16


class Matmuls(NamedTuple):
    """Whether oneDNN multiplies float32 matrices, and why."""

    onednn: bool
    reason: str


def choose_matmuls() -> Matmuls:
    """Follow the environment variable MUONSSM_MATMUL; by default take oneDNN where it is faster and as exact."""
    setting = os.environ.get(SETTING, "auto")
    if setting not in ("auto", "onednn", "torch"):
        raise ValueError(f"{SETTING} must be auto, onednn or torch, got {setting!r}")
    if setting == "torch":
        return Matmuls(False, f"{SETTING} is torch")
    if setting == "onednn":
        if not _is_exact():
            raise ValueError(f"{SETTING} must be torch on this machine, whose oneDNN is missing or rounds to bfloat16")
        return Matmuls(True, f"{SETTING} is onednn")
    reason = _why_not(cpu_fields())
    return Matmuls(reason is None, reason or "an AMD CPU with vector units of 512 bits")


@contextmanager
def fast_matmuls() -> Iterator[None]:
    """Multiply float32 matrices with the chosen library inside the block; a precision that the user has set stays."""
    if not (_is_untouched() and choose_matmuls().onednn):
        yield
        return
    with _onednn():
        yield


def _why_not(cpu: dict[str, str]) -> str | None:
    """Return why torch's own choice stays; None if oneDNN is faster."""
    flags = cpu.get("flags", "").split()
    if torch.cuda.is_available():
        return "a GPU trains"
    if cpu.get("vendor_id") != "AuthenticAMD" or int(cpu.get("cpu family", 0)) < ZEN_5:
        return "MKL is as fast on this CPU"
    if "avx512f" not in flags or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "AVX-512 is missing or switched off"
    return None if _is_exact() else "oneDNN is missing or rounds to bfloat16"


def _is_untouched() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set by `torch.backends...fp32_precision`
        return False


@contextmanager
def _onednn() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@functools.cache
def _is_exact() -> bool:
    """Whether oneDNN is there and its products of float32, in all layouts of a training step, are no less exact."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    with _onednn():
        return all(_error(rows, terms, columns) < TOLERANCE for rows, terms, columns in SIZES)


def _error(rows: int, terms: int, columns: int) -> float:
    """Return the largest relative error of a linear layer's products: forward, by its input, by its weight."""
    x, weight, dy = _waves(rows, terms), _waves(columns, terms), _waves(rows, columns)
    products = ((x, weight.t()), (dy, weight), (dy.t(), x))
    exact = [a.double() @ b.double() for a, b in products]
    return max(float((a @ b - c).norm() / c.norm()) for (a, b), c in zip(products, exact, strict=True))


def _waves(rows: int, columns: int) -> Tensor:
    """Numbers that bfloat16 cannot hold; no random draws, which would change those of the run."""
    return torch.arange(rows * columns, dtype=torch.float64).mul_(0.7).sin_().float().view(rows, columns)
