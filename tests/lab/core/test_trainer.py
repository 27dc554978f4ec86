"""Runs: what they leave behind, killed and resumed, the same twice; recipes and their errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from muonssm.lab.core.checkpoints import seal
from muonssm.lab.core.evaluate import evaluate
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.registry import recipe_files
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory, changes):
    """An undisturbed run."""
    output = tmp_path_factory.mktemp("runs") / "run"
    return output, train(Recipe.load("folder", changes), output)


def same_weights(one, other):
    return all(
        torch.equal(tensor, load_file(other / name)[key])
        for name in ("model.safetensors", "last.safetensors")
        for key, tensor in load_file(one / name).items()
    )


@pytest.mark.slow
def test_a_run_learns_and_leaves_everything_behind(finished):
    output, metrics = finished
    assert metrics["test"]["accuracy"] > 60  # of three classes
    names = {path.name for path in output.iterdir()}
    files = {"recipe.json", "versions.json", "metadata.json", "history.json", "metrics.json"}
    assert names >= files | {"model.safetensors", "last.safetensors", "checkpoints", "tensorboard"}
    assert not any(name.endswith(".part") for name in names)
    history = json.loads((output / "history.json").read_text())
    assert [row["epoch"] for row in history] == [1, 2, 3, 4]
    assert history[-1]["loss"] < history[0]["loss"]
    assert max(row["validation_accuracy"] for row in history) == pytest.approx(metrics["validation"]["accuracy"])
    assert any((output / "tensorboard").iterdir())
    again = evaluate(output)
    for part in ("validation", "test"):
        assert again[part]["confusion"] == metrics[part]["confusion"]


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_bits(finished, tmp_path, changes):
    output, metrics = finished
    assert train(Recipe.load("folder", changes), tmp_path / "again") == metrics
    assert same_weights(output, tmp_path / "again")
    other = train(Recipe.load("folder", [*changes, "training.seed=1"]), tmp_path / "other")
    assert other["test"]["loss"] != metrics["test"]["loss"]


@pytest.mark.slow
def test_everything_a_recipe_can_ask_for_has_an_effect(finished, tmp_path, changes):
    """Each setting alone changes the trained weights; early stopping ends a run."""
    output, _ = finished
    plain = load_file(output / "last.safetensors")["head.weight"]
    for i, change in enumerate(
        ["training.label_smoothing=0.1", "training.optimizer=adamw", "training.warmup=0.5", "training.clip=0.01",
         "training.weight_decay=0.1", "augment.jitter=0.5", "augment.rotation=30", "model.dropout=0.3",
         "model.momentum=per_step", "muon.normalization=frobenius", "muon.normalization=none"]
    ):  # fmt: skip
        train(Recipe.load("folder", [*changes, change]), tmp_path / f"run{i}")
        assert not torch.equal(load_file(tmp_path / f"run{i}" / "last.safetensors")["head.weight"], plain), change
    still = [*changes, "training.learning_rate=1e-12", "training.patience=1"]
    assert train(Recipe.load("folder", still), tmp_path / "still")["epochs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2])
def test_killed_in_mid_epoch_and_resumed_is_the_undisturbed_run(finished, tmp_path, changes, after):
    """kill -9 while the epoch after checkpoint `after` runs; then the same command with --resume."""
    output, metrics = finished
    run = tmp_path / "killed"
    command = [sys.executable, "-m", "muonssm", "train", "folder", "--output", str(run)]
    for change in changes:
        command += ["--set", change]
    slow = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    code = (
        "import sys, time, torch; from muonssm.models.activity import ActivityClassifier as C; f = C.forward\n"
        "def slow(self, x, labels=None): time.sleep(0.1); return f(self, x, labels)\n"
        "C.forward = slow; from muonssm.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *command[3:]], env=slow)
    folder, end = RunFolder(run), time.monotonic() + 120
    while len(json_steps(folder)) < after and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.35)  # into the next epoch
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not folder.is_finished
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--output must be a free folder" in refused.stderr
    subprocess.run([*command, "--resume"], check=True, env=slow)
    assert folder.read("metrics.json") == json.loads(json.dumps(metrics))
    assert same_weights(output, run)
    assert folder.read("history.json") == RunFolder(output).read("history.json")


@pytest.mark.slow
@pytest.mark.parametrize("change", ["training.patience=0", "training.patience=1"])
def test_killed_before_the_scores_and_moved_is_still_the_same_run(tmp_path, changes, change):
    """Also one that had stopped early: it does not train on."""
    recipe = Recipe.load("folder", [*changes, "training.epochs=6", change])
    metrics = train(recipe, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    (tmp_path / "run" / "metrics.json").unlink()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert train(recipe, tmp_path / "moved", resume=True) == metrics
    assert same_weights(tmp_path / "kept", tmp_path / "moved")


@pytest.mark.slow
def test_a_diverged_run_is_told_and_files_stay_json(tmp_path, changes):
    from muonssm.lab.core.compare import compare, table
    from muonssm.lab.report.report import write_report

    recipe = Recipe.load("folder", [*changes, "training.epochs=2", "training.learning_rate=1e6"])
    result = compare(recipe, tmp_path / "run")
    assert "1 of 1 runs of muon diverged" in table(result)
    assert "NaN" not in (tmp_path / "run" / "comparison.json").read_text()
    assert write_report([tmp_path / "run"]).is_file()


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path, changes):
    for change in (f"data.root={tmp_path / 'nosuch'}", "data.channels=['acc_q']"):
        with pytest.raises((ValueError, OSError)):
            train(Recipe.load("folder", [*changes, change]), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def json_steps(folder):
    """The checkpoints that are whole."""
    whole = []
    for path in folder.checkpoints.glob("checkpoint-*/trainer_state.json"):
        try:
            whole.append(json.loads(path.read_text())["global_step"])
        except ValueError:
            continue
    return whole


def test_a_checkpoint_cut_short_is_passed_over(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.last_checkpoint() is None
    state = {"global_step": 18, "epoch": 2.0, "log_history": [], "stateful_callbacks": {}}
    for step, text in ((9, json.dumps({**state, "global_step": 9})), (18, json.dumps(state)), (100, '{"glob')):
        (folder.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
        (folder.checkpoints / f"checkpoint-{step}" / "trainer_state.json").write_text(text)
        if step < 100:
            seal(folder.checkpoints / f"checkpoint-{step}")
    (folder.checkpoints / "checkpoint-200").mkdir()
    path, read = folder.last_checkpoint()
    assert (path.name, read) == ("checkpoint-18", state)


def test_every_recipe_of_the_library_is_valid(tmp_path):
    files = recipe_files()
    brought = {name for name, file in files.items() if "data.root=FOLDER" in file.read_text()}  # users have the data
    assert brought >= {"muwiges", "uestc-mmea-cl", "mmact", "motionsense", "utd-mhad", "uci-har", "folder"}
    assert set(files) >= {"watch", "watch-best", "language-demo", "pretrain-170m", "sft-alpaca", "recall"}
    for name in files:
        place = [f"data.root={tmp_path}"] if name in brought else []
        recipe = Recipe.load(name, place)
        assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


def test_the_watch_recipe_is_the_papers():
    recipe = Recipe.load("watch")
    t, m, d = recipe.training, recipe.task.model, recipe.task.data
    assert (t.epochs, t.batch_size, t.learning_rate, t.weight_decay) == (50, 16, 1e-3, 1e-4)
    assert (t.optimizer, t.clip, t.patience) == ("adam", 1.0, 10)
    assert (m.d_model, m.d_state, m.expand, m.layers, m.dropout) == (128, 64, 2, 2, 0.1)
    assert (d.length, d.overlap) == (512, 0.5)
    assert (recipe.task.muon.gamma, recipe.task.muon.tau) == (0.9, 0.6)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wacht", [], "RECIPE must be .*watch.*, got 'wacht'"),
        ("watch", ["epochs=3"], "--set must be SECTION.KEY=VALUE.*, got 'epochs=3'"),
        ("watch", ["train.epochs=3"], "--set must be one of data, model, muon.*, got 'train'"),
        ("watch", ["training.epoch=3"], "key of training must be one of epochs, steps.*, got 'epoch'"),
        ("watch", ["training.epochs=many"], "training.epochs must be .*, got 'many'"),
        ("watch", ["model.bidirectional=no"], "model.bidirectional must be .*, got 'no'"),
        ("watch", ["model.momentum=foo"], "model.momentum must be .*, got 'foo'"),
        ("watch", ["model.dropout=abc"], "model.dropout must be .*, got 'abc'"),
        ("watch", ["muon.gamma=2"], "muon.gamma must be .*, got 2"),
        ("watch", ["training.optimizer=sgd"], "training.optimizer must be .*, got 'sgd'"),
        ("watch", ["training.learning_rate=0"], "training.learning_rate must be .*, got 0"),
        ("watch", ["training.warmup=2"], "training.warmup must be .*, got 2"),
        ("muwiges", [], "data.root must be"),
    ],
)
def test_bad_recipes_say_what_is_wrong(name, changes, message):
    with pytest.raises(ValueError, match=message):
        Recipe.load(name, changes)


def test_files_that_are_no_recipes(tmp_path):
    (tmp_path / "a.toml").write_text("[data\n")
    with pytest.raises(ValueError, match="is not valid TOML"):
        Recipe.load(str(tmp_path / "a.toml"))
    (tmp_path / "b.toml").write_text('task = "activity"\n[optimiser]\nlr = 1\n')
    with pytest.raises(ValueError, match=r"section of the recipe must be one of data.*, got 'optimiser'"):
        Recipe.load(str(tmp_path / "b.toml"))
    (tmp_path / "c.toml").write_text("[data]\n")
    with pytest.raises(ValueError, match=r"task must be one of activity.*, got None"):
        Recipe.load(str(tmp_path / "c.toml"))


@pytest.mark.slow
def test_snapshots_are_the_weights_along_training(tmp_path, changes, finished):
    recipe = Recipe.load("folder", [*changes, "training.snapshots=true", "training.keep=last", "training.patience=0"])
    train(recipe, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    found = folder.snapshots()
    history = folder.read("history.json")
    assert list(found) == [0, *(row["step"] for row in history)]
    last, kept = load_file(list(found.values())[-1]), load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(last[name], tensor) for name, tensor in kept.items())
    assert not torch.equal(load_file(found[0])["head.weight"], last["head.weight"])
    assert RunFolder(finished[0]).snapshots() == {}
