"""ONNX programs equal torch, for every backbone and rule; a folder is written completely or not at all."""

from __future__ import annotations

import copy
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
    """A small model with random weights, large enough to feel every part, and batch norm that has seen data."""
    torch.manual_seed(0)
    config = ActivityModelConfig(backbone, **({"d_model": 16, "d_state": 8, "layers": 1} | sizes))
    model = ActivityClassifier(config, muon, CHANNELS, CLASSES)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(10)
        model.train()(torch.randn(8, LENGTH, CHANNELS))
    metadata = {
        "classes": list("abcd"), "channels": ["x", "y", "z"], "rate": 50.0,
        "mean": [0.5, -1.0, 2.0], "std": [1.0, 2.0, 0.5],
    }  # fmt: skip
    return Trained(ActivityConfig(length=LENGTH), metadata, model.eval())


def windows(count):
    return np.random.default_rng(1).standard_normal((count, LENGTH, CHANNELS), dtype=np.float32)


# Every backbone and every rule, beside the usual model of `exported`; an export takes some seconds.
CASES = [
    ("longhorn", "residual", {"form": "diagonal"}),
    ("mamba", "paper", {"momentum": "per_head"}),
    ("mamba2", "gated", {}),
    ("deltanet", "residual", {"layers": 2}),
    ("gated_deltanet", "frobenius", {"momentum": "per_step"}),
    ("gated_deltanet", "plain", {}),
    ("momentum_deltanet", "paper", {}),
]


def test_the_cases_have_every_backbone_and_rule():
    assert {backbone for backbone, _, _ in CASES} == set(BACKBONES)
    assert {rule for _, rule, _ in CASES} == set(RULES)


def assert_equal_torch(trained, folder):
    """For one window, as many as the model has heads, and more: none is the number they were traced with."""
    for count in (1, 2, 3):
        assert max(compare(trained, folder, windows(count)).values()) <= TOLERANCE


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model and its programs."""
    trained, folder = untrained("longhorn", Muon()), tmp_path_factory.mktemp("exported")
    export_onnx.export_onnx(trained, folder)
    return trained, folder


def test_the_usual_model_equals_torch(exported):
    assert_equal_torch(*exported)


@pytest.mark.parametrize("name", ["conv", "mixers.0.conv1d", "mixers.0.out_proj", "head"])
def test_a_difference_is_found(exported, name):
    """Other weights are seen in both programs, whichever layer has them."""
    trained, folder = exported
    model = copy.deepcopy(trained.model)
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(2)
    assert min(compare(trained._replace(model=model), folder, windows(2)).values()) > TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "rule", "sizes"), CASES)
def test_programs_equal_torch(backbone, rule, sizes, tmp_path):
    trained = untrained(backbone, RULES[rule], **sizes)
    assert set(export_onnx.export_onnx(trained, tmp_path)) == {WINDOW, STEP}
    assert_equal_torch(trained, tmp_path)
    assert json.loads((tmp_path / "model.json").read_text())["state"]["steps"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["gated_deltanet", "mamba"])
def test_a_bidirectional_model_has_windows_alone(backbone, tmp_path):
    trained = untrained(backbone, Muon(), bidirectional=True)
    assert set(export_onnx.export_onnx(trained, tmp_path)) == {WINDOW}
    assert_equal_torch(trained, tmp_path)
    assert not (tmp_path / STEP).exists()
    assert json.loads((tmp_path / "model.json").read_text())["state"] is None


@pytest.mark.slow
def test_the_recurrence_stays_a_loop_whatever_the_length(exported, tmp_path):
    trained, folder = exported
    config = replace(trained.config, length=4 * LENGTH)
    export_onnx.export_onnx(trained._replace(config=config), tmp_path)
    for name in (WINDOW, STEP):
        assert (tmp_path / name).stat().st_size == pytest.approx((folder / name).stat().st_size, rel=0.01)


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
