"""Kernels compiled ahead of time for a GPU that is not here, and what the compiler says of them.

`compile_ahead(variant, target)` gives a `Report`: registers, spills, shared memory, and from
these how many warps fit on a multiprocessor. Run in a process without TRITON_INTERPRET.
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
    """An architecture and its limits, as its maker publishes them, for a multiprocessor or compute unit."""

    name: str
    gpu: GPUTarget
    registers: int  # 32-bit, all threads'
    granularity: int  # registers of a warp are given out in multiples of this
    register_limit: int  # a thread's
    shared: int  # bytes a program may have
    shared_unit: int  # bytes a multiprocessor has
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
    """What the compiler made of a kernel."""

    target: Target
    warps: int
    registers: int  # a thread's (AMD: vector and accumulation registers)
    spills: int  # bytes (AMD: registers) spilled
    shared: int  # bytes of shared memory a program takes
    tensor_memory: int = 0  # columns a program takes; Blackwell's multiprocessors have 512

    @property
    def programs(self) -> int:
        """Programs that fit on a multiprocessor at a time."""
        t = self.target
        lanes = t.gpu.warp_size
        a_warp = -(-self.registers * lanes // t.granularity) * t.granularity
        overhead = 0 if t.is_amd else 1024  # CUDA keeps 1 KiB of a program's shared memory for itself
        by_shared = t.shared_unit // (self.shared + overhead) if self.shared + overhead else t.programs
        simds = 4 if t.is_amd else 1  # a wave stays on its SIMD
        by_registers = simds * min(t.warps // simds, t.registers // simds // a_warp) // self.warps
        by_tensor_memory = 512 // self.tensor_memory if self.tensor_memory else t.programs
        return min(by_registers, by_shared, by_tensor_memory, t.warps // self.warps, t.programs)

    @property
    def occupancy(self) -> float:
        """Resident warps over the most there can be."""
        return self.programs * self.warps / self.target.warps


class Variant(NamedTuple):
    """A kernel with Triton's types of its arguments ("*bf16", "i32"; a tuple where it takes one, None where it is
    given none), its constants, and how it is launched."""

    kernel: Any
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    launch: Launch


def compile_ahead(variant: Variant, target: Target) -> Report:
    """Compiles the kernel for the target and reads what came out."""
    names = variant.kernel.arg_names
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], Any] = {}

    def declare(place: tuple[int, ...], kind: Any) -> Any:
        if isinstance(kind, tuple):
            kinds = [declare((*place, i), inner) for i, inner in enumerate(kind)]
            return type(kind)(*kinds) if hasattr(kind, "_fields") else tuple(kinds)
        if kind is None:
            constants[place] = None
            return "constexpr"
        if "*" in kind:
            aligned[place] = [["tt.divisibility", 16]]
        return kind

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
    """`.vgpr_count` covers both kinds of vector registers on CDNA 3."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", asm["amdgcn"])
        if found is None:
            raise ValueError(f"the assembly for {target.name} has no .{name}")
        return int(found.group(1))

    return number("vgpr_count"), number("vgpr_spill_count")


def _read_nvidia(asm: Mapping[str, Any], target: Target) -> tuple[int, int]:
    """What ptxas says of the PTX; it comes with Triton."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if target.gpu.arch >= 100 else "ptxas")
    arch = target.name + ("a" if target.gpu.arch >= 90 else "")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(asm["ptx"])
        file.flush()
        command = [str(ptxas), "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    if registers is None or not spills:
        raise ValueError(f"ptxas for {target.name} says nothing of registers or spills: {said!r}")
    return int(registers.group(1)), sum(map(int, spills))
