"""The guides' code runs as printed, block after block."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", ["mixers.md"])
def test_code_in_the_guide_runs(name, capsys):
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, namespace)
    assert namespace["text"].shape == (2, 35)
    assert "torch.Size([3, 3, 128])" in capsys.readouterr().out
