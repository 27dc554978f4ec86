"""The Triton kernels of the selective scan: under the interpreter, and compiled ahead of time for real GPUs."""

from __future__ import annotations

import pytest

from .test_triton import run_interpreted

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.mark.slow
def test_selective_scan_under_the_interpreter():
    run_interpreted("tests/ops/interpreted_selective.py")


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
