"""AMX that a virtual machine announces and does not have."""

from __future__ import annotations

import os
import subprocess

import pytest

from muonssm.lab.core import amx


@pytest.fixture
def machine(monkeypatch):
    """A machine that announces AMX, and whose probe ends with `code`."""

    def build(code, announced=True):
        monkeypatch.delenv(amx.SETTING, raising=False)
        monkeypatch.setattr(amx, "_announces_amx", lambda: announced)
        monkeypatch.setattr(amx.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], code))
        amx.disable_broken_amx.cache_clear()
        result = amx.disable_broken_amx()
        amx.disable_broken_amx.cache_clear()
        return result, os.environ.get(amx.SETTING)

    return build


@pytest.mark.parametrize(
    ("code", "announced", "expected"),
    [(-4, True, (True, "AVX512_CORE_FP16")), (0, True, (False, None)), (-4, False, (False, None))],
)
def test_amx_is_switched_off_only_if_the_probe_is_killed(machine, code, announced, expected):
    assert machine(code, announced) == expected


def test_a_setting_of_the_user_stays(monkeypatch):
    monkeypatch.setenv(amx.SETTING, "AVX2")
    amx.disable_broken_amx.cache_clear()
    assert amx.disable_broken_amx() is False
    assert os.environ[amx.SETTING] == "AVX2"
    amx.disable_broken_amx.cache_clear()
