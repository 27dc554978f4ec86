"""ONNX programs equal torch, for every backbone and rule; a folder is written completely or not at all."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from muonssm.cli import main
from muonssm.lab.activity import export_onnx, onnxruntime_web
from muonssm.lab.activity.config import ActivityConfig
from muonssm.lab.activity.export_onnx import STEP, TOLERANCE, WINDOW, Trained, compare, new_folder, step_differences
from muonssm.lab.activity.export_web import DEGREE, GRAVITY, motion_signals
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.trainer import train
from muonssm.layers import BACKBONES
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig
from muonssm.ops import Muon

LENGTH, CHANNELS, CLASSES = 24, 3, 4
RULES = {
    "plain": Muon.off(),
    "paper": Muon(),
    "residual": Muon.residual(),
    "gated": Muon.gated(),
    "frobenius": Muon(normalization="frobenius"),
}


def untrained(backbone, muon, **sizes):
    """A small model with random weights, and batch norm that has seen data."""
    torch.manual_seed(0)
    config = ActivityModelConfig(backbone, d_model=16, d_state=8, **sizes)
    model = ActivityClassifier(config, muon, CHANNELS, CLASSES)
    model.train()(torch.randn(8, LENGTH, CHANNELS))
    metadata = {
        "classes": list("abcd"), "channels": ["x", "y", "z"], "rate": 50.0,
        "mean": [0.5, -1.0, 2.0], "std": [1.0, 2.0, 0.5],
    }  # fmt: skip
    return Trained(ActivityConfig(length=LENGTH), metadata, model.eval())


def windows(count):
    return np.random.default_rng(1).standard_normal((count, LENGTH, CHANNELS), dtype=np.float32)


# Every backbone and every rule; an export takes some seconds, so the further pairs are run by `make test` alone.
CASES = [
    pytest.param("longhorn", "paper", {}, marks=pytest.mark.slow),
    *(
        pytest.param(backbone, rule, {"layers": 1, **sizes}, marks=pytest.mark.slow)
        for backbone, rule, sizes in (
            ("mamba", "plain", {}),
            ("mamba", "paper", {"momentum": "per_head"}),
            ("mamba2", "gated", {}),
            ("deltanet", "residual", {}),
            ("gated_deltanet", "frobenius", {"momentum": "per_step"}),
            ("gated_deltanet", "plain", {}),
            ("longhorn", "residual", {"form": "diagonal"}),
            ("momentum_deltanet", "paper", {}),
        )
    ),
]


def test_the_cases_have_every_backbone_and_rule():
    assert {case.values[0] for case in CASES} == set(BACKBONES)
    assert {case.values[1] for case in CASES} == set(RULES)


@pytest.mark.parametrize(("backbone", "rule", "sizes"), CASES)
def test_programs_equal_torch(backbone, rule, sizes, tmp_path):
    """Also for other numbers of windows than they were traced with."""
    trained = untrained(backbone, RULES[rule], **sizes)
    differences = export_onnx.export_onnx(trained, tmp_path)
    assert set(differences) == {WINDOW, STEP}
    for count in (1, 3):
        assert max(compare(trained, tmp_path, windows(count)).values()) <= TOLERANCE
    assert json.loads((tmp_path / "model.json").read_text())["state"]["steps"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["gated_deltanet", "mamba"])
def test_a_bidirectional_model_has_windows_alone(backbone, tmp_path):
    trained = untrained(backbone, Muon(), bidirectional=True, layers=1)
    assert set(export_onnx.export_onnx(trained, tmp_path)) == {WINDOW}
    assert not (tmp_path / STEP).exists()
    assert json.loads((tmp_path / "model.json").read_text())["state"] is None


@pytest.mark.slow
def test_a_difference_is_found(tmp_path):
    """The comparison sees other weights; the recurrence stays a loop, whatever the length."""
    trained = untrained("longhorn", Muon(), layers=1)
    export_onnx.export_onnx(trained, tmp_path)
    long = trained._replace(config=replace(trained.config, length=4 * LENGTH))
    (tmp_path / "long").mkdir()
    export_onnx.export_onnx(long, tmp_path / "long")
    assert (tmp_path / "long" / WINDOW).stat().st_size == pytest.approx((tmp_path / WINDOW).stat().st_size, rel=0.01)
    with torch.no_grad():
        trained.model.mixers[0].conv1d.weight += 0.01
    assert min(compare(trained, tmp_path, windows(2)).values()) > TOLERANCE


@pytest.mark.parametrize("orthogonalize", ["update", "read"])
def test_an_experiment_is_refused(orthogonalize, tmp_path):
    with pytest.raises(ValueError, match="orthogonalize"):
        export_onnx.export_onnx(untrained("deltanet", Muon(orthogonalize=orthogonalize)), tmp_path)


def test_a_folder_is_written_completely_or_not_at_all(tmp_path):
    with pytest.raises(FileNotFoundError), new_folder(tmp_path / "a") as folder:
        (folder / "no" / "model.json").write_text("{}")
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "a" / "b") as folder:
        (folder / "model.json").write_text("{}")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    with pytest.raises(ValueError, match="--output must be a free folder"), new_folder(tmp_path / "a" / "b"):
        pass


# ---- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory, changes):
    output = tmp_path_factory.mktemp("runs") / "run"
    train(Recipe.load("folder", [*changes, "training.epochs=1"]), output)
    return output


@pytest.mark.slow
def test_the_command_checks_every_step_of_a_recording(run, recordings, tmp_path, capsys):
    file = recordings / "0-fast-0.csv"
    assert main(["export", str(run), "--to", "onnx", "--output", str(tmp_path / "onnx"), "--check", str(file)]) == 0
    printed = capsys.readouterr().out
    assert f"{WINDOW} equals torch" in printed
    assert f"{STEP} equals torch" in printed
    from muonssm.lab.core.run_folder import RunFolder

    recipe, metadata, model = RunFolder(run).load_model("activity")
    trained = Trained(recipe.task.data, metadata, model)
    cut = export_onnx.windows_of(trained, str(file))
    assert cut.shape == (5, 48, 3)
    steps = list(step_differences(trained, tmp_path / "onnx" / STEP, cut))
    assert len(steps) == 48
    assert max(steps) <= TOLERANCE
    assert main(["export", str(run), "--to", "onnx", "--output", str(tmp_path / "onnx")]) == 2
    assert "--output must be a free folder" in capsys.readouterr().err


# ---- onnxruntime-web


def test_without_npm_the_error_says_what_to_do(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MUONSSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["export", str(run), "--to", "web", "--output", str(tmp_path / "web")]) == 2
    assert "npm is not installed" in capsys.readouterr().err
    (tmp_path / "npm").write_text("#!/bin/sh\necho 'npm error network is unreachable' >&2\nexit 1\n")
    (tmp_path / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert main(["export", str(run), "--to", "web", "--output", str(tmp_path / "web")]) == 2
    assert "network is unreachable" in capsys.readouterr().err
    assert not (tmp_path / "web").exists()


def test_a_changed_copy_is_refused(tmp_path, monkeypatch):
    copy = tmp_path / "package" / "dist"
    copy.mkdir(parents=True)
    for name in onnxruntime_web.SHA256:
        (copy / name).write_bytes(b"something else")
    with pytest.raises(ValueError, match=rf"{onnxruntime_web.SCRIPT} must be that of onnxruntime-web"):
        onnxruntime_web.load(copy.parent)
    with pytest.raises(FileNotFoundError, match="--onnxruntime must be a folder"):
        onnxruntime_web.load(tmp_path / "nothing")


def test_sensors_are_guessed_from_names_and_sizes():
    names = ["ax", "ay", "az", "wx", "wy", "wz", "heart"]
    metadata = {"channels": names, "mean": [0.0, 0.6, 0.6] + 4 * [0.0], "std": 7 * [0.3]}
    found = [(each["signal"], each["scale"]) for each in motion_signals(metadata)]
    assert found[0] == ("accelerationIncludingGravity.x", 1 / GRAVITY)
    assert found[5] == ("rotation.z", DEGREE)
    assert found[6] == (None, 1.0)
    metadata["mean"] = [0.0, 6.0, 7.0] + 4 * [0.0]
    assert motion_signals(metadata)[1] == {"channel": "ay", "signal": "accelerationIncludingGravity.y", "scale": 1.0}
    for name, signal in (
        ("userAcceleration.x", "acceleration.x"),
        ("gyro_z", "rotation.z"),
        ("gravity.y", "gravity.y"),
    ):
        assert motion_signals({"channels": [name], "mean": [0.0], "std": [9.0]})[0]["signal"] == signal
