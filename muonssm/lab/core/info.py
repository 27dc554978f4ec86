"""The text of `muonssm info`: versions, device, usable implementations, optional packages."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from muonssm.ops import IMPLEMENTATIONS
from muonssm.ops.dispatch import Problem, choose
from muonssm.version import __version__

OPTIONAL = ("triton", "transformers", "accelerate", "datasets", "timm", "torchvision", "lm-eval", "mambapy", "aeon")


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
    lines += ["", "optional packages:"]
    lines += [f"  {name:<13} {version(name)}" for name in OPTIONAL]
    return "\n".join(lines)


def cpu_features() -> str:
    """The vector instructions of this CPU that torch uses."""
    return torch.backends.cpu.get_cpu_capability()


def version(package: str) -> str:
    """The installed version of a package, or `"not installed"`."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
