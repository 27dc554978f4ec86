"""The guides' code runs as printed, block after block."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def run_blocks(name, at_least=3):
    """Runs a guide's Python, in order; what it defined."""
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert len(blocks) >= at_least
    for block in blocks:
        exec(block, namespace)
    return namespace


def test_code_in_the_guide_to_mixers_runs(capsys):
    assert run_blocks("mixers.md")["text"].shape == (2, 35)
    assert "torch.Size([3, 3, 128])" in capsys.readouterr().out


def test_code_in_the_guide_to_language_runs(capsys):
    assert run_blocks("language.md")["parameters"] == 172_679_272
    assert "172,679,272" in capsys.readouterr().out


def test_code_in_the_guide_to_vision_runs(capsys):
    assert run_blocks("vision.md")["parameters"] == 31_794_248
    assert "31,794,248" in capsys.readouterr().out


def test_code_in_the_guide_to_analysis_runs():
    found = run_blocks("analysis.md", at_least=1)
    assert all(found[name].startswith("<svg") for name in ("picture", "table", "means", "memory", "text"))
