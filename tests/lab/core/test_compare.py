"""Comparisons: pairs, intervals, resuming, a peer on the same data, and the page."""

from __future__ import annotations

import json
import re

import pytest
import torch

from muonssm import Muon
from muonssm.cli import main
from muonssm.lab.core.compare import ComparedRun, Comparison, Interval, Spread, compare, table
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.variants import VARIANTS, check_variants
from muonssm.models.language import MuonSSMForCausalLM


def test_the_interval_is_students():
    """Differences 1, 2, 3: mean 2, deviation 1, t(0.975, 2) = 4.3027, so 2 -+ 4.3027 / sqrt(3)."""
    interval = Interval.of([1.0, 2.0, 3.0])
    assert (interval.low, interval.high) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    assert str(interval) == "+2.00 [-0.48, +4.48]"
    assert str(Interval.of([0.5])) == "+0.50 (one pair: no interval)"


def test_a_spread_leaves_diverged_runs_out():
    assert str(Spread.of([70.0, None, 72.0])) == "71.00 ± 1.41"
    assert str(Spread.of([None])) == "diverged"
    assert str(Spread.of([70.0])) == "70.00"


def make_comparison(scores):
    """A comparison of `watch` from scores by variant and fold."""
    recipe = Recipe.load("watch")
    names = [metric.name for metric in recipe.task.metrics]
    runs = [
        ComparedRun(v, 0, fold, f"{v}-fold{fold}", dict.fromkeys(names, score) | {"loss": score})
        for (v, fold), score in scores.items()
    ]
    return Comparison(recipe.task.title, recipe.task.metrics, recipe.to_dict(), 1, 2, None, tuple(runs))


def test_differences_are_taken_pair_by_pair():
    scores = {("muon", 1): 91.0, ("muon", 0): 52.0, ("plain", 1): 90.0, ("plain", 0): 50.0}
    result = make_comparison(scores)
    assert result.spread("muon", "f1").mean == pytest.approx(71.5)
    assert result.difference("muon", "accuracy").mean == pytest.approx(1.5)
    assert result.difference("muon", "accuracy").pairs == 2
    assert "+1.50" in table(result)
    assert result.paper == {}


def test_a_pair_with_a_diverged_run_has_no_difference():
    result = make_comparison({("plain", 0): 50.0, ("muon", 0): None, ("plain", 1): 60.0, ("muon", 1): 61.0})
    assert result.difference("muon", "accuracy").pairs == 1
    assert "1 of 2 runs of muon diverged" in table(result)


def test_a_comparison_reads_back_from_json():
    result = make_comparison({("plain", 0): 50.0, ("muon", 0): 52.0})
    content = json.loads(json.dumps(result.to_dict()))
    assert Comparison.from_dict(content) == Comparison.from_dict(result.to_dict())
    assert content["differences"]["muon"]["accuracy"]["mean"] == 2.0
    assert content["means"]["plain"]["f1"] == {"mean": 50.0, "deviation": None}


def test_the_papers_scores_come_from_the_task():
    task = Recipe.load("mmact", ["model.backbone=longhorn", "data.root=somewhere"]).task
    scores = task.paper_scores({})
    assert scores["muon"]["accuracy"] == 74.40
    assert scores["plain"]["f1"] == 73.76
    assert Recipe.load("watch").task.paper_scores({}) == {}


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
    assert [(run["variant"], run["seed"], run["fold"]) for run in record["runs"]] == [
        (variant, seed, fold) for fold in (0, 1) for seed in (0, 1) for variant in ("plain", "muon")
    ]
    recipes = [RunFolder(output / f"{variant}-seed1-fold0").read("recipe.json") for variant in ("plain", "muon")]
    assert {key for key in recipes[0] if recipes[0][key] != recipes[1][key]} == {"muon"}
    metadata = [RunFolder(output / f"{variant}-seed1-fold1").read("metadata.json") for variant in ("plain", "muon")]
    assert metadata[0] == metadata[1]
    page = (output / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 6  # means, three curves, two matrices
    assert "://" not in page
    for run in record["runs"]:
        metrics = output / run["folder"] / "metrics.json"
        before = metrics.stat().st_mtime_ns
        assert before > 0
    assert main(command) == 2
    assert "--output must be a free folder" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    assert metrics.stat().st_mtime_ns == before


def test_bad_comparisons_say_what_is_wrong(tmp_path):
    recipe = Recipe.load("watch")
    for arguments, message in (
        ({"seeds": 0}, "--seeds must be .*, got 0"),
        ({"folds": 9}, "--folds must be .*, got 9"),
        ({"recipe": Recipe.load("folder", [f"data.root={tmp_path}"]), "folds": 2}, "--folds must be"),
        ({"against": "svm"}, "--against must be .*, got 'svm'"),
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
    assert result.spread("minirocket", "accuracy").mean > 60
    assert "minirocket minus plain" in table(result)
    seen.clear()
    assert compare(recipe, tmp_path / "run", against="minirocket", resume=True) == result
    assert not seen


@pytest.mark.parametrize(
    "model", [["model.backbone=mamba"], ["model.backbone=longhorn", 'model.mixer={form="diagonal"}']]
)
def test_a_variant_without_a_model_is_refused_before_any_is_trained(model, tmp_path):
    recipe = Recipe.load("recall", [*model, "data.vocabulary=64", "data.train_examples=8", "data.test_examples=8"])
    with pytest.raises(ValueError, match=r"--variants must be possible .*got 'gated': muon.beta_position"):
        compare(recipe, tmp_path / "run", variants=("plain", "gated"))
    assert not list((tmp_path / "run").glob("*-seed*"))


def test_several_variants_are_each_compared_with_plain():
    scores = {("plain", 0): 50.0, ("plain", 1): 60.0}
    scores |= {("residual", 0): 53.0, ("residual", 1): 62.0, ("doubled", 0): 50.0, ("doubled", 1): 61.0}
    result = make_comparison(scores)
    assert result.compared == ["residual", "doubled"]
    assert result.difference("residual", "accuracy").mean == pytest.approx(2.5)
    assert result.difference("doubled", "accuracy").mean == pytest.approx(0.5)
    text = table(result)
    assert "residual minus plain" in text
    assert "doubled minus plain" in text


def test_names_of_variants_are_checked_and_plain_comes_first():
    assert check_variants(["residual", "plain", "doubled"]) == ("plain", "residual", "doubled")
    with pytest.raises(ValueError, match=r"--variants must be .*got 'muno'"):
        check_variants(["plain", "muno"])
    with pytest.raises(ValueError, match=r"--variants must be different.*'plain' 2 times"):
        check_variants(["plain", "plain"])
    with pytest.raises(ValueError, match=r"--variants must be .*got none"):
        check_variants([])


def test_variants_differ_in_rule_and_learned_gamma_alone():
    recipe = Recipe.load("watch-small", ["model.backbone=gated_deltanet"])
    tasks = {name: recipe.variant(name, seed=3, fold=0).task for name in VARIANTS}
    assert tasks["plain"].muon == tasks["doubled"].muon == Muon.off()
    assert tasks["muon"].muon == tasks["paper"].muon == Muon()
    assert tasks["residual-per-step"].muon == Muon.residual()
    assert tasks["residual-per-step"].model.momentum == "per_step"
    assert tasks["gated"].muon == Muon.gated()
    assert tasks["gated"].model.momentum == "fixed"
    assert tasks["doubled"].model.d_state == 2 * recipe.task.model.d_state
    assert all(task.data == recipe.task.data for task in tasks.values())


@pytest.mark.parametrize("backbone", ["gated_deltanet", "longhorn", "mamba2", "momentum_deltanet"])
def test_a_doubled_state_has_twice_as_many_numbers(backbone):
    recipe = Recipe.load("recall", [f"model.backbone={backbone}", "data.vocabulary=64"])
    x = torch.randint(0, 64, (1, 8))
    sizes = []
    for name in ("plain", "doubled"):
        task = recipe.variant(name, seed=0, fold=0).task
        config = task.model.build(64, task.muon)
        cache = MuonSSMForCausalLM(config).eval()(x, use_cache=True).past_key_values
        sizes.append(sum(layer.recurrent_states[0].numel() for layer in cache.layers))
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.slow
def test_compare_trains_several_variants_and_reports_them(tmp_path, changes, capsys):
    changes = [f"--set={change}" for change in changes]
    folder = tmp_path / "several"
    names = "plain,residual-per-head,doubled"
    assert main(["compare", "folder", *changes, "--variants", names, "--output", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "residual-per-head minus plain" in printed
    content = json.loads((folder / "comparison.json").read_text())
    assert sorted(content["differences"]) == ["doubled", "residual-per-head"]
    page = (folder / "report.html").read_text()
    assert "plain against residual-per-head and doubled" in page
    assert "doubled minus plain" in page
