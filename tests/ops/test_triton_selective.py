"""The selective scan's Triton kernels without a GPU: right under the interpreter, fit by what the compilers say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.slow
def test_kernels_are_right_under_the_interpreter():
    """In a process of its own: Triton looks for the interpreter once, when it is imported."""
    cases = Path(__file__).parent / "interpreted_selective.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=cases.parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def check(architecture: str, N: int, longhorn: bool = False) -> None:
    from muonssm.ops.selective.kernels.aot import variants
    from muonssm.ops.triton.aot import TARGETS, compile_for

    target = TARGETS[architecture]
    reports = {name: compile_for(v, target) for name, v in variants(architecture, N, longhorn=longhorn).items()}
    assert len(reports) == 9
    assert {name: report.spills for name, report in reports.items() if report.spills} == {}
    assert all(report.shared <= target.shared and report.programs >= 1 for report in reports.values())


@pytest.mark.slow
@pytest.mark.parametrize("N", [16, 64, 128])
@pytest.mark.parametrize("architecture", TARGETS)
def test_kernels_compile_without_spills(architecture, N):
    check(architecture, N)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TARGETS)
def test_longhorn_kernels_compile_without_spills(architecture):
    check(architecture, 16, longhorn=True)
