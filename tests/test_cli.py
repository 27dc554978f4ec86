"""The commands as a user types them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from muonssm import __version__
from muonssm.cli import main
from muonssm.ops import IMPLEMENTATIONS


def test_info_names_versions_device_and_every_implementation(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert __version__ in text
    assert torch.__version__ in text
    for name in IMPLEMENTATIONS:
        assert f"  {name}" in text
    assert "impl='auto' takes native for sequences" in text


def test_info_says_why_an_implementation_is_not_usable(capsys, monkeypatch):
    chunked = IMPLEMENTATIONS["chunked"]
    monkeypatch.setattr(type(chunked), "unsupported", lambda self, _: "it is Sunday" if self.name == "scan" else None)
    main(["info"])
    assert "not usable: it is Sunday" in capsys.readouterr().out


def test_python_dash_m_runs_the_command():
    done = subprocess.run([sys.executable, "-m", "muonssm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"muonssm {__version__}"


def test_an_unknown_command_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["frobnicate"])
    assert stop.value.code == 2
    assert "frobnicate" in capsys.readouterr().err
