"""Studies: a grid of comparisons, what holds over all pairs, the page, and resuming."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest

from muonssm.cli import main
from muonssm.lab.core.compare import ComparedRun, Comparison
from muonssm.lab.core.grid import Grid, GridResult, SignTest, run_grid
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.registry import recipe_files, study_files
from muonssm.lab.report.study_page import conclusion, score_rows, text_table, to_dict, write_study

NAMES = ("first", "second")


def make_grid(**changes):
    settings = {"name": "two", "title": "Which?", "recipes": NAMES, "backbones": ("mamba", "longhorn")}
    return Grid(**{**settings, "variants": ("plain", "paper"), "seeds": 2, **changes})


def make_result(gains):
    """A result from the gain of `paper` over plain, by recipe, backbone and seed."""
    recipe = Recipe.load("watch")
    names = [metric.name for metric in recipe.task.metrics]
    comparisons = {}
    for (name, backbone), pairs in gains.items():
        scores = {("plain", seed): 50.0 for seed in range(len(pairs))}
        scores |= {("paper", seed): 50.0 + gain for seed, gain in enumerate(pairs)}
        runs = tuple(
            ComparedRun(variant, seed, 0, f"{variant}-{seed}", dict.fromkeys(names, score) | {"loss": 1.0})
            for (variant, seed), score in scores.items()
        )
        content = recipe.to_dict()
        comparisons[name, backbone] = Comparison("t", recipe.task.metrics, content, len(pairs), 1, None, runs)
    validation = {(*cell, variant): 40.0 + i for i, cell in enumerate(gains) for variant in ("plain", "paper")}
    return GridResult(make_grid(), None, comparisons, validation)


GAINS = {
    ("first", "mamba"): [1.0, 2.0],
    ("first", "longhorn"): [0.0, 3.0],
    ("second", "mamba"): [2.0, -1.0],
    ("second", "longhorn"): [1.0, 4.0],
}


def test_differences_are_pooled_over_all_pairs_and_by_recipe():
    result = make_result(GAINS)
    assert result.differences("paper", "first") == [1.0, 2.0, 0.0, 3.0]
    assert result.interval("paper").mean == pytest.approx(1.5)
    assert result.interval("paper").pairs == 8
    assert result.interval("paper", "second").mean == pytest.approx(1.5)
    assert "8 pairs" in conclusion(result, "paper")
    assert score_rows(result)[0] == ["test accuracy, %", *NAMES]
    assert "6 better, 1 worse, 1 equal" in text_table(result)
    assert to_dict(result)["differences"]["paper"]["all"]["mean"] == pytest.approx(1.5)


def test_the_sign_test_is_the_binomial_one():
    """Six wins of seven: 2 (1 + 7) / 2^7 = 0.125. Where lower is better, wins are losses."""
    differences = [1.0, 2.0, 0.0, 3.0, 2.0, -1.0, 1.0, 4.0]
    assert SignTest.of(differences, True) == SignTest(6, 1, 1, pytest.approx(0.125))
    assert SignTest.of(differences, False) == SignTest(1, 6, 1, pytest.approx(0.125))
    assert SignTest.of([0.0], True).probability == 1.0


def test_the_model_is_chosen_by_validation_scores():
    assert make_result(GAINS).chosen("first") == ("longhorn", "plain")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"seeds": 0}, ValueError, "seeds must be"),
        ({"recipes": ()}, ValueError, "recipes and backbones must"),
        ({"recipes": "watch"}, TypeError, "recipes must be a list"),
        ({"backbones": ("mamba", "mamba")}, ValueError, "backbones must be different"),
        ({"variants": ("paper",)}, ValueError, "variants must have 'plain'"),
        ({"variants": ("plain", "none")}, ValueError, "--variants must be"),
        ({"changes": ("other:training.epochs=1",)}, ValueError, "NAME in --set .* must be"),
        ({"name": "../up"}, ValueError, "name must be"),
    ],
)
def test_wrong_settings_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        make_grid(**changes)


def test_files_of_studies_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"STUDY must be a \.toml file or one of"):
        Grid.load("nothing")
    path = tmp_path / "mine.toml"
    path.write_text('title = "t"\nrecipe = ["watch"]\n')
    with pytest.raises(ValueError, match=r"mine\.toml: a key must be one of .*, got 'recipe'"):
        Grid.load(str(path))
    path.write_text('title = "t"\nrecipes = ["watch"]\nbackbones = ["mamba"]\n')
    with pytest.raises(ValueError, match=r"mine\.toml: variants must be given, got none"):
        Grid.load(str(path))
    grids = [name for name, file in study_files().items() if "stages" not in tomllib.loads(file.read_text())]
    assert set(grids) >= {"activity", "demo"}
    for name in grids:
        assert set(Grid.load(name).recipes) <= set(recipe_files())


def test_changes_are_for_all_or_for_one_recipe_or_backbone(tmp_path):
    path = tmp_path / "mine.toml"
    changes = ["training.epochs=2", "watch-small:training.epochs=3", "mamba:training.epochs=4"]
    path.write_text(
        f'title = "t"\nrecipes = ["watch", "watch-small"]\nbackbones = ["mamba", "longhorn"]\n'
        f'variants = ["plain", "paper"]\nchanges = {changes}\n'
    )
    grid = Grid.load(str(path))
    epochs = {cell: grid.recipe(*cell).training.epochs for cell in grid.cells()}
    assert list(epochs.values()) == [4, 2, 4, 3]
    only = Grid.load(str(path), ["watch:training.epochs=5"], recipes=("watch",), backbones=("longhorn",))
    assert only.changes == ("training.epochs=2", "watch:training.epochs=5")
    with pytest.raises(ValueError, match=r"NAME in --set .* must be one of watch, longhorn, got 'mamba'"):
        Grid.load(str(path), ["mamba:training.epochs=5"], recipes=("watch",), backbones=("longhorn",))


@pytest.mark.parametrize("content", [b"a = " + b"[" * 100_000, b"\xff", b"#" * (1 << 21)])
def test_files_that_are_no_studies_are_named(tmp_path, capsys, content):
    (tmp_path / "mine.toml").write_bytes(content)
    assert main(["study", str(tmp_path / "mine.toml")]) == 2
    assert re.search(r"mine\.toml.* is not valid TOML|STUDY must have at most .*mine\.toml", capsys.readouterr().err)


def test_analyses_are_checked_before_anything_is_trained(tmp_path, changes, capsys):
    (tmp_path / "own.toml").write_text(
        'title = "t"\nrecipes = ["folder"]\nbackbones = ["mamba"]\nvariants = ["plain"]\nanalyses = ["spectra"]\n'
    )
    command = ["study", str(tmp_path / "own.toml"), "--output", str(tmp_path / "out")]
    assert main([*command, *(word for change in changes for word in ("--set", change))]) == 2
    assert "--analyses must be one of spectrum" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_study_whose_runs_all_diverged_says_so():
    result = make_result(GAINS)
    result = replace(result, validation=dict.fromkeys(result.validation))
    assert result.chosen("first") is None
    assert to_dict(result)["chosen"] == {"first": None, "second": None}
    assert "every run diverged" in text_table(result)


@pytest.mark.slow
def test_a_study_trains_compares_analyzes_and_resumes(tmp_path, changes, capsys):
    path = tmp_path / "own.toml"
    path.write_text(
        'title = "Which <rule>?"\nrecipes = ["folder"]\nbackbones = ["mamba", "longhorn"]\n'
        'variants = ["plain", "paper"]\nseeds = 2\nanalyses = ["spectrum", "convergence"]\n'
    )
    command = ["study", str(path), "--output", str(tmp_path / "out")]
    for change in [*changes, "training.epochs=1"]:
        command += ["--set", f"folder:{change}"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "paper" in text
    assert "over 4 pairs" in text
    page = (tmp_path / "out/report.html").read_text()
    assert "Which &lt;rule&gt;?" in page
    assert 'href="folder-mamba/report.html"' in page
    assert "plain over paper, layer 1" in page
    assert "plain over paper, steps" in page
    metrics = tmp_path / "out/folder-mamba/paper-seed1-fold0/metrics.json"
    before = metrics.stat().st_mtime_ns
    assert main(command) == 2
    assert "--output must be a free folder" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert metrics.stat().st_mtime_ns == before
    settings = tuple(f"folder:{change}" for change in [*changes, "training.epochs=1"])
    result = run_grid(Grid.load(str(path), changes=settings), tmp_path / "out", resume=True)
    assert write_study(result) == tmp_path / "out/report.html"
