"""Compile kernels ahead of time for a GPU that this machine does not have, and read the compiler's report.

`compile_for(variant, target)` returns a `Report`: registers, spills, shared memory, and the occupancy that follows from
them. Run it in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .config import Launch


@dataclass(frozen=True)
class Target:
    """An architecture and the published limits of one multiprocessor or compute unit."""

    name: str
    gpu: GPUTarget
    registers: int  # 32-bit, of all threads
    granularity: int  # registers of a warp are allocated in multiples of this
    register_limit: int  # per thread
    shared: int  # bytes available to a program
    shared_unit: int  # bytes of a multiprocessor
    warps: int
    programs: int

    @property
    def is_amd(self) -> bool:
        return self.gpu.backend == "hip"


def _nvidia(name: str, capability: int, shared_kib: int) -> Target:
    # CUDA C++ programming guide, "Technical specifications per compute capability".
    unit = (shared_kib + 1) * 1024
    return Target(name, GPUTarget("cuda", capability, 32), 65536, 256, 255, shared_kib * 1024, unit, 64, 32)


TARGETS = {
    "sm_80": _nvidia("sm_80", 80, 163),
    "sm_90": _nvidia("sm_90", 90, 227),
    "sm_100": _nvidia("sm_100", 100, 227),
    # CDNA 3 ISA: four SIMDs of 512 registers x 64 lanes, at most 8 waves each; 64 KiB LDS. Registers in eights.
    "gfx942": Target("gfx942", GPUTarget("hip", "gfx942", 64), 4 * 512 * 64, 8 * 64, 512, 65536, 65536, 32, 32),
}


@dataclass(frozen=True)
class Report:
    """The compiler's report about a kernel."""

    target: Target
    warps: int
    registers: int  # per thread (AMD: vector and accumulation registers)
    spills: int  # bytes (AMD: registers) spilled
    shared: int  # bytes of shared memory per program
    tensor_memory: int = 0  # columns per program; multiprocessors of Blackwell have 512

    @property
    def programs(self) -> int:
        """Programs that fit on a multiprocessor at the same time."""
        t = self.target
        lanes = t.gpu.warp_size
        per_warp = -(-self.registers * lanes // t.granularity) * t.granularity
        overhead = 0 if t.is_amd else 1024  # CUDA reserves 1 KiB of shared memory per program
        by_shared = t.shared_unit // (self.shared + overhead) if self.shared + overhead else t.programs
        simds = 4 if t.is_amd else 1  # a wave never leaves its SIMD
        by_registers = simds * min(t.warps // simds, t.registers // simds // per_warp) // self.warps
        by_tensor_memory = 512 // self.tensor_memory if self.tensor_memory else t.programs
        return min(by_registers, by_shared, by_tensor_memory, t.warps // self.warps, t.programs)

    @property
    def occupancy(self) -> float:
        """Resident warps divided by the maximum."""
        return self.programs * self.warps / self.target.warps


class Variant(NamedTuple):
    """A kernel with the Triton types of its arguments ("*bf16", "i32", a tuple of types, or None), its constants, and
    its launch."""

    kernel: Any
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    launch: Launch


def compile_for(variant: Variant, target: Target) -> Report:
    """Compile the kernel for the target and read the report."""
    names = variant.kernel.arg_names
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def declare(position: tuple[int, ...], declared: Any) -> Any:
        if isinstance(declared, tuple):
            inner = [declare((*position, i), one) for i, one in enumerate(declared)]
            return type(declared)(*inner) if hasattr(declared, "_fields") else tuple(inner)
        if declared is None:
            constants[position] = None
            return "constexpr"
        if "*" in declared:
            aligned[position] = [["tt.divisibility", 16]]
        return declared

    for i, name in enumerate(names):
        if name in variant.constants:
            signature[name], constants[(i,)] = "constexpr", variant.constants[name]
        else:
            signature[name] = declare((i,), variant.types[name])
    compiled = triton.compile(
        ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=target.gpu,
        options={"num_warps": variant.launch.warps, "num_stages": variant.launch.stages},
    )
    registers, spills = (_read_amd if target.is_amd else _read_nvidia)(compiled.asm, target)
    metadata = compiled.metadata
    tensor_memory = getattr(metadata, "tmem_size", 0) or 0
    return Report(target, variant.launch.warps, registers, spills, metadata.shared, tensor_memory)


def _read_amd(asm: Mapping[str, Any], target: Target) -> tuple[int, int]:
    """Read registers and spills; `.vgpr_count` covers vector and accumulation registers on CDNA 3."""

    def number(name: str) -> int:
        match = re.search(rf"\.{name}:\s*(\d+)", asm["amdgcn"])
        if match is None:
            raise ValueError(f"the assembly for {target.name} must contain .{name}, got none")
        return int(match.group(1))

    return number("vgpr_count"), number("vgpr_spill_count")


def _read_nvidia(asm: Mapping[str, Any], target: Target) -> tuple[int, int]:
    """Read registers and spills from ptxas, which comes with Triton."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if target.gpu.arch >= 100 else "ptxas")
    arch = target.name + ("a" if target.gpu.arch >= 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(asm["ptx"])
        file.flush()
        command = [str(ptxas), "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", output)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", output)
    if registers is None or not spills:
        raise ValueError(f"the output of ptxas for {target.name} must name registers and spills, got {output!r}")
    return int(registers.group(1)), sum(map(int, spills))
