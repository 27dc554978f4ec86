"""Start commands on several processes, and compare what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from muonssm.lab.core.run_folder import RunFolder

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def launcher(processes: int) -> list[str]:
    """The first words of a command that runs on several processes over gloo."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def train_command(recipe: str, changes: list[str], output: Path, *more: str) -> list[str]:
    """The arguments of `muonssm train`."""
    sets = [word for change in changes for word in ("--set", change)]
    return ["train", recipe, "--output", str(output), *more, *sets]


def torchrun(arguments: list[str], processes: int = 2) -> None:
    """Run `muonssm` with these arguments on several processes."""
    command = [*launcher(processes), "-m", "muonssm", *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]


def curve(run: Path) -> list[float]:
    """Training and validation losses of a run in order."""
    rows = RunFolder(run).read("history.json")
    return [row[key] for row in rows for key in ("loss", "validation_loss") if key in row]
