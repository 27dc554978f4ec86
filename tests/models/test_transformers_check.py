"""Where transformers cannot be imported, the error of `muonssm.models.language` says what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")'
MISSING = "raise ModuleNotFoundError(\"No module named 'transformers'\", name='transformers')"
ANOTHER = "raise ImportError('not ours')"


@pytest.mark.parametrize(
    ("package", "code", "error"),
    [
        ("torchvision", BROKEN, "ImportError: transformers cannot import the installed torchvision"),
        ("transformers", MISSING, "ImportError: models on transformers need transformers: pip install"),
        ("transformers", ANOTHER, "ImportError: not ours"),
    ],
)
def test_an_import_that_fails_says_what_to_do(tmp_path, package, code, error):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", "import muonssm.models.language"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(error)
