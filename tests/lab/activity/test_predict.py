"""The commands `predict` and `stream`, on files and pipes."""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from muonssm.cli import main
from muonssm.lab.activity.commands import add_commands
from muonssm.lab.activity.predict import Prediction, file_samples, predict, stream
from muonssm.lab.core.command_table import CommandTable, select
from muonssm.lab.core.evaluate import evaluate
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train


@pytest.fixture(scope="module")
def run(tmp_path_factory, changes):
    output = tmp_path_factory.mktemp("runs") / "run"
    train(Recipe.load("folder", [*changes, "training.epochs=1"]), output)
    return output


def call(*arguments) -> None:
    """Run a command of this room; errors are raised, not printed."""
    parser = argparse.ArgumentParser()
    add_commands(CommandTable(parser))
    parsed = parser.parse_args([str(argument) for argument in arguments])
    function, extra = select(parsed)
    assert function(parsed) == 0
    assert extra == "activity"


def test_predict_and_stream_agree(run, recordings, capsys, monkeypatch):
    file = recordings / "0-fast-0.csv"

    def classes() -> list[list[str]]:
        """Start, end, class and probability of each printed line."""
        return [line.split()[:5] for line in capsys.readouterr().out.splitlines()]

    call("predict", run, file)
    predicted = classes()
    assert [line[0] for line in predicted] == ["0", "24", "48", "72", "96"]
    call("stream", run, file)
    text = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in text] == predicted
    assert all("us per sample" in line for line in text)
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text()))
    call("stream", run, "-")
    assert classes() == predicted
    rows = [line.split(",") for line in file.read_text().splitlines()]
    reversed_columns = "\n".join(",".join(["0.5" if i else "time", *row[::-1]]) for i, row in enumerate(rows))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" + reversed_columns))  # the header decides which column is which
    call("stream", run, "-")
    assert classes() == predicted


def test_a_run_can_be_evaluated_again(run):
    scores, before = evaluate(run)["test"], RunFolder(run).read("metrics.json")["test"]
    assert scores.pop("confusion") == before.pop("confusion")
    assert scores == pytest.approx(before)


def test_bad_files_and_folders_are_named(run, tmp_path):
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    with pytest.raises(ValueError, match=r"empty\.csv"):
        call("predict", run, empty)
    with pytest.raises(ValueError, match=r"RUN .*recipe\.json"):
        call("predict", tmp_path, empty)
    with pytest.raises(ValueError, match="must be a regular file, got a folder"):
        call("predict", run, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"root .*index\.csv"):
        train(Recipe.load("folder", [f"data.root={tmp_path}"]), tmp_path / "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2\n", r"3 numbers \(acc_x, acc_y, acc_z\), got 2 in sample 1"),
        ("1,2,3\n1,b,3\n", "finite numbers .* got '1,b,3'"),
        ("1,2,3\n1,nan,3\n", "finite numbers .* got '1,nan,3'"),
        ("1,2,3\n4,5,6\n", "48 or more samples, .* got 2"),
        ("acc_x,acc_y\n", "header .* acc_z"),
    ],
)
def test_bad_pipes_are_refused(run, monkeypatch, text, message):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    with pytest.raises(ValueError, match=message):
        call("stream", run, "-")


@pytest.mark.parametrize("value", ["1e39", "3e38"])
def test_no_probability_is_nan(run, recordings, tmp_path, monkeypatch, capsys, value):
    """A value that float32 cannot hold, or that overflows in the model, is an error that says where it is."""
    lines = (recordings / "0-fast-0.csv").read_text().splitlines()
    lines[20] = ",".join([value, *lines[20].split(",")[1:]])
    path = tmp_path / "large.csv"
    path.write_text("\n".join(lines))
    for command in ("predict", "stream"):
        with pytest.raises(ValueError, match=r"large\.csv .*'acc_x', got 1e\+39|values near those of the training"):
            call(command, run, path)
    monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text()))
    with pytest.raises(ValueError, match=r"finite numbers .*1e39|values near those of the training data"):
        call("stream", run, "-")
    assert "nan" not in capsys.readouterr().out


def test_a_model_without_a_finite_answer_is_an_error(run, recordings):
    recipe, metadata, model = RunFolder(run).load_model("activity")
    path, config = str(recordings / "0-fast-0.csv"), recipe.task.data
    with torch.no_grad():
        next(model.head.parameters()).fill_(float("inf"))
    with pytest.raises(ValueError, match=r"0-fast-0.csv, samples 0 to 47, must have values near"):
        predict(model, config, metadata, path)
    with pytest.raises(ValueError, match=r"stream up to sample 48 must have values near"):
        next(stream(model, config, metadata, file_samples(path, config, metadata)))


def test_a_line_that_does_not_end_is_refused(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("1" * 3_000_000))
    with pytest.raises(ValueError, match="a line must have 1000000 characters or less"):
        call("stream", run, "-")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"1,2,3\n\xff\n"), encoding="utf-8"))
    with pytest.raises(ValueError, match="a line must be text"):
        call("stream", run, "-")


def test_a_sample_that_is_not_finite_is_refused(run):
    recipe, metadata, model = RunFolder(run).load_model("activity")
    for value in (float("nan"), 1e39, 10**400):
        with pytest.raises(ValueError, match=r"finite numbers \(float32\), got .* in sample 1"):
            next(stream(model, recipe.task.data, metadata, [[0.0, value, 0.0]]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("std", [-1.0, 1.0, 1.0], r"std in .*metadata\.json must be a finite number > 0, got -1.0"),
        ("std", [0.0, 1.0, 1.0], r"std in .*metadata\.json must be a finite number > 0, got 0.0"),
        ("mean", [0.0], r"metadata\.json must have 3 numbers as mean, one per channel, got \[0.0\]"),
        ("mean", "abc", r"metadata\.json must have 3 numbers as mean, one per channel, got 'abc'"),
        ("classes", ["a", "a", "a"], r"metadata\.json must have different names as classes"),
        ("channels", [1, 2, 3], r"metadata\.json must have a list of names as channels"),
        ("rate", 0, r"rate in .*metadata\.json must be a finite number > 0, got 0"),
    ],
)
def test_metadata_that_would_change_the_answers_is_refused(run, tmp_path, capsys, field, value, message):
    copy = shutil.copytree(run, tmp_path / "run")
    content = json.loads((copy / "metadata.json").read_text())
    (copy / "metadata.json").write_text(json.dumps({**content, field: value}))
    assert main(["predict", str(copy), "recording.csv"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_weights_rounded_to_integers_are_refused(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    weights = {name: tensor.to(torch.int8) for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be loaded: .* must be a tensor of torch.float32"):
        RunFolder(copy).load_model("activity")


def test_control_characters_of_a_label_are_escaped():
    assert "\\x1b[31mwalk" in str(Prediction(0, 1, "\x1b[31mwalk", 1.0))
