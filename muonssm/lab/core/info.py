"""The text of `muonssm info`: versions, device, usable implementations, optional packages."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from muonssm.lab.core.matmul import choose_matmuls
from muonssm.ops import IMPLEMENTATIONS, cpu_library
from muonssm.ops.dispatch import Problem, choose
from muonssm.ops.triton import support
from muonssm.version import __version__

OPTIONAL = (
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "timm",
    "torchvision",
    "lm-eval",
    "mambapy",
    "aeon",
    "xllamacpp",
)


def describe() -> str:
    """Describe versions, device, optional packages, and for each implementation whether it is usable or why not."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [
        f"muonssm      {__version__}",
        f"python       {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"torch        {torch.__version__}, {torch.get_num_threads()} threads",
        f"device       {torch.cuda.get_device_name() if device.type == 'cuda' else 'cpu, ' + cpu_features()}",
        "",
        f"implementations on {device.type}, float32:",
    ]
    problem = Problem(device, torch.float32, length=1024)
    for implementation in IMPLEMENTATIONS.values():
        reason = implementation.unsupported(problem)
        lines.append(f"  {implementation.name:<10} {'usable' if reason is None else 'not usable: ' + reason}")
        lines.append(f"  {'':<10} {implementation.summary}")
    sequences, single_step = (choose("auto", problem._replace(length=length)).name for length in (1024, 1))
    lines.append(f"  impl='auto' takes {sequences} for sequences, {single_step} for a single step")
    reason = cpu_library.unavailable()
    decoding = f"through torch: {reason}" if reason else f"one native call per token ({cpu_library.isa()})"
    matmuls = choose_matmuls()
    library = f"{'oneDNN' if matmuls.onednn else 'as torch chooses'} ({matmuls.reason})"
    lines += ["", f"decoding on a CPU: {decoding}", f"float32 matmuls in training: {library}", "", "optional packages:"]
    lines += [f"  {name:<13} {version(name)}" for name in OPTIONAL]
    return "\n".join(lines)


def check_kernels() -> tuple[str, bool]:
    """Compare the Triton kernels with `chunked` on this device; return a table, and whether all agree.

    The findings replace the earlier ones by which `impl="auto"` decides.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = support.unavailable(device)
    if reason is not None:
        return f"there is nothing to check on this machine: {reason}", True
    from muonssm.ops.triton import self_check

    identity = ", ".join(self_check.device_identity(device).values())
    lines = [
        f"Triton kernels against 'chunked' on {identity}:",
        "",
        f"  {'operator':<10}{'dtype':<10}{'heads':<10}rule",
    ]
    rows = self_check.table(device)
    for kind, found in rows:
        sizes, dtype = f"{kind.values} x {kind.keys}", str(kind.dtype).removeprefix("torch.")
        spilling = self_check.spills(kind, support.architecture(device))
        outcome = found or ("passed" if spilling is None else "passed; auto takes chunked, as the kernels spill")
        lines.append(f"  {kind.operator:<10}{dtype:<10}{sizes:<10}{self_check.title_of(kind):<44}{outcome}")
    failed = sum(found is not None for _, found in rows)
    last = f"{failed} of {len(rows)} failed: impl='auto' takes 'chunked' for those" if failed else "all agree"
    return "\n".join([*lines, "", last, f"kept in {self_check.cache_folder()}"]), not failed


def cpu_features() -> str:
    """The vector instructions of this CPU that torch uses."""
    return torch.backends.cpu.get_cpu_capability()


def version(package: str) -> str:
    """The installed version of a package, or `"not installed"`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
