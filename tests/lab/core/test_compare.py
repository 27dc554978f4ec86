"""Plain against Muon: pairs, intervals, resuming, the peer on the same windows, and the page."""

from __future__ import annotations

import re

import pytest

from muonssm.cli import main
from muonssm.lab.activity.paper import published
from muonssm.lab.core.compare import Interval, Trial, compare, summary, table
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder


def test_the_interval_is_students():
    """Differences 1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.3027, so 2 -+ 4.3027 / sqrt(3)."""
    interval = Interval.of([1.0, 2.0, 3.0])
    assert (interval.low, interval.high) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert str(interval) == "+2.00 [-0.48, +4.48]"
    assert str(Interval.of([0.5])) == "+0.50 (one pair: no interval)"


def test_differences_are_taken_pair_by_pair():
    recipe = Recipe.load("watch")
    scores = {("plain", 0): 50.0, ("plain", 1): 90.0, ("muon", 0): 52.0, ("muon", 1): 91.0}
    names = ("accuracy", "precision", "recall", "f1")
    trials = [Trial(k, 0, f, "", dict.fromkeys(names, v)) for (k, f), v in scores.items()]
    result = summary(recipe, trials[::-1])
    assert result["kinds"]["muon"]["f1"]["mean"] == pytest.approx(71.5)
    assert result["differences"]["muon"]["accuracy"]["mean"] == pytest.approx(1.5)
    assert result["differences"]["muon"]["accuracy"]["pairs"] == 2
    assert "+1.50" in table(result)
    assert result["paper"] == {}


def test_the_papers_figures_stand_beside():
    figures = published(Recipe.load("mmact", ["model.backbone=longhorn", "data.root=somewhere"]).task)
    assert figures["muon"]["accuracy"] == 74.40
    assert figures["plain"]["f1"] == 73.76
    assert published(Recipe.load("watch").task) == {}


@pytest.mark.slow
def test_compare_makes_pairs_a_table_and_a_page(tmp_path, changes, capsys):
    output = tmp_path / "compare"
    command = ["compare", "folder", "--output", str(output), "--seeds", "2", "--folds", "2"]
    for change in [*changes, "training.epochs=2"]:
        command += ["--set", change]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert re.search(r"muon minus plain, accuracy: .*over 4 paired runs", text)
    record = RunFolder(output).read("comparison.json")
    assert [(t["kind"], t["seed"], t["fold"]) for t in record["trials"]] == [
        (kind, seed, fold) for fold in (0, 1) for seed in (0, 1) for kind in ("plain", "muon")
    ]
    recipes = [RunFolder(output / f"{kind}-seed1-fold0").read("recipe.json") for kind in ("plain", "muon")]
    assert {key for key in recipes[0] if recipes[0][key] != recipes[1][key]} == {"muon"}
    metadata = [RunFolder(output / f"{kind}-seed1-fold1").read("metadata.json") for kind in ("plain", "muon")]
    assert metadata[0] == metadata[1]
    page = (output / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 6  # means, three curves, two matrices
    assert "http" not in page
    for run in record["trials"]:
        metrics = output / run["folder"] / "metrics.json"
        before = metrics.stat().st_mtime_ns
        assert before > 0
    assert main(command) == 2
    assert "has a run already" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert metrics.stat().st_mtime_ns == before


def test_bad_comparisons_say_what_is_wrong(tmp_path):
    recipe = Recipe.load("watch")
    for arguments, message in (
        ({"seeds": 0}, "--seeds is 0; it may be 1 or more"),
        ({"folds": 9}, "--folds is 9; it may be 1 to 5, the recipe's data.folds"),
        ({"recipe": Recipe.load("folder", [f"data.root={tmp_path}"]), "folds": 2}, "whose test part never changes"),
        ({"against": "svm"}, "--against is 'svm'; it may be one of minirocket"),
    ):
        with pytest.raises(ValueError, match=message):
            compare(**{"recipe": recipe, "output": tmp_path / "none", **arguments})
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_minirocket_sees_exactly_the_same_windows(tmp_path, changes, monkeypatch):
    """aeon's classifier on the windows of the run: its arrays are the data's, and its scores stand in the table."""
    from aeon.classification.convolution_based import MiniRocketClassifier

    seen = {}
    fit, predict = MiniRocketClassifier.fit, MiniRocketClassifier.predict
    monkeypatch.setattr(MiniRocketClassifier, "fit", lambda s, X, y: seen.update(fit=(X, y)) or fit(s, X, y))
    monkeypatch.setattr(MiniRocketClassifier, "predict", lambda s, X: seen.update(test=X) or predict(s, X))
    recipe = Recipe.load("folder", [*changes, "training.epochs=1"])
    result = compare(recipe, tmp_path / "run", against="minirocket")
    data = recipe.task.load_data()
    assert (seen["fit"][0] == data.train.windows.x.mT.numpy()).all()
    assert (seen["fit"][1] == data.train.windows.y.numpy()).all()
    assert (seen["test"] == data.test.windows.x.mT.numpy()).all()
    assert result["kinds"]["minirocket"]["accuracy"]["mean"] > 60
    assert "minirocket minus plain" in table(result)
    seen.clear()
    assert compare(recipe, tmp_path / "run", against="minirocket", resume=True) == result
    assert not seen
