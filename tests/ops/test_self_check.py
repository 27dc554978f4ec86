"""The self-check of the Triton kernels, by which `auto` trusts them on a device."""

from __future__ import annotations

import pytest
import torch

from muonssm.cli import main
from muonssm.ops.triton import support

from .test_triton import run_interpreted


@pytest.mark.slow
def test_wrong_kernels_are_found_warned_about_and_not_used():
    """In another process, under the interpreter."""
    assert "11 passed" in run_interpreted("tests/ops/interpreted_self_check.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to check")
def test_without_a_gpu_there_is_nothing_to_check(capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["info", "--check"]) == 0
    assert support.unavailable(torch.device("cpu")) in capsys.readouterr().out
