"""The command line as a user types it."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from muonssm import __version__, cli
from muonssm.cli import build_parser, main
from muonssm.lab.core import command_table
from muonssm.ops import IMPLEMENTATIONS

COMMANDS = {
    "info", "train", "compare", "eval", "report", "predict", "stream", "prepare", "generate", "needle", "explain",
    "corrupt", "analyze", "bench",
}  # fmt: skip


def test_every_room_adds_its_commands():
    text = build_parser().format_help()
    assert {name for name in COMMANDS if f"\n    {name} " in text} == COMMANDS


def test_info_names_versions_device_and_every_implementation(capsys):
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert __version__ in text
    assert torch.__version__ in text
    for name in IMPLEMENTATIONS:
        assert f"  {name}" in text
    assert "native" in text.split("auto", 1)[1]


def test_info_says_why_an_implementation_is_not_usable(capsys, monkeypatch):
    chunked = IMPLEMENTATIONS["chunked"]
    monkeypatch.setattr(type(chunked), "unsupported", lambda self, _: "it is Sunday" if self.name == "scan" else None)
    main(["info"])
    assert "it is Sunday" in capsys.readouterr().out


def test_python_dash_m_runs_the_command():
    done = subprocess.run([sys.executable, "-m", "muonssm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"muonssm {__version__}"


def test_an_unknown_command_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["frobnicate"])
    assert stop.value.code == 2
    assert "frobnicate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["eval", "RUN"], "activity"),
        (["eval", "RUN", "--tasks", "paper"], "language"),
        (["eval", "RUN", "--robustness", "imagenet-c", "--data", "DIR"], "vision"),
        (["generate", "RUN", "text"], "language"),
        (["explain", "RUN"], "vision"),
    ],
)
def test_a_missing_package_names_the_extra_of_the_mode(arguments, extra, capsys, monkeypatch):
    """The extra is known before anything is imported, so an import that fails at once names the right one."""

    def missing(_):
        raise ModuleNotFoundError("No module named 'nosuch'")

    monkeypatch.setattr(cli, "select", lambda parsed: (missing, command_table.select(parsed)[1]))
    assert main(arguments) == 2
    assert f"pip install 'muonssm[{extra}]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("seed must be 0, got 1"), 2), (TypeError("seed must be an integer, got 'x'"), 2)]
)
def test_wrong_settings_end_in_one_line(error, code, capsys, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(cli, "select", lambda parsed: (fail, "dev"))
    assert main(["info"]) == code
    assert capsys.readouterr().err == f"muonssm info: {error}\n"


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(2**60), lambda: torch.empty(2**62, 3), lambda: np.empty(2**55), lambda: bytes(2**62)],
)
def test_too_little_memory_is_told_in_one_line(allocate, capsys, monkeypatch):
    monkeypatch.setattr(cli, "select", lambda parsed: (lambda _: allocate(), "dev"))
    assert main(["info"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("muonssm info: not enough memory")
    assert told.count("\n") == 1


def test_control_characters_in_errors_are_escaped(capsys, monkeypatch):
    """Names of files and labels come from others; a terminal obeys some characters."""

    def fail(_):
        raise ValueError("files:\n    \x1b[31mwalk\x07.csv is empty")

    monkeypatch.setattr(cli, "select", lambda parsed: (fail, "dev"))
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "muonssm info: files:\n    \\x1b[31mwalk\\x07.csv is empty\n"


def test_a_bug_is_not_hidden(monkeypatch):
    def fail(_):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(cli, "select", lambda parsed: (fail, "dev"))
    with pytest.raises(TypeError, match="operand"):
        main(["info"])
