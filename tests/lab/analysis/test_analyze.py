"""`muonssm analyze` on small runs of every kind, its studies, and the arithmetic of comparisons."""

from __future__ import annotations

import json
import math

import pytest

from muonssm.cli import main
from muonssm.lab.analysis import studies
from muonssm.lab.analysis.analyze import ANALYSES, Plan, analyze
from muonssm.lab.analysis.case import Case
from muonssm.lab.analysis.convergence import race, steps_to
from muonssm.lab.analysis.result import Result, is_clear, paired, ratio, say, spread
from muonssm.lab.analysis.scaling import noise
from muonssm.lab.analysis.variants import GAMMAS, RECOMMENDED, TAUS, VARIANTS, grid_name, jobs, small, variant
from muonssm.lab.core.compare import compare
from muonssm.lab.core.parallel_runs import train_all
from muonssm.lab.core.recipe import Recipe, changed
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train
from muonssm.ops import Muon

TINY = ["training.epochs=1", "data.length=24", "model.d_model=8", "model.d_state=4", "training.snapshots=true"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory, changes):
    """A comparison over two seeds."""
    output = tmp_path_factory.mktemp("compared") / "run"
    compare(Recipe.load("folder", [*changes, *TINY, "training.epochs=2"]), output, seeds=2)
    return output


def test_steps_to_a_loss_lie_on_straight_lines():
    curve = [(10, 2.0), (20, 1.0), (30, 1.5), (40, 0.5)]
    assert steps_to(curve, 1.5) == 15
    assert steps_to(curve, 2.5) == 10  # before the first validation nothing is known
    assert steps_to(curve, 0.75) == 37.5
    assert steps_to(curve, 0.4) is None


def test_a_race_ends_at_a_loss_that_both_reach():
    plain, muon = [(10, 2.0), (20, 1.0)], [(10, 1.5), (20, 0.5)]
    found = race(plain, muon)
    assert found == (1.0, 20, 15)  # plain never gets below 1.0; Muon is there halfway between 1.5 and 0.5
    assert race(muon, plain) == (1.0, 15, 20)


def test_pairs_and_ratios():
    ones, others = {0: 3.0, 1: 5.0, 2: None}, {0: 1.0, 1: 1.0, 2: 1.0}
    change = paired(ones, others)
    assert (change.mean, change.pairs) == (3.0, 2)
    assert change.high == pytest.approx(3.0 + 12.7062 * math.sqrt(2) / math.sqrt(2), rel=1e-4)  # t of one degree
    assert not is_clear(change)
    factor = ratio({0: 8.0, 1: 2.0}, {0: 1.0, 1: 1.0})
    assert factor.mean == pytest.approx(4.0)
    assert say(paired({0: 1.5}, {0: 1.0})) == "+0.50 (one pair: no interval)"
    assert "unknown" in say(paired({0: None}, {0: 1.0}))
    assert spread([1.0, 3.0]) == "2.00 ± 1.41"
    assert spread([]) == "diverged"


def test_variants_differ_in_the_memory_alone():
    recipe = Recipe.load("watch-small")
    found = {name: variant(recipe, name, 2).task.muon for name in VARIANTS}
    assert found["plain"] == found["double"] == Muon.off()
    assert found["muon"] == Muon()
    assert (found["momentum"].normalization, found["momentum"].gamma) == (None, 0.9)
    assert (found["frobenius"].normalization, found["five"].ns_steps) == ("frobenius", 5)
    assert variant(recipe, "double", 0).task.model.d_state == 2 * recipe.task.model.d_state
    point = variant(recipe, grid_name(0.95, 1.2), 3)
    assert (point.task.muon.gamma, point.task.muon.tau, point.task.muon.tau_position) == (0.95, 1.2, "outside")
    assert point.training.seed == 3
    assert len(GAMMAS) * len(TAUS) == 36
    assert len(RECOMMENDED) == 12
    with pytest.raises(ValueError, match=r"model.d_state, which a vision recipe does not have"):
        variant(Recipe.load("vision-demo"), "double", 0)


def test_a_study_of_a_large_recipe_is_small(changes):
    large = Recipe.load("watch")
    little = small(large, {"rate": 50.0})
    wanted = Recipe.load("watch-small")
    assert little.to_dict() | {"name": ""} == wanted.to_dict() | {"name": ""}
    tiny = Recipe.load("folder", changes)
    assert small(tiny, {"rate": 50.0}).task == tiny.task  # smaller already
    other = Recipe.load("vision-demo")
    assert small(other, {}) is other


@pytest.mark.slow
def test_runs_of_a_comparison_serve_a_study(compared, tmp_path):
    recipe = Case.of(compared).recipe
    found = jobs(recipe, ["plain", "muon", "five"], 3, compared, tmp_path)
    assert found["plain", 1] == compared / "plain-seed1-fold0"
    assert found["muon", 0] == compared / "muon-seed0-fold0"
    assert found["muon", 2] == tmp_path / "muon-seed2"  # a seed that the comparison does not have
    assert found["five", 0] == tmp_path / "five-seed0"
    other = changed(recipe, ["training.epochs=3"])
    assert jobs(other, ["plain"], 1, compared, tmp_path)["plain", 0] == tmp_path / "plain-seed0"


@pytest.mark.slow
def test_a_pool_trains_resumes_and_names_what_fails(tmp_path, changes):
    recipe = Recipe.load("folder", [*changes, *TINY])
    places = {tmp_path / name: variant(recipe, name, 0) for name in ("plain", "muon")}
    found = train_all(places, "test", workers=2)
    alone = train(places[tmp_path / "muon"], tmp_path / "alone")
    assert found[tmp_path / "muon"]["validation"]["loss"] == pytest.approx(alone["validation"]["loss"], rel=1e-4)
    before = (tmp_path / "muon" / "metrics.json").stat().st_mtime_ns
    train_all(places, "test")
    assert (tmp_path / "muon" / "metrics.json").stat().st_mtime_ns == before
    broken = changed(recipe, ["training.learning_rate=1e-3"])
    (tmp_path / "bad").write_text("a file where a folder should be")
    with pytest.raises(ValueError, match="1 of 1 runs failed, bad first"):
        train_all({tmp_path / "bad": broken}, "test")


@pytest.mark.slow
def test_everything_of_a_comparison(compared, monkeypatch, capsys):
    monkeypatch.setattr(studies, "GAMMAS", (0.0, 0.9))
    monkeypatch.setattr(studies, "TAUS", (0.6, 1.2))
    monkeypatch.setattr(studies, "RECOMMENDED", {(0.9, 0.6)})
    monkeypatch.setattr("muonssm.lab.analysis.scaling.LENGTHS", (8, 16))
    monkeypatch.setattr("muonssm.lab.analysis.analyze.small", lambda recipe, metadata: recipe)
    assert main(["analyze", str(compared), "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    place = compared / "analysis"
    for name in ANALYSES:
        assert name in said
        result = json.loads((place / f"{name}.json").read_text())
        assert result["found"]
        assert result["figures"]
        assert (place / f"{name}-1.svg").read_text().startswith("<svg xmlns")
    spectrum = json.loads((place / "spectrum.json").read_text())
    assert len(spectrum["figures"]) == 2  # two layers
    assert spectrum["data"]["plain over muon, layer 1"]["pairs"] == 2
    ablation = json.loads((place / "ablation.json").read_text())
    logs = ablation["data"]["geometry"]["log10 of condition"]
    steps = [logs[f"muon-seed{seed}"] - logs[f"frobenius-seed{seed}"] for seed in (0, 1)]
    assert ablation["data"]["log10 of condition, muon minus frobenius"]["mean"] == pytest.approx(sum(steps) / 2)
    gradients = json.loads((place / "gradients.json").read_text())
    rows = gradients["data"]["map of plain"]
    assert rows["training"][0] == "0"
    assert len(rows["training"]) == 3  # the start and two epochs
    map_ = json.loads((place / "sensitivity.json").read_text())
    assert map_["tables"][0]["rows"][0][4].endswith("/1)")
    scores = map_["data"]["scores"]["test"]
    gains = [scores[f"g0.9-t0.6-seed{seed}"] - scores[f"plain-seed{seed}"] for seed in (0, 1)]
    assert map_["data"]["range minus plain"]["mean"] == pytest.approx(sum(gains) / 2)
    chance = abs(scores["g0.9-t0.6-seed0"] - scores["g0.9-t0.6-seed1"]) / 2**0.5  # the deviation of two runs
    assert map_["data"]["chance"] == pytest.approx({"one run": chance, "mean": chance / 2**0.5})
    assert (compared / "report.html").is_file()
    trained = {path.name for path in (place / "runs").iterdir()}
    assert trained == {f"{n}-seed{s}" for n in ("momentum", "frobenius", "five", "double", "g0-t0.6", "g0-t1.2",
                                                 "g0.9-t0.6", "g0.9-t1.2") for s in (0, 1)}  # fmt: skip
    kept = dict(analyze(compared, Plan(what=("ablation", "rank"), seeds=2, resume=True)))
    assert kept == {"rank": ["kept, as it was there"], "ablation": ["kept, as it was there"]}


@pytest.mark.slow
def test_a_single_run_says_what_it_cannot_show(tmp_path, changes):
    train(Recipe.load("folder", [*changes, *TINY, "training.snapshots=false"]), tmp_path / "run")
    found = dict(analyze(tmp_path / "run", Plan(what=("spectrum", "gradients"))))
    assert "one row" in found["gradients"][0]
    with pytest.raises(ValueError, match="--what convergence cannot be done of this run: it needs a comparison"):
        dict(analyze(tmp_path / "run", Plan(what=("convergence",))))


def test_bad_arguments(tmp_path, capsys):
    assert main(["analyze", str(tmp_path / "none")]) == 2
    assert "may be the folder of a finished run, or of a comparison" in capsys.readouterr().err


@pytest.mark.slow
def test_bad_names_and_numbers(compared):
    for plan, message in (
        (Plan(what=("spektrum",)), "--what is 'spektrum'; it may be one of spectrum, rank"),
        (Plan(seeds=0), "--seeds is 0; it may be 1 or more"),
        (Plan(workers=0), "--workers is 0; it may be 1 or more"),
        (Plan(changes=("model.depth=3",)), "model has 'depth'"),
    ):
        with pytest.raises(ValueError, match=message):
            list(analyze(compared, plan))


def test_noise_of_any_length():
    metadata = {"channels": ["a", "b"], "mean": [0, 0], "classes": ["x", "y", "z"]}
    batch = noise(Recipe.load("watch").task, metadata, 4, 10)
    assert batch["x"].shape == (4, 10, 2)
    assert noise(Recipe.load("recall").task, {"vocab_size": 30}, 4, 10)["input_ids"].max() < 30


def test_a_result_is_whole_on_disk(tmp_path):
    result = Result("rank", "Ranks", "said", found=["one"])
    result.table("t", ["", "a"], [["b", "1"]])
    result.write(tmp_path)
    assert RunFolder(tmp_path).read("rank.json")["tables"][0]["rows"] == [["b", "1"]]
