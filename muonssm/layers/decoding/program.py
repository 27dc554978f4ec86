"""`Program`: the steps of one token of a model, as csrc/decode.h runs them, and the `Builder` that collects them.

A program points into the model's parameters. `Program.is_current` tells whether these pointers, and the few arrays that
were computed from parameters, still hold.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muonssm.layers.modules import PLAIN_LINEAR
from muonssm.ops import cpu_library
from muonssm.ops import decode_steps as steps
from muonssm.ops.decode_steps import MOST_ROWS, Matrix

from .weights import LargePages, PackedMatrix, pack

ALIGNMENT = 16  # numbers; rows of buffers start at whole cache lines


class UnsupportedError(Exception):
    """Why a model, or a call, runs through torch."""


class Rows(NamedTuple):
    """Rows of activations: the address of the first one, and the distance of two in numbers."""

    address: int
    step: int

    def column(self, index: int) -> Rows:
        """Return the same rows from column `index` on."""
        return Rows(self.address + 4 * index, self.step)


class Input(NamedTuple):
    """What a projection reads: rows, a norm over groups of numbers, and a gate; any of the last two can be missing."""

    rows: Rows
    columns: int
    norm: nn.Module | None = None
    gate: Rows | None = None


@dataclass
class MixerSlot:
    """The steps of one mixer that hold the state: they get its addresses before a call."""

    layer: int
    convolve: steps.ConvolveStep
    memory: steps.MemoryStep | steps.ScanStep
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # of the tail and of S, without the sequences


@dataclass
class WindowSlot:
    """The step of one attention layer."""

    layer: int
    attend: steps.AttendStep
    size: int


@dataclass
class Program:
    """Steps, the memory that they use, and what must not change while they do."""

    steps: list[tuple[int, ctypes.Structure]]
    mixers: list[MixerSlot]
    windows: list[WindowSlot]
    memory: list[Any]  # tensors that steps point to, besides parameters
    pointed: list[Tensor]  # parameters by address
    copied: list[Tensor]  # parameters by value
    scratch: int  # numbers that a thread needs, for one row
    vocabulary: int
    vocabulary_out: int
    modules: list[tuple[dict[str, Any], str, Any]]
    hooks: list[Any]

    def __post_init__(self) -> None:
        table = (steps.DecodeStep * len(self.steps))()
        for entry, (kind, arguments) in zip(table, self.steps, strict=True):
            entry.kind, entry.arguments = kind, ctypes.addressof(arguments)
        self.table = table
        self._addresses = list(map(Tensor.data_ptr, self.pointed))
        self._versions = list(map(_version, self.copied))
        self._copied_addresses = list(map(Tensor.data_ptr, self.copied))
        self._dicts, self._names, self._children = (list(column) for column in zip(*self.modules, strict=True))

    def is_current(self) -> bool:
        """Return whether modules, hooks and parameters are those that the program was built from.

        Changes of a parameter's numbers are seen by pointers alone; where a copy was made, `_version` counts them.
        """
        return (
            not any(self.hooks)
            and all(map(operator.is_, map(dict.get, self._dicts, self._names), self._children))
            and list(map(Tensor.data_ptr, self.pointed)) == self._addresses
            and list(map(Tensor.data_ptr, self.copied)) == self._copied_addresses
            and list(map(_version, self.copied)) == self._versions
        )

    def bytes(self) -> int:
        """Return the size of what the program has besides the model's parameters, with packed matrices."""
        tensors = {id(t): t for t in self.memory if isinstance(t, Tensor)}  # tied matrices are there twice
        return sum(t.numel() * t.element_size() for t in tensors.values())


def _version(parameter: Tensor) -> int:
    return 0 if parameter.is_inference() else parameter._version


@dataclass
class Builder:
    """Collects the steps of a model.

    Attributes:
        weights: format of the matrices, a name in `FORMATS`.
        packed: matrices that were packed before, by the id of their parameter; a new one is added.
    """

    weights: str
    packed: dict[int, PackedMatrix]
    steps: list[tuple[int, ctypes.Structure]] = field(default_factory=list)
    mixers: list[MixerSlot] = field(default_factory=list)
    windows: list[WindowSlot] = field(default_factory=list)
    memory: list[Any] = field(default_factory=list)
    pointed: list[Tensor] = field(default_factory=list)
    copied: list[Tensor] = field(default_factory=list)
    scratch: int = 0
    _buffers: dict[tuple[str, int], Rows] = field(default_factory=dict)
    _pages: LargePages = field(default_factory=LargePages)

    def add(self, kind: int, arguments: ctypes.Structure) -> None:
        """Append a step."""
        self.steps.append((kind, arguments))

    def buffer(self, name: str, width: int) -> Rows:
        """Return rows of activations; the same name and width give the same rows."""
        key = (name, width)
        if key not in self._buffers:
            step = -(-width // ALIGNMENT) * ALIGNMENT
            # One row more than needed: a vector that begins in the last row may end behind it.
            numbers = aligned(MOST_ROWS * step + 64)
            self.memory.append(numbers)
            self._buffers[key] = Rows(numbers.data_ptr(), step)
        return self._buffers[key]

    def vector(self, parameter: Tensor | None) -> int | None:
        """Return the address of a parameter."""
        if parameter is None:
            return None
        self._check(parameter)
        self.pointed.append(parameter)
        return parameter.data_ptr()

    def derived(self, function: Callable[..., Tensor], *parameters: Tensor) -> Tensor:
        """Return a small array that is computed from parameters once."""
        for parameter in parameters:
            self._check(parameter)
        self.copied += parameters
        with torch.no_grad():
            result = function(*parameters).contiguous().clone()
        self.memory.append(result)
        return result

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> Matrix:
        """Return a parameter as a matrix in the format of the program."""
        if self.weights == "float32":
            address = self.vector(weight)
            cpu_library.expect_large(weight.data_ptr(), weight.numel() * weight.itemsize, now=True)
            return steps.Matrix(steps.FLOAT32_ROWS, weight.shape[0], address, None, self.vector(bias))
        key = id(weight)
        if key not in self.packed:
            self._check(weight)
            self.packed[key] = pack(weight, self.weights, self._pages.empty)
        self.copied.append(weight)
        matrix = self.packed[key]
        self.memory += matrix[2:]
        scales = None if matrix.scales is None else matrix.scales.data_ptr()
        return steps.Matrix(matrix.format, matrix.rows, matrix.data.data_ptr(), scales, self.vector(bias))

    def linear(self, layer: nn.Module) -> Matrix:
        """Return the weight and bias of a linear layer."""
        if type(layer) not in PLAIN_LINEAR:
            raise UnsupportedError(f"a projection is a {type(layer).__name__} (an adapter or another replacement)")
        return self.matrix(layer.weight, layer.bias)  # type: ignore[arg-type]

    def project(
        self,
        x: Input,
        matrices: Sequence[Matrix],
        out: Rows,
        **flags: int,
    ) -> None:
        """Append out = W f(x); `flags` are those of `ProjectStep`: swiglu, add, activation, last."""
        step = steps.ProjectStep(columns=x.columns, count=len(matrices), out_step=out.step, **flags)
        step.x, step.x_step, step.out = x.rows.address, x.rows.step, out.address
        if x.norm is not None:
            weight: Any = x.norm.weight
            step.norm, step.eps, step.group = self.vector(weight), norm_eps(x.norm), weight.shape[0]
        if x.gate is not None:
            step.gate, step.gate_step = x.gate
        step.matrices[: len(matrices)] = matrices
        self.need_scratch(x.columns + 64)
        self.add(steps.PROJECT, step)

    def need_scratch(self, numbers: int) -> None:
        """Give every thread at least so many numbers of scratch per row."""
        self.scratch = max(self.scratch, -(-numbers // ALIGNMENT) * ALIGNMENT)

    def _check(self, parameter: Tensor) -> None:
        if parameter.device.type != "cpu":
            raise UnsupportedError(f"its parameters are on {parameter.device.type}")
        if parameter.dtype != torch.float32:
            raise UnsupportedError(f"its parameters are {parameter.dtype}".replace("torch.", ""))
        if not parameter.is_contiguous() or type(parameter) not in (Tensor, nn.Parameter):
            raise UnsupportedError("its parameters are not plain contiguous tensors")


def aligned(count: int) -> Tensor:
    """Return `count` zeros that start at a whole cache line."""
    numbers = torch.zeros(count + ALIGNMENT)
    offset = -numbers.data_ptr() % 64 // 4
    return numbers[offset : offset + count]


def norm_eps(norm: nn.Module) -> float:
    """Return the epsilon of an RMS norm of this library or of transformers."""
    eps = getattr(norm, "eps", None)
    return float(norm.variance_epsilon if eps is None else eps)  # type: ignore[arg-type]
