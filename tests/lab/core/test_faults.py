"""Faults: damaged files, a lock that is held, a disk that looks full, and text that is no recipe.

test_torture.py kills commands at random moments and fills a real disk.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from muonssm.cli import main
from muonssm.lab.core.checkpoints import all_checkpoints, rotate
from muonssm.lab.core.compare import ComparedRun, Comparison, diverged, table
from muonssm.lab.core.divergence import why_diverged
from muonssm.lab.core.files import atomic, checksum, read_json, remove_leftovers
from muonssm.lab.core.library_output import hide_kept_thread_errors
from muonssm.lab.core.lock import locked
from muonssm.lab.core.processes import processes
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train

ENTRY = "import sys; from muonssm.cli import main; sys.exit(main(sys.argv[1:]))"
FULL_DISK = """
import torch
saves, save = [], torch.save
def failing(content, path, *others, **options):
    saves.append(path)
    if len(saves) == 5:
        raise OSError(28, "No space left on device")
    return save(content, path, *others, **options)
torch.save = failing
"""


def command(name, changes, output, *options, code=ENTRY):
    sets = [part for change in changes for part in ("--set", change)]
    return [sys.executable, "-c", code, name, "folder", "--output", str(output), *sets, *options]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


def run(*arguments, **options):
    text = {"capture_output": True, "text": True}
    return subprocess.run(command(*arguments, **options), env=environment(), timeout=300, **text)


def assert_same(one, other):
    for name in ("model.safetensors", "last.safetensors", "metrics.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    histories = [json.loads((run / "history.json").read_text()) for run in (one, other)]
    assert histories[0] == histories[1]  # a resumed run has the same rows, with keys in another order


def assert_clean(folder):
    left = [path for path in folder.rglob("*") if path.name == "lock" or path.name.endswith((".part", ".tmp"))]
    assert not left


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, changes):
    output = tmp_path_factory.mktemp("faults") / "run"
    train(Recipe.load("folder", changes), output)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "manifest.json", "trainer_state.json"])
def test_a_damaged_checkpoint_is_told_and_passed_over(undisturbed, tmp_path, changes, capsys, name):
    recipe = Recipe.load("folder", changes)
    train(recipe, tmp_path / "run")
    (tmp_path / "run" / "metrics.json").unlink()
    damaged = all_checkpoints(tmp_path / "run" / "checkpoints")[0] / name
    damaged.unlink() if name == "manifest.json" else damaged.write_bytes(damaged.read_bytes()[:-5])
    train(recipe, tmp_path / "run", resume=True)
    told = capsys.readouterr().err
    assert f"{damaged.parent} is damaged and skipped" in told
    assert name in told
    assert_same(undisturbed, tmp_path / "run")
    assert_clean(tmp_path / "run")


def test_other_folders_among_the_checkpoints_are_spared(tmp_path):
    for name in ("checkpoint-foo", "checkpoint-10-old", "checkpoint-1", "checkpoint-2", "checkpoint-3"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    rotate(tmp_path, None, 2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint-foo", "checkpoint-10-old", "checkpoint-2", "checkpoint-3", "checkpoint-5"}
    assert [path.name for path in all_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-2"]


def test_two_processes_do_not_share_a_folder(tmp_path, changes):
    code = (
        "import sys, time; from muonssm.lab.core.lock import locked\n"
        "with locked(sys.argv[1]): print(1, flush=True); time.sleep(60)"
    )
    folder = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match=rf"not in use, got .* which process {holder.pid} on .* has held since"):
            train(Recipe.load("folder", changes), folder)
        holder.kill()
    with locked(folder), locked(folder):  # the lock of a dead process stops nobody; one process can lock twice
        assert (folder / "lock").is_file()
    assert_clean(tmp_path)


def test_a_folder_made_for_the_lock_alone_is_removed(tmp_path):
    with locked(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()


def write_half(path, error):
    with atomic(path) as part:
        part.write_text("half")
        raise error


def test_an_interrupted_write_leaves_nothing(tmp_path):
    for error in (KeyboardInterrupt, OSError(28, "No space left on device")):
        with pytest.raises((KeyboardInterrupt, OSError)):
            write_half(tmp_path / "a.json", error)
        assert not list(tmp_path.iterdir())
    (tmp_path / "a.json.123-0123abcd.part").write_text("of a killed process")
    (tmp_path / "mine.part").write_text("a user's")
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.part"]


@pytest.mark.slow
def test_a_full_disk_ends_in_one_sentence_and_the_run_resumes(undisturbed, tmp_path, changes):
    """The disk is full when the second checkpoint's optimizer is written."""
    done = run("train", changes, tmp_path / "run", code=FULL_DISK + ENTRY)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "run") in [line for line in done.stderr.splitlines() if line.strip()][-1]
    assert_clean(tmp_path)
    assert run("train", changes, tmp_path / "run", "--resume").returncode == 0
    assert_same(undisturbed, tmp_path / "run")


@pytest.mark.parametrize("output", ["/proc/nowhere/run", "/dev/null/run"])
def test_a_read_only_folder_is_one_sentence(changes, capsys, output):
    """Folders in which not even root can write."""
    sets = [word for change in changes for word in ("--set", change)]
    assert main(["train", "folder", *sets, "--output", output]) == 2
    assert capsys.readouterr().err.strip().startswith(f"muonssm train: {os.path.dirname(output)}")


@pytest.mark.parametrize("name", ["../../x", "a/b", ".hidden", "", "a\nb", 3, ["a"]])
def test_a_name_must_be_a_name(name):
    with pytest.raises(ValueError, match="name must be made of letters"):
        Recipe.from_dict({**Recipe.load("watch").to_dict(), "name": name})


def test_nothing_of_set_vanishes():
    for text in ("5\nfoo = 3", "5 # five", "5\n[other]", "5\n# five", "2024-01-01"):
        with pytest.raises(ValueError, match=re.escape(f"training.epochs must be an integer >= 1, got {text!r}")):
            Recipe.load("watch", [f"training.epochs={text}"])
    assert Recipe.load("watch", ["training.epochs= 5 "]).training.epochs == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"task = 3\n", "task must be one of"),
        (b"task = []\n", "task must be one of"),
        (b"task = 'activity'\ntraining = [1]\n", "training must be a section"),
        (b"task = 'activity'\n[training]\nepochs = 2024-01-01\n", "training.epochs must be text, a number"),
        (b"task = 'activity'\n[data]\nsource = 'folder'\nroot = 5\n", "data.root must be text, got 5"),
        (b"task = 'activity'\n[data]\nlength = 1000001\n", "data.length must be 1000000 or less .*MAX_LENGTH"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"#" * (1 << 20) + b"#", "RECIPE must have at most"),
        (b"task = 'activity'\n[training]\nepochs = 1" + b"0" * 30, r"training.epochs must be .* at most 2\*\*63 - 1"),
        (b"task = 'activity'\n[training]\nclip = 1" + b"0" * 400, "training.clip must be a finite"),
        (b"task = 'activity'\n[training]\nlearning_rate = 1e300", "training.learning_rate must be a number in"),
        (b"task = 'activity'\n[training]\nweight_decay = 1e39", "training.weight_decay must be a number in"),
        (b"task = 'activity'\n[training]\nseed = 4294967296\n", "training.seed must be an integer in 0 to 4294967295"),
    ],
)
def test_wrong_recipe_files_are_refused(tmp_path, text, message):
    (tmp_path / "a.toml").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        Recipe.load(str(tmp_path / "a.toml"))


def test_a_recipe_is_a_regular_file(tmp_path):
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in ("fifo.toml", "folder.toml"):
        with pytest.raises(ValueError, match=r"RECIPE must be a \.toml file"):
            Recipe.load(str(tmp_path / name))


@pytest.mark.parametrize("text", ['{"a', "[1]", '{"test": {"loss": NaN}}', '{"test": 3}', "{}", "\xff"])
def test_a_damaged_metrics_file_is_named(tmp_path, text):
    (tmp_path / "metrics.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"metrics\.json"):
        RunFolder(tmp_path).read("metrics.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [("history.json", "{}"), ("history.json", '[{"loss": "x"}]'), ("versions.json", "3"), ("metadata.json", "[]")],
)
def test_damaged_files_of_a_run_are_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        RunFolder(tmp_path).read(name)
    with pytest.raises(ValueError, match="is not there"):
        read_json(tmp_path / "nosuch.json")


@pytest.mark.parametrize(
    "variables", [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "x"}]
)
def test_a_rank_without_torchrun_is_refused(monkeypatch, capsys, variables, tmp_path):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"RANK.*WORLD_SIZE"):
        processes()
    assert main(["train", "recall", "--output", str(tmp_path / "run")]) == 2
    assert "RANK" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_with_a_finite_score_can_have_diverged():
    assert why_diverged([{"loss": 1.0, "step": 1}], {"w": torch.ones(2)}) is None
    assert "at step 2" in str(why_diverged([{"loss": float("nan"), "step": 2}]))
    assert "weights w" in str(why_diverged([], {"w": torch.tensor([1.0, float("inf")])}))
    recipe = Recipe.load("recall")
    scores = dict.fromkeys([metric.name for metric in recipe.task.metrics], 0.0)
    runs = (ComparedRun("plain", 0, 0, "a", scores), ComparedRun("muon", 0, 0, "b", scores, {}, "the loss was NaN"))
    result = Comparison("title", recipe.task.metrics, recipe.to_dict(), 1, 1, None, runs)
    assert diverged(result) == ["1 of 1 runs of muon diverged: the loss was NaN"]
    assert result.difference("muon", recipe.task.metrics[0].name).pairs == 0
    assert re.search(r"muon +diverged", table(result))
    assert Comparison.from_dict(result.to_dict()).runs[1].diverged


def test_a_pipe_is_never_opened_as_weights_or_for_its_checksum(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe must be a regular file, got a pipe"):
        RunFolder(tmp_path).load_weights(torch.nn.Linear(2, 2), tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe must be a regular file, got a pipe"):
        checksum(tmp_path / "pipe")


def test_scores_that_a_task_needs_are_checked_where_metrics_are_read(tmp_path, capsys):
    recipe = Recipe.load("recall")
    folder = RunFolder(tmp_path)
    folder.begin("recipe.json", recipe.to_dict())
    names = [metric.name for metric in recipe.task.metrics]
    for test in ({}, {"loss": 1.0}, dict.fromkeys(names, "x")):
        (tmp_path / "metrics.json").write_text(json.dumps({"test": test, "validation": dict.fromkeys(names, 1.0)}))
        assert main(["train", "recall", "--output", str(tmp_path), "--resume"]) == 2
        assert re.search(rf"metrics\.json is damaged: test.* {names[0]}|test\.{names[0]}", capsys.readouterr().err)


@pytest.mark.slow
def test_weights_with_a_tensor_missing_or_of_another_shape_are_refused(undisturbed, tmp_path):
    folder, weights = RunFolder(undisturbed), load_file(undisturbed / "model.safetensors")
    _, _, model = folder.load_model()
    missing = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
    for wrong in (missing, {**weights, "head.weight": torch.zeros(1, 1)}):
        save_file(wrong, tmp_path / "wrong.safetensors")
        with pytest.raises(ValueError, match=r"wrong\.safetensors cannot be loaded.*head\.weight"):
            folder.load_weights(model, tmp_path / "wrong.safetensors")


def test_a_comparison_that_is_damaged_is_named(tmp_path, capsys):
    for content in ({}, {"metrics": [], "runs": [{"variant": 3}]}, {"metrics": 3, "runs": []}):
        (tmp_path / "comparison.json").write_text(json.dumps(content))
        assert main(["report", str(tmp_path)]) == 2
        assert "comparison.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("basic_ios::clear: iostream error"),
        RuntimeError("[enforce fail at inline_container.cc:664] ."),
        Exception("No space left on device (os error 28)"),
    ],
)
def test_errors_of_libraries_that_cannot_write_name_the_file(tmp_path, error):
    with pytest.raises(OSError, match=r"cannot be written .*weights") as found, atomic(tmp_path / "weights"):
        raise error
    assert str(tmp_path / "weights") in str(found.value)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_keeps_its_error_prints_no_traceback(monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    class Writer(threading.Thread):
        def __init__(self, keeps):
            super().__init__()
            self.keeps, self.exception = keeps, None

        def run(self):
            try:
                raise OSError(28, "No space left on device")
            except OSError as error:
                self.exception = error if self.keeps else None
                raise

    with hide_kept_thread_errors():
        for keeps in (True, False):
            thread = Writer(keeps)
            thread.start()
            thread.join()
    assert [found.thread.keeps for found in printed] == [False]
