"""The Triton kernels: under the interpreter, in a process of its own, and compiled ahead of time for real GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.slow
def test_memory_under_the_interpreter():
    """interpreted_memory.py with TRITON_INTERPRET set, which Triton reads when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/interpreted_memory.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_memory_kernels_compile_without_spills(architecture, size):
    """bfloat16, with all there is: momentum, erase, initial states, gamma's gradient."""
    from muonssm.ops.memory.kernels.aot import variants
    from muonssm.ops.triton.aot import TARGETS, compile_for

    target = TARGETS[architecture]
    for name, variant in variants(architecture, size).items():
        report = compile_for(variant, target)
        assert report.spills == 0, f"{name} spills {report.spills} on {architecture}"
        assert report.shared <= target.shared, f"{name} takes {report.shared} bytes of shared memory on {architecture}"
        assert report.registers <= target.register_limit
        assert report.programs >= 1, name
