"""`muonssm analyze` on small runs, its studies, and the arithmetic of paired comparisons."""

from __future__ import annotations

import argparse
import json
import math
from types import SimpleNamespace

import pytest
import torch

from muonssm.lab.analysis import analyze, studies
from muonssm.lab.analysis.analyses import ANALYSES, study_recipe
from muonssm.lab.analysis.commands import add_commands
from muonssm.lab.analysis.convergence import analyze_convergence, steps_to_loss, steps_to_target
from muonssm.lab.analysis.gradient_analysis import scores_every_step
from muonssm.lab.analysis.intervals import format_interval, format_spread, is_clear, paired_difference, paired_ratio
from muonssm.lab.analysis.per_run import PerRun
from muonssm.lab.analysis.result import Result
from muonssm.lab.analysis.scaling import random_batch
from muonssm.lab.analysis.variants import (
    GAMMAS,
    RECOMMENDED,
    TAUS,
    grid_name,
    run_folders,
    variant_recipe,
)
from muonssm.lab.core.command_table import CommandTable
from muonssm.lab.core.compare import compare
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.parallel_runs import train_all
from muonssm.lab.core.recipe import Recipe, changed
from muonssm.lab.core.registry import task_class, task_registry
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.scorer import IGNORED
from muonssm.lab.core.task import Task
from muonssm.lab.core.trainer import train
from muonssm.lab.core.variants import VARIANTS
from muonssm.ops import Muon

from ..report import runs

TINY = ["training.epochs=1", "data.length=24", "model.d_model=8", "model.d_state=4", "training.snapshots=true"]


def run_command(*arguments):
    """Run a command of the analysis room as the command line does."""
    parser = argparse.ArgumentParser()
    add_commands(CommandTable(parser))
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


@pytest.fixture(scope="module")
def compared(tmp_path_factory, changes):
    """The folder of a comparison over two seeds."""
    output = tmp_path_factory.mktemp("compared") / "run"
    compare(Recipe.load("folder", [*changes, *TINY, "training.epochs=2"]), output, seeds=2)
    return output


def test_steps_to_a_loss_are_interpolated():
    curve = [(10, 2.0), (20, 1.0), (30, 1.5), (40, 0.5)]
    assert steps_to_loss(curve, 1.5) == 15
    assert steps_to_loss(curve, 2.5) == 10  # nothing is known before the first validation
    assert steps_to_loss(curve, 0.75) == 37.5
    assert steps_to_loss(curve, 0.4) is None


def test_the_target_is_a_loss_that_both_runs_reach():
    plain, muon = [(10, 2.0), (20, 1.0)], [(10, 1.5), (20, 0.5)]
    assert steps_to_target(plain, muon) == (1.0, 20, 15)  # plain ends at 1.0, which Muon passes halfway
    assert steps_to_target(muon, plain) == (1.0, 15, 20)


def test_paired_differences_and_ratios():
    difference = paired_difference({0: 3.0, 1: 5.0, 2: None}, {0: 1.0, 1: 1.0, 2: 1.0})
    assert (difference.mean, difference.pairs) == (3.0, 2)
    assert difference.high == pytest.approx(3.0 + 12.7062 * math.sqrt(2) / math.sqrt(2), rel=1e-4)  # t, one degree
    assert not is_clear(difference)
    assert paired_ratio({0: 8.0, 1: 2.0}, {0: 1.0, 1: 1.0}).mean == pytest.approx(4.0)
    assert format_interval(paired_difference({0: 1.5}, {0: 1.0})) == "+0.50 (one pair: no interval)"
    assert "unknown" in format_interval(paired_difference({0: None}, {0: 1.0}))
    assert format_spread([1.0, 3.0]) == "2.00 ± 1.41"
    assert format_spread([]) == "diverged"


def test_values_per_run_are_paired_by_seed_and_fold():
    values = PerRun({("plain", 0, 0): 1.0, ("plain", 0, 1): 2.0, ("muon", 0, 1): 5.0})
    assert values.first == 1.0
    assert values.all == [1.0, 2.0, 5.0]
    assert values.of("plain") == [1.0, 2.0]
    assert values.by_pair("muon") == {(0, 1): 5.0}
    assert values.map(lambda x: 2 * x).by_pair("plain") == {(0, 0): 2.0, (0, 1): 4.0}


def test_variants_differ_in_the_memory_rule_alone():
    recipe = Recipe.load("watch-small")
    rules = {name: variant_recipe(recipe, name, 2).task.muon for name in VARIANTS}
    assert rules["plain"] == rules["doubled"] == Muon.off()
    assert rules["muon"] == Muon()
    assert (rules["unnormalized"].normalization, rules["unnormalized"].gamma) == (None, 0.9)
    assert (rules["frobenius"].normalization, rules["five"].ns_steps) == ("frobenius", 5)
    assert variant_recipe(recipe, "doubled", 0).task.model.d_state == 2 * recipe.task.model.d_state
    point = variant_recipe(recipe, grid_name(0.95, 1.2), 3)
    assert (point.task.muon.gamma, point.task.muon.tau, point.task.muon.tau_position) == (0.95, 1.2, "outside")
    assert point.training.seed == 3
    assert len(GAMMAS) * len(TAUS) == 36
    assert len(RECOMMENDED) == 12
    with pytest.raises(ValueError, match="doubled state"):
        variant_recipe(Recipe.load("vision-demo"), "doubled", 0)


def test_studies_train_a_recipe_of_the_size_that_its_task_chooses(changes):
    def chosen(recipe, metadata, *changes):
        experiment = SimpleNamespace(recipe=recipe, metadata=lambda: metadata)
        return study_recipe(experiment, changes)

    small = Recipe.load("watch-small")
    assert chosen(Recipe.load("watch"), {"rate": 50.0}).to_dict() | {"name": ""} == small.to_dict() | {"name": ""}
    tiny = Recipe.load("folder", changes)
    assert chosen(tiny, {"rate": 50.0}).task == tiny.task  # is smaller already
    other = Recipe.load("vision-demo")
    assert chosen(other, {}) == other
    assert chosen(other, {}, "training.seed=7").training.seed == 7


def test_every_task_lists_analyses_that_exist():
    for name in task_registry():
        listed = task_class(name).analyses
        assert listed
        assert set(listed) <= set(ANALYSES)


def test_whether_the_loss_scores_every_step():
    assert scores_every_step({"labels": torch.tensor([0, 1])})  # one class per sequence
    assert scores_every_step({"labels": torch.tensor([[0, 1], [2, 3]])})  # one token per step
    assert not scores_every_step({"labels": torch.tensor([[IGNORED, 1], [IGNORED, 3]])})  # answers at the end


@pytest.mark.slow
def test_studies_reuse_the_runs_of_a_comparison(compared, tmp_path):
    recipe = Experiment.read(compared).recipe
    folders = run_folders(recipe, ["plain", "muon", "five"], 3, compared, tmp_path)
    assert folders["plain", 1] == compared / "plain-seed1-fold0"
    assert folders["muon", 0] == compared / "muon-seed0-fold0"
    assert folders["muon", 2] == tmp_path / "muon-seed2"  # the comparison has no such seed
    assert folders["five", 0] == tmp_path / "five-seed0"
    other = changed(recipe, ["training.epochs=3"])
    assert run_folders(other, ["plain"], 1, compared, tmp_path)["plain", 0] == tmp_path / "plain-seed0"


@pytest.mark.slow
def test_parallel_runs_train_resume_and_name_the_run_that_fails(tmp_path, changes):
    recipe = Recipe.load("folder", [*changes, *TINY])
    jobs = {tmp_path / name: variant_recipe(recipe, name, 0) for name in ("plain", "muon")}
    metrics = train_all(jobs, "test", workers=2)
    alone = train(jobs[tmp_path / "muon"], tmp_path / "alone")
    assert metrics[tmp_path / "muon"]["validation"]["loss"] == pytest.approx(alone["validation"]["loss"], rel=1e-4)
    before = (tmp_path / "muon" / "metrics.json").stat().st_mtime_ns
    train_all(jobs, "test")
    assert (tmp_path / "muon" / "metrics.json").stat().st_mtime_ns == before
    (tmp_path / "bad").write_text("a file where a folder should be")
    with pytest.raises(ValueError, match="1 of 1 runs failed, bad first"):
        train_all({tmp_path / "bad": changed(recipe, ["training.learning_rate=1e-3"])}, "test")


@pytest.mark.slow
def test_all_analyses_of_a_comparison(compared, monkeypatch, capsys):
    monkeypatch.setattr(studies, "GAMMAS", (0.0, 0.9))
    monkeypatch.setattr(studies, "TAUS", (0.6, 1.2))
    monkeypatch.setattr(studies, "RECOMMENDED", {(0.9, 0.6)})
    monkeypatch.setattr("muonssm.lab.analysis.scaling.LENGTHS", (8, 16))
    monkeypatch.setattr(task_class("activity"), "shrink", Task.shrink)  # so that runs of the comparison are reused
    assert run_command("analyze", str(compared), "--seeds", "2") == 0
    printed = capsys.readouterr().out
    folder = compared / "analysis"
    for name in ANALYSES:
        assert name in printed
        result = json.loads((folder / f"{name}.json").read_text())
        assert result["found"]
        assert result["figures"]
        assert (folder / f"{name}-1.svg").read_text().startswith("<svg xmlns")
    spectrum = json.loads((folder / "spectrum.json").read_text())
    assert len(spectrum["figures"]) == 2  # two layers
    assert spectrum["data"]["plain over muon, layer 1"]["pairs"] == 2
    ablation = json.loads((folder / "ablation.json").read_text())
    logs = ablation["data"]["geometry"]["log10 of condition"]
    differences = [logs[f"muon-seed{seed}"] - logs[f"frobenius-seed{seed}"] for seed in (0, 1)]
    mean = ablation["data"]["log10 of condition, muon minus frobenius"]["mean"]
    assert mean == pytest.approx(sum(differences) / 2)
    gradients = json.loads((folder / "gradients.json").read_text())
    snapshots = gradients["data"]["map of plain"]["training"]
    assert snapshots[0] == "0"
    assert len(snapshots) == 3  # the start and two epochs
    sensitivity = json.loads((folder / "sensitivity.json").read_text())
    assert sensitivity["tables"][0]["rows"][0][4].endswith("/1)")
    scores = sensitivity["data"]["scores"]["test"]
    gains = [scores[f"g0.9-t0.6-seed{seed}"] - scores[f"plain-seed{seed}"] for seed in (0, 1)]
    assert sensitivity["data"]["range minus plain"]["mean"] == pytest.approx(sum(gains) / 2)
    deviation = abs(scores["g0.9-t0.6-seed0"] - scores["g0.9-t0.6-seed1"]) / 2**0.5  # of two runs
    assert sensitivity["data"]["chance"] == pytest.approx({"one run": deviation, "mean": deviation / 2**0.5})
    assert (compared / "report.html").is_file()
    trained = {path.name for path in (folder / "runs").iterdir()}
    assert trained == {f"{n}-seed{s}" for n in ("unnormalized", "frobenius", "five", "doubled", "g0-t0.6", "g0-t1.2",
                                                 "g0.9-t0.6", "g0.9-t1.2") for s in (0, 1)}  # fmt: skip
    kept = dict(analyze(compared, names=("ablation", "rank"), seeds=2, resume=True))
    assert list(kept) == ["rank", "ablation"]  # in the order of the table
    assert all("kept" in sentence for sentences in kept.values() for sentence in sentences)


@pytest.mark.slow
def test_analyses_compare_every_variant_with_plain(tmp_path, changes, monkeypatch):
    monkeypatch.setattr("muonssm.lab.analysis.scaling.LENGTHS", (8, 16))
    names = ("plain", "residual-per-head", "doubled")
    compare(Recipe.load("folder", [*changes, *TINY]), tmp_path / "run", variants=names, seeds=2)
    wanted = ("spectrum", "rank", "gradients", "truncation", "memory", "convergence", "scaling")
    sentences = dict(analyze(tmp_path / "run", names=wanted))
    for analysis in wanted:
        for name in names[1:]:
            if analysis != "memory":
                assert any(name in sentence for sentence in sentences[analysis]), (analysis, name)
        content = json.loads((tmp_path / "run" / "analysis" / f"{analysis}.json").read_text())
        assert all(name in json.dumps(content["data"]) for name in names)
    convergence = json.loads((tmp_path / "run" / "analysis" / "convergence.json").read_text())
    assert convergence["data"]["plain over doubled, steps"]["pairs"] == 2
    assert [row[0] for row in convergence["tables"][0]["rows"]] == [
        "plain, paired with residual-per-head", "residual-per-head", "plain over residual-per-head",
        "plain, paired with doubled", "doubled", "plain over doubled",
    ]  # fmt: skip


def test_runs_without_a_validation_loss_converge_by_their_score(tmp_path):
    """Plain reaches 90% at step 30, the other variant at step 15, between two validations; a third never."""
    curves = {"plain": (20, 50, 90), "paper": (80, 100, 100), "gated": (10, 10, 10)}
    runs.make_comparison(tmp_path / "run", Recipe.load("recall"), variants=tuple(curves))
    for variant, scores in curves.items():
        for folder in (tmp_path / "run").glob(f"{variant}-seed*"):
            rows = [{"step": 10 * (i + 1), "epoch": i, "validation_accuracy": score} for i, score in enumerate(scores)]
            (folder / "history.json").write_text(json.dumps(rows))
    result = analyze_convergence(Experiment.read(tmp_path / "run"))
    assert result.title == "Steps to the same validation accuracy"
    pairs = result.data["steps of each pair, paper"].values()
    assert all(pair == {"target": 10, "plain": 30, "other": 15} for pair in pairs)
    assert result.data["plain over paper, steps"]["mean"] == pytest.approx(2.0)
    counts = len(pairs)
    assert [row[1] for row in result.tables[1]["rows"]] == [f"{n} of {counts}" for n in (counts, counts, 0)]
    assert result.data["steps to 90%, paper"] == [15.0] * counts
    assert result.tables[1]["rows"][2][2] == "-"


@pytest.mark.slow
def test_a_single_run_names_what_it_lacks(tmp_path, changes):
    train(Recipe.load("folder", [*changes, *TINY, "training.snapshots=false"]), tmp_path / "run")
    sentences = dict(analyze(tmp_path / "run", names=("spectrum", "gradients")))
    assert "one row" in sentences["gradients"][0]
    with pytest.raises(ValueError, match=r"--what must be .*, got 'convergence': .*comparison"):
        dict(analyze(tmp_path / "run", names=("convergence",)))


def test_the_run_must_exist(tmp_path):
    with pytest.raises(ValueError, match="RUN must be"):
        run_command("analyze", str(tmp_path / "none"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"names": ("spektrum",)}, "--what must be one of spectrum, rank"),
        ({"seeds": 0}, "--seeds must be"),
        ({"workers": 0}, "--workers must be"),
        ({"changes": ("model.depth=3",)}, "key of model must be .*'depth'"),
    ],
)
def test_arguments_are_checked(compared, arguments, message):
    with pytest.raises(ValueError, match=message):
        list(analyze(compared, **arguments))


@pytest.mark.slow
def test_an_analysis_must_apply_to_the_task_unless_it_trains(compared, monkeypatch):
    monkeypatch.setattr(task_class("activity"), "analyses", ("rank",))
    with pytest.raises(ValueError, match=r"--what must be one of rank, ablation, .*, got 'scaling'"):
        list(analyze(compared, names=("scaling",)))
    monkeypatch.setitem(
        ANALYSES, "capacity", ANALYSES["capacity"]._replace(run=lambda study: Result("capacity", "", ""))
    )
    assert dict(analyze(compared, names=("capacity",))) == {"capacity": []}


def test_random_batches_follow_the_metadata():
    metadata = {"channels": ["a", "b"], "mean": [0, 0], "classes": ["x", "y", "z"]}
    batch = random_batch(metadata, 4, 10)
    assert batch["x"].shape == (4, 10, 2)
    assert batch["labels"].shape == (4,)
    assert random_batch({"vocab_size": 30}, 4, 10)["input_ids"].max() < 30


def test_a_result_is_written_completely(tmp_path):
    result = Result("rank", "Ranks", "the paper's claim", found=["one"])
    result.add_table("t", ["", "a"], [["b", "1"]])
    result.write(tmp_path)
    assert RunFolder(tmp_path).read("rank.json")["tables"][0]["rows"] == [["b", "1"]]
