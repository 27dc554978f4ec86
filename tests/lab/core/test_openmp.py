"""How OpenMP's threads wait, and how many cores there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from muonssm.lab.core import openmp

SETTINGS = dict.fromkeys(openmp.SETTINGS)
PRINT = f"import json, os; print(json.dumps([os.environ.get(n) for n in {openmp.SETTINGS!r}]))"


def environment(**own):
    return {**{name: value for name, value in os.environ.items() if name not in SETTINGS}, **own}


def printed(code, **own):
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**own), capture_output=True, text=True, check=True
    )
    return done.stdout.strip().splitlines()[-1]


def test_the_command_settles_how_threads_wait_before_torch_is_loaded():
    """libgomp reads the setting when torch loads it: later it would have no effect."""
    code = (
        "import sys; import muonssm.cli as cli; assert 'torch' not in sys.modules\n"
        "sys.argv = ['muonssm', 'info']\n"
        "class First:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == 'torch': print('setting', os.environ.get({openmp.SPINS!r}))\n"
        "import os; sys.meta_path.insert(0, First())\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True)
    assert f"setting {openmp.FEW}" in done.stdout.splitlines()


def test_a_users_choice_stays():
    code = "from muonssm.lab.core import openmp; print(openmp.let_waiting_threads_sleep())"
    assert printed(code) == "True"
    assert printed(code, OMP_WAIT_POLICY="active") == "False"
    assert printed("import torch; " + code) == "False"


def test_workers_of_a_study_inherit_the_setting(monkeypatch):
    for name in openmp.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    with openmp.children_that_sleep():
        inside = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True).stdout
    assert any(json.loads(inside))
    assert not any(name in os.environ for name in openmp.SETTINGS)


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("no", None)]
)
def test_the_quota_of_a_container_counts(text, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(openmp, "QUOTA", tmp_path / "cpu.max")
    available = len(os.sched_getaffinity(0))
    assert openmp.usable_cores() == (available if cores is None else cores)


def test_a_busy_core_costs_little():
    """A step beside a process that burns one core: without the setting it takes up to 25 times as long.

    The bound is far above what the setting leaves (1.2 to 2.3), and far below what happens without it on two cores.
    """
    code = (
        "from muonssm.lab.core import openmp; assert openmp.let_waiting_threads_sleep()\n"
        "import torch; torch.set_num_threads(2)\n"
        "from muonssm.lab.bench.limits import slowdown_beside_a_busy_core\n"
        "a = torch.randn(256, 256)\n"
        "def step():\n"
        "    for _ in range(200): torch.mm(a, a).relu_()\n"
        "print(slowdown_beside_a_busy_core(step, rounds=7))\n"
    )
    assert float(printed(code)) < 8
