"""The Triton kernels of `muon_memory`: under the interpreter, and compiled ahead of time for real GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


def run_interpreted(*arguments: str) -> str:
    """Run tests in a process with TRITON_INTERPRET, which Triton reads when it is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_one_case_per_kernel_under_the_interpreter():
    """Forward, backward and single step of both operators, in one process and in seconds; the rest is `slow`."""
    memory, selective = "tests/ops/interpreted_memory.py::", "tests/ops/interpreted_selective.py::"
    cases = (
        f"{memory}test_head_sizes_that_fill_no_tile[{{'d': 1, 'm': 1}}]",
        f"{memory}test_a_decoding_step_equals_the_reference[residual-True]",
        f"{selective}test_equals_the_float64_reference[selective-packed-torch.float32]",
        f"{selective}test_single_step_kernel[selective-off]",
    )
    assert "4 passed" in run_interpreted(*cases)


@pytest.mark.slow
def test_memory_under_the_interpreter():
    run_interpreted("tests/ops/interpreted_memory.py")


RULES = {
    "paper": {},
    "paper, inject": {"inject": True},
    "gated": {"beta_outside": True},
    "residual": {"residual": True},
    "residual, inject": {"residual": True, "inject": True},
    "residual, gated, inject": {"residual": True, "beta_outside": True, "inject": True},
}
COMPILED = [*((architecture, "paper") for architecture in ARCHITECTURES), *(("sm_90", rule) for rule in [*RULES][1:])]


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("architecture", "rule"), COMPILED)
def test_memory_kernels_compile_without_spills(architecture, size, rule):
    """Compile for bfloat16, with momentum, correction, initial states and gamma's gradient."""
    from muonssm.ops.memory.kernels.aot import variants
    from muonssm.ops.triton.aot import TARGETS, compile_for

    target = TARGETS[architecture]
    for name, variant in variants(architecture, size, **RULES[rule]).items():
        report = compile_for(variant, target)
        assert report.spills == 0, f"{name} spills {report.spills} on {architecture}"
        assert report.shared <= target.shared, f"{name} takes {report.shared} bytes of shared memory on {architecture}"
        assert report.registers <= target.register_limit
        assert report.programs >= 1, name
