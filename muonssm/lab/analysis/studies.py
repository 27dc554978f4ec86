"""The analyses that train anew: `ablation`, `ns-steps`, `capacity` and `sensitivity`, over seeds, on all cores.

All take their runs from one folder of variants, so a variant that two of them need is trained once, and what is there
already, from an earlier study or in the comparison itself, is not trained again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muonssm.lab.core.parallel_runs import train_all
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.task import Metric
from muonssm.lab.report import figures

from .case import Case, batch_of
from .geometry import rank, spectrum
from .result import Result, mean_and_deviation, paired, say, spread, verdict
from .variants import GAMMAS, RECOMMENDED, TAUS, grid_name, jobs, variant

Scores = Mapping[tuple[str, int], float | None]  # by variant and seed
RANK_ITEMS = 16
TITLES = {
    "plain": "plain",
    "double": "plain, state doubled",
    "momentum": "momentum only",
    "frobenius": "momentum + Frobenius",
    "muon": "momentum + Newton-Schulz",
    "five": "five Newton-Schulz steps",
}
PAPER_ABLATION = (
    "On MMAct momentum alone has 72.04% validation accuracy and effective rank 12.98, with Frobenius normalisation "
    "72.53% and 13.34, with Newton-Schulz 74.67% and 16.62."
)
ABLATION = {  # the paper's table: validation accuracy and effective rank
    "momentum": ("72.04 ± 0.58", "12.98 ± 0.81"),
    "frobenius": ("72.53 ± 0.82", "13.34 ± 0.43"),
    "muon": ("74.67 ± 0.46", "16.62 ± 0.57"),
}
PAPER_STEPS = "One Newton-Schulz iteration is better than none and than five (MMAct; a figure without numbers)."
PAPER_CAPACITY = (
    "Doubling the state gives +0.41 (LongHorn) and +1.05 points (Mamba) on MMAct, Muon +1.93 and +3.18 over plain: "
    "capacity alone does not explain the gain."
)
PAPER_SENSITIVITY = (
    "Within gamma 0.8 to 0.99 and tau 0.6 to 1.0 (12 settings) accuracy varies by 0.27 to 0.72 points, and 67% to 100% "
    "of the settings are at least as good as plain LongHorn."
)
ALGEBRA = (
    "One Newton-Schulz step on a write of rank one is 0.701 times Frobenius normalisation, forward and backward: what "
    "these two show of each other is that factor, and chance."
)


@dataclass(frozen=True)
class Study:
    """What all studies of a run share.

    Attributes:
        case: the run.
        recipe: what is trained, at the size of the study.
        seeds: how many.
        workers: processes; None is one a core.
    """

    case: Case
    recipe: Recipe
    seeds: int
    workers: int | None = None

    @functools.cached_property
    def data(self) -> Any:
        """What is trained on."""
        return self.recipe.task.load_data()

    @property
    def metric(self) -> Metric:
        return self.recipe.task.metrics[0]

    @property
    def place(self) -> Path:
        return self.case.place / "runs"

    def train(self, names: Sequence[str], title: str) -> dict[tuple[str, int], Path]:
        """Trains what is not there; the folder of every variant and seed."""
        places = jobs(self.recipe, names, self.seeds, self.case.path, self.place)
        recipes = {place: variant(self.recipe, *key) for key, place in places.items()}
        train_all(recipes, title, self.workers)
        return places

    def scores(self, places: Mapping[Any, Path], part: str) -> dict[Any, float | None]:
        """The first score of every run."""
        return {key: RunFolder(path).read("metrics.json")[part][self.metric.name] for key, path in places.items()}

    def settings(self) -> dict[str, Any]:
        """As they are written beside results."""
        return {"seeds": self.seeds, "recipe": self.recipe.to_dict()}


def _by_seed(scores: Scores, name: str) -> dict[int, float | None]:
    return {seed: value for (its, seed), value in scores.items() if its == name}


def _values(scores: Scores, name: str) -> list[float]:
    return [value for value in _by_seed(scores, name).values() if value is not None]


def _compare(study: Study, result: Result, scores: Scores, pairs: Sequence[tuple[str, str]]) -> None:
    """Says one variant minus another, for each pair."""
    for one, other in pairs:
        change = paired(_by_seed(scores, one), _by_seed(scores, other))
        result.data[f"{one} minus {other}"] = vars(change)
        text = f"{TITLES[one]} minus {TITLES[other]}, {study.metric.title}: {say(change)}: {verdict(change)}."
        result.found.append(text[0].upper() + text[1:])


def _side_by_side(study: Study, result: Result, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> None:
    """Trains the variants; a table of both parts, a picture of the test part, and what differs there."""
    places = study.train(names, result.name)
    parts = {part: study.scores(places, part) for part in ("validation", "test")}
    head = ["", *(f"{part}, {study.metric.title}" + (", %" if study.metric.unit else "") for part in parts)]
    rows = [[TITLES[name], *(spread(_values(scores, name)) for scores in parts.values())] for name in names]
    result.table(f"Mean and deviation over {study.seeds} seeds", head, rows)
    shown = {TITLES[name]: mean_and_deviation(_values(parts["test"], name)) for name in names}
    result.figure("Test part", figures.bars(shown, study.metric.title))
    _compare(study, result, parts["test"], pairs)
    result.data["scores"] = _listed(parts)


def ablation(study: Study) -> Result:
    """Momentum only, with Frobenius normalisation, with Newton-Schulz: scores, rank of M, conditioning of S."""
    names = ("plain", "momentum", "frobenius", "muon")
    result = Result("ablation", "Three normalisations of the write", PAPER_ABLATION, settings=study.settings())
    places = study.train(names, "ablation")
    parts = {part: study.scores(places, part) for part in ("validation", "test")}
    geometry = {key: _geometry_of(study, path) for key, path in places.items()}
    ranks: Scores = {key: each.rank for key, each in geometry.items()}
    logs: Scores = {key: each.log_condition for key, each in geometry.items()}
    unit = ", %" if study.metric.unit else ""
    head = [
        "",
        *(f"{part}, {study.metric.title}{unit}" for part in parts),
        "effective rank of M",
        "log10 of S's condition",
    ]
    rows = [[TITLES[n], *(spread(_values(scores, n)) for scores in (*parts.values(), ranks, logs))] for n in names]
    paper = [["paper, MMAct: " + TITLES[name], accuracy, "", r, ""] for name, (accuracy, r) in ABLATION.items()]
    result.table(f"Mean and deviation over {study.seeds} seeds", head, rows, paper)
    for caption, scores, axis in (
        ("Validation", parts["validation"], f"{study.metric.title}{unit}"),
        ("Effective rank of M", ranks, "effective rank"),
        ("Condition number of S", logs, "log10 of the condition number"),
    ):
        shown = {TITLES[name]: mean_and_deviation(_values(scores, name)) for name in names}
        result.figure(caption, figures.bars(shown, axis))
    _compare(
        study, result, parts["validation"], [("muon", "frobenius"), ("muon", "momentum"), ("frobenius", "momentum")]
    )
    for other in ("frobenius", "momentum"):
        change = paired(_by_seed(ranks, "muon"), _by_seed(ranks, other))
        result.data[f"rank, muon minus {other}"] = vars(change)
        result.found.append(f"Effective rank of M, Newton-Schulz minus {TITLES[other]}: {say(change)}.")
    for other, one in itertools.pairwise(names):
        change = paired(_by_seed(logs, one), _by_seed(logs, other))
        result.data[f"log10 of condition, {one} minus {other}"] = vars(change)
        text = f"log10 of S's condition number, {TITLES[one]} minus {TITLES[other]}: {say(change)}: {verdict(change)}."
        result.found.append(text)
    result.found.append(ALGEBRA)
    result.data |= {"scores": _listed(parts), "geometry": _listed({"rank of M": ranks, "log10 of condition": logs})}
    return result


class Geometry(NamedTuple):
    """Of one run, over layers: mean effective rank of M, and mean log10 of S's condition number, None if not finite."""

    rank: float
    log_condition: float | None


def _geometry_of(study: Study, path: Path) -> Geometry:
    """Ranks over the last half of the steps, the condition number after the last."""
    recipe, _, model = RunFolder(path).load_model()
    batch = batch_of(recipe.task, study.data.validation, RANK_ITEMS)
    M = rank(model, batch).M
    logs = np.log10(spectrum(model, batch).condition)
    return Geometry(float(M[:, M.shape[1] // 2 :].mean()), float(logs.mean()) if np.isfinite(logs).all() else None)


def ns_steps(study: Study) -> Result:
    """No Newton-Schulz step (momentum only), one, and five."""
    names = ("plain", "momentum", "muon", "five")
    result = Result("ns-steps", "Newton-Schulz steps: none, one, five", PAPER_STEPS, settings=study.settings())
    _side_by_side(study, result, names, [("muon", "five"), ("muon", "momentum")])
    result.found.append(
        "On a write of rank one, five steps give 0.6964 times its direction where one gives 0.701: the same memory, "
        "0.7% smaller. Where runs differ by more, it is chance."
    )
    return result


def capacity(study: Study) -> Result:
    """A plain memory of twice the state against Muon, whose momentum doubles what is kept."""
    names = ("plain", "double", "muon")
    result = Result("capacity", "Twice the state against Muon", PAPER_CAPACITY, settings=study.settings())
    _side_by_side(study, result, names, [("muon", "plain"), ("double", "plain"), ("muon", "double")])
    return result


def sensitivity(study: Study) -> Result:
    """A map over gamma and tau, and the paper's summary of its recommended range."""
    result = Result("sensitivity", "Momentum decay and scale", PAPER_SENSITIVITY, settings=study.settings())
    names = {(gamma, tau): grid_name(gamma, tau) for gamma in GAMMAS for tau in TAUS}
    places = study.train(["plain", *names.values()], "sensitivity")
    scores = study.scores(places, "test")
    means = {point: mean_and_deviation(_values(scores, name))[0] for point, name in names.items()}
    base = mean_and_deviation(_values(scores, "plain"))[0]
    values = [[means[gamma, tau] for tau in TAUS] for gamma in GAMMAS]
    marks = {(GAMMAS.index(gamma), TAUS.index(tau)) for gamma, tau in RECOMMENDED}
    rows, columns = [f"{gamma:g}" for gamma in GAMMAS], [f"{tau:g}" for tau in TAUS]
    picture = figures.heatmap(values, rows, columns, "gamma", "tau", format="{:.1f}", marks=marks)
    result.figure(f"Test {study.metric.title}, mean of {study.seeds} seeds; outlined: the paper's range", picture)
    inside = [means[point] for point in sorted(RECOMMENDED) if means[point] is not None]
    summary(result, inside, base, study)
    _chance(result, [_values(scores, names[point]) for point in sorted(RECOMMENDED)])
    gain = paired(_range_by_seed(scores, study.seeds), _by_seed(scores, "plain"))
    result.data["range minus plain"] = vars(gain)
    result.found.append(f"Mean of the range minus plain, {study.metric.title}: {say(gain)}: {verdict(gain)}.")
    result.found.append(
        "tau stands outside of the normalisation here. Inside, as in the paper's equation, it cancels for every write "
        "above delta: the map would be constant along tau up to rounding."
    )
    result.data |= {
        "plain": base,
        "values": values,
        "gammas": GAMMAS,
        "taus": TAUS,
        "scores": _listed({"test": scores}),
    }
    return result


def _chance(result: Result, settings: Sequence[Sequence[float]]) -> None:
    """How far means of settings would lie apart if all were alike, by how seeds of one setting do."""
    known = [values for values in settings if len(values) > 1]
    if not known:
        return
    one = float(np.sqrt(np.mean([np.var(values, ddof=1) for values in known])))
    mean = one / float(np.sqrt(min(len(values) for values in known)))
    result.data["chance"] = {"one run": one, "mean": mean}
    result.found.append(
        f"Runs of one setting deviate by {one:.2f} over seeds: by chance alone means would by {mean:.2f}."
    )


def _range_by_seed(scores: Scores, seeds: int) -> dict[int, float | None]:
    """The mean score of the paper's range, by seed; None where a run of it diverged."""
    found: dict[int, float | None] = {}
    for seed in range(seeds):
        values = [scores[grid_name(*point), seed] for point in sorted(RECOMMENDED)]
        known = [value for value in values if value is not None]
        found[seed] = float(np.mean(known)) if len(known) == len(values) else None
    return found


def summary(result: Result, inside: Sequence[float | None], base: float | None, study: Study) -> None:
    """The paper's summary row: baseline, least, most, and how many settings are at least as good."""
    known = [value for value in inside if value is not None]
    if base is None or not known:
        result.found.append("Runs diverged: there is no summary.")
        return
    good = sum((value >= base) if study.metric.higher else (value <= base) for value in known)
    share = f"{100 * good / len(known):.0f}% ({good}/{len(known)})"
    row = [study.case.recipe.task.title, f"{base:.2f}", f"{min(known):.2f}", f"{max(known):.2f}", share]
    paper = [
        ["paper, MuWiGes", "97.23", "97.05", "97.95", "67% (8/12)"],
        ["paper, UESTC-MMEA-CL", "89.06", "89.22", "91.56", "100% (12/12)"],
        ["paper, MMAct", "72.47", "71.55", "74.40", "83% (10/12)"],
    ]
    head = ["", "baseline", "least in range", "most in range", "settings >= baseline"]
    result.table("The paper's summary row", head, [row], paper)
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else 0.0
    result.data["in range"] = {"values": known, "deviation": deviation, "at least plain": good}
    result.found.append(f"In the paper's range the {len(known)} settings deviate by {deviation:.2f} from their mean.")


def _listed(parts: Mapping[str, Scores]) -> dict[str, Any]:
    return {part: {f"{name}-seed{seed}": x for (name, seed), x in scores.items()} for part, scores in parts.items()}
