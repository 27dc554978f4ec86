"""Every script in examples/ runs as it is, on one core, and prints what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full  # each script starts a process and trains

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = {
    "1_operator.py",
    "2_train_a_mixer.py",
    "3_streaming.py",
    "4_language_model.py",
    "5_compare_on_activity.py",
}


def run(name: str) -> str:
    """Run a script as a user would; return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def row(text: str, name: str) -> list[float]:
    """The numbers of the line that starts with `name`."""
    line = next(line for line in text.splitlines() if line.startswith(name))
    numbers = re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?", line[len(name) :])
    return [float(number.replace(",", "")) for number in numbers]


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == SCRIPTS


def test_operator_shows_that_muon_bounds_an_outlier():
    text = run("1_operator.py")
    plain, muon = (row(text, f"one value 100x larger, {variant}") for variant in ("plain", "muon"))
    assert plain[0] < 0.5 < 0.8 < muon[0]  # recall of the values
    assert plain[1] > 10 * muon[1]  # condition number of S
    usual = row(text, "values of one size, muon")
    assert muon == usual  # a write's size does not matter to Muon


@pytest.mark.parametrize("variant", ["plain", "muon"])
def test_mixer_learns_associative_recall(variant, trained_mixer):
    before, _, after, chance = row(trained_mixer, variant)
    assert chance == pytest.approx(100 / 16, abs=0.1)
    assert before < 15
    assert after > 90


@pytest.fixture(scope="module")
def trained_mixer() -> str:
    return run("2_train_a_mixer.py")


def test_streaming_equals_the_whole_sequence():
    from muonssm.layers import BACKBONES

    text = run("3_streaming.py")
    for name in BACKBONES:
        difference, first, last = row(text, f"{name} ")
        assert difference < 1e-5
        assert first == last > 0


def test_language_model_generates_its_sentence():
    text = run("4_language_model.py")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
    assert losses[0] > 2 > 0.1 > losses[-1]
    assert "generated  'the memory keeps what it reads, and reads what it keeps. '" in text


@pytest.mark.slow
def test_comparison_prints_a_paired_table():
    text = run("5_compare_on_activity.py")
    for variant in ("plain", "muon"):
        scores = row(text, f"{variant} ")
        assert len(scores) == 4
        assert all(0 <= score <= 100 for score in scores)
    difference = float(re.search(r"muon minus plain, accuracy: ([-+][\d.]+)", text).group(1))
    assert difference == pytest.approx(row(text, "muon ")[0] - row(text, "plain ")[0], abs=0.011)
