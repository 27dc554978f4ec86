"""The analyses that train models: `ablation`, `ns-steps`, `capacity` and `sensitivity`, over seeds, on all cores.

All studies share one folder of runs, RUN/analysis/runs. A variant that two studies need is trained once, and finished
runs of the comparison itself are reused.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muonssm.lab.core.compare import Interval, Spread
from muonssm.lab.core.experiment import Experiment, spaced_batch
from muonssm.lab.core.parallel_runs import train_all
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.task import DataSplits, Metric
from muonssm.lab.report import figures

from .intervals import format_interval, format_spread, paired_difference, verdict
from .result import Result
from .spectra import rank, spectrum
from .variants import GAMMAS, RECOMMENDED, TAUS, grid_name, run_folders, variant_recipe

Scores = Mapping[tuple[str, int], float | None]  # by variant and seed; None for a diverged run
RunFolders = Mapping[tuple[str, int], Path]  # by variant and seed
SPLITS = ("validation", "test")
SEQUENCES = 16  # of the validation set, for ranks and condition numbers
TITLES = {
    "plain": "plain",
    "doubled": "plain, state doubled",
    "unnormalized": "momentum only",
    "frobenius": "momentum + Frobenius",
    "muon": "momentum + Newton-Schulz",
    "five": "five Newton-Schulz steps",
}
PAPER_ABLATION = (
    "On MMAct, momentum alone has 72.04% validation accuracy and effective rank 12.98, with Frobenius normalization "
    "72.53% and 13.34, with Newton-Schulz 74.67% and 16.62."
)
PAPER_ABLATION_ROWS = {  # validation accuracy and effective rank
    "unnormalized": ("72.04 ± 0.58", "12.98 ± 0.81"),
    "frobenius": ("72.53 ± 0.82", "13.34 ± 0.43"),
    "muon": ("74.67 ± 0.46", "16.62 ± 0.57"),
}
PAPER_NS_STEPS = "One Newton-Schulz step is better than none and better than five (MMAct; a figure without numbers)."
PAPER_CAPACITY = (
    "On MMAct, doubling the state gains 0.41 (LongHorn) and 1.05 points (Mamba); Muon gains 1.93 and 3.18 over plain. "
    "Capacity alone does not explain the gain."
)
PAPER_SENSITIVITY = (
    "Within gamma 0.8 to 0.99 and tau 0.6 to 1.0 (12 settings), accuracy varies by 0.27 to 0.72 points, and 67% to "
    "100% of the settings are at least as good as plain LongHorn."
)
PAPER_SENSITIVITY_ROWS = (
    ("paper, MuWiGes", "97.23", "97.05", "97.95", "67% (8/12)"),
    ("paper, UESTC-MMEA-CL", "89.06", "89.22", "91.56", "100% (12/12)"),
    ("paper, MMAct", "72.47", "71.55", "74.40", "83% (10/12)"),
)
ABLATION_NOTE = (
    "On a write of rank 1, one Newton-Schulz step is Frobenius normalization times 0.701, forward and backward. These "
    "two variants differ by that factor and by chance only."
)
NS_STEPS_NOTE = (
    "On a write of rank 1, five steps scale its direction by 0.6964 and one step by 0.701: the same memory, 0.7% "
    "smaller. A larger difference between runs is chance."
)
SENSITIVITY_NOTE = (
    "Here tau is outside of the normalization. Inside, as in the paper's equation, it cancels for every write above "
    "delta, and the map would be constant along tau up to rounding."
)


@dataclass(frozen=True)
class Study:
    """What all studies of an experiment share.

    Attributes:
        experiment: the run or comparison.
        recipe: the recipe to train, at the size of the study.
        seeds: the number of seeds.
        workers: the number of processes; one per core if None.
    """

    experiment: Experiment
    recipe: Recipe
    seeds: int
    workers: int | None = None

    @functools.cached_property
    def data(self) -> DataSplits:
        return self.recipe.task.load_data()

    @property
    def metric(self) -> Metric:
        """The headline metric."""
        return self.recipe.task.metrics[0]

    def train(self, names: Sequence[str], title: str) -> RunFolders:
        """Train the variants that are not finished; return the run folder of every variant and seed."""
        runs = self.experiment.analysis_folder / "runs"
        folders = run_folders(self.recipe, names, self.seeds, self.experiment.path, runs)
        train_all({path: variant_recipe(self.recipe, *key) for key, path in folders.items()}, title, self.workers)
        return folders

    def scores(self, folders: RunFolders, split: str) -> Scores:
        """The headline score of every run on a split."""
        metrics = {key: RunFolder(path).read_metrics(self.recipe.task.metrics) for key, path in folders.items()}
        name = self.metric.name
        return {key: None if "diverged" in found else found[split][name] for key, found in metrics.items()}

    def settings(self) -> dict[str, Any]:
        """The settings that the JSON file of a study records."""
        return {"seeds": self.seeds, "recipe": self.recipe.to_dict()}


def ablation(study: Study) -> Result:
    """Compare momentum alone, Frobenius normalization and Newton-Schulz: scores, rank of M, condition number of S."""
    names = ("plain", "unnormalized", "frobenius", "muon")
    result = Result("ablation", "Normalizations of the write", PAPER_ABLATION, settings=study.settings())
    folders = study.train(names, "ablation")
    scores = {split: study.scores(folders, split) for split in SPLITS}
    geometry = {key: _geometry(study, path) for key, path in folders.items()}
    ranks: Scores = {key: each.rank for key, each in geometry.items()}
    logs: Scores = {key: each.log_condition for key, each in geometry.items()}
    _add_ablation_table(study, result, names, [*scores.values(), ranks, logs])
    for caption, values, axis in (
        ("Validation set", scores["validation"], study.metric.heading),
        ("Effective rank of M", ranks, "effective rank"),
        ("Condition number of S", logs, "log10 of the condition number"),
    ):
        result.add_figure(caption, figures.bars(_bars(values, names), axis))
    pairs = [("muon", "frobenius"), ("muon", "unnormalized"), ("frobenius", "unnormalized")]
    _add_score_differences(study, result, scores["validation"], pairs)
    _add_geometry_differences(result, names, ranks, logs)
    result.found.append(ABLATION_NOTE)
    geometries = {"rank of M": ranks, "log10 of condition": logs}
    result.data |= {"scores": _by_run_name(scores), "geometry": _by_run_name(geometries)}
    return result


def _add_ablation_table(study: Study, result: Result, names: Sequence[str], columns: Sequence[Scores]) -> None:
    splits = [f"{split}, {study.metric.heading}" for split in SPLITS]
    head = ["", *splits, "effective rank of M", "log10 of the condition number of S"]
    rows = [[TITLES[name], *(format_spread(_known(column, name)) for column in columns)] for name in names]
    paper = [
        [f"paper, MMAct: {TITLES[name]}", accuracy, "", rank_of_M, ""]
        for name, (accuracy, rank_of_M) in PAPER_ABLATION_ROWS.items()
    ]
    result.add_table(f"Mean and standard deviation over {study.seeds} seeds", head, rows, paper)


def _add_geometry_differences(result: Result, names: Sequence[str], ranks: Scores, logs: Scores) -> None:
    for other in ("frobenius", "unnormalized"):
        change = _difference(ranks, "muon", other)
        result.data[f"rank, muon minus {other}"] = asdict(change)
        result.found.append(f"Effective rank of M, Newton-Schulz minus {TITLES[other]}: {format_interval(change)}.")
    for other, one in itertools.pairwise(names):
        change = _difference(logs, one, other)
        result.data[f"log10 of condition, {one} minus {other}"] = asdict(change)
        result.found.append(
            f"log10 of the condition number of S, {TITLES[one]} minus {TITLES[other]}: {format_interval(change)}: "
            f"{verdict(change)}."
        )


class Geometry(NamedTuple):
    """Means over the layers of a run: effective rank of M, and log10 of the condition number of S, None if infinite."""

    rank: float
    log_condition: float | None


def _geometry(study: Study, path: Path) -> Geometry:
    """The rank of M over the second half of the steps, and the condition number of S after the last step."""
    recipe, _, model = RunFolder(path).load_model()
    batch = spaced_batch(recipe.task, study.data.validation, SEQUENCES)
    M = rank(model, batch).M
    logs = np.log10(spectrum(model, batch).condition)
    return Geometry(float(M[:, M.shape[1] // 2 :].mean()), float(logs.mean()) if np.isfinite(logs).all() else None)


def ns_steps(study: Study) -> Result:
    """Compare zero Newton-Schulz steps (momentum only), one, and five."""
    result = Result("ns-steps", "Newton-Schulz steps: zero, one, five", PAPER_NS_STEPS, settings=study.settings())
    pairs = [("muon", "five"), ("muon", "unnormalized")]
    _compare_variants(study, result, ("plain", "unnormalized", "muon", "five"), pairs)
    result.found.append(NS_STEPS_NOTE)
    return result


def capacity(study: Study) -> Result:
    """Compare a plain memory with a doubled state with Muon, whose momentum doubles what is stored."""
    result = Result("capacity", "A doubled state against Muon", PAPER_CAPACITY, settings=study.settings())
    pairs = [("muon", "plain"), ("doubled", "plain"), ("muon", "doubled")]
    _compare_variants(study, result, ("plain", "doubled", "muon"), pairs)
    return result


def _compare_variants(study: Study, result: Result, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> None:
    """Train the variants; add a table of both splits, a figure of the test set, and the differences there."""
    folders = study.train(names, result.name)
    scores = {split: study.scores(folders, split) for split in SPLITS}
    head = ["", *(f"{split}, {study.metric.heading}" for split in SPLITS)]
    rows = [[TITLES[name], *(format_spread(_known(scores[split], name)) for split in SPLITS)] for name in names]
    result.add_table(f"Mean and standard deviation over {study.seeds} seeds", head, rows)
    result.add_figure("Test set", figures.bars(_bars(scores["test"], names), study.metric.title))
    _add_score_differences(study, result, scores["test"], pairs)
    result.data["scores"] = _by_run_name(scores)


def _add_score_differences(study: Study, result: Result, scores: Scores, pairs: Sequence[tuple[str, str]]) -> None:
    """Add a sentence on the difference of each pair of variants."""
    for one, other in pairs:
        change = _difference(scores, one, other)
        result.data[f"{one} minus {other}"] = asdict(change)
        names = f"{TITLES[one]} minus {TITLES[other]}"
        text = f"{names}, {study.metric.title}: {format_interval(change)}: {verdict(change)}."
        result.found.append(text[0].upper() + text[1:])


def sensitivity(study: Study) -> Result:
    """Map the score over gamma and tau, and summarize the paper's recommended range as the paper does."""
    result = Result("sensitivity", "Momentum decay and scale", PAPER_SENSITIVITY, settings=study.settings())
    names = {(gamma, tau): grid_name(gamma, tau) for gamma in GAMMAS for tau in TAUS}
    scores = study.scores(study.train(["plain", *names.values()], "sensitivity"), "test")
    means = {point: Spread.of(_known(scores, name)).mean for point, name in names.items()}
    plain = Spread.of(_known(scores, "plain")).mean
    values = [[means[gamma, tau] for tau in TAUS] for gamma in GAMMAS]
    _add_sensitivity_map(study, result, values)
    recommended = sorted(RECOMMENDED)
    _add_sensitivity_summary(study, result, [means[point] for point in recommended], plain)
    _add_chance(result, [_known(scores, names[point]) for point in recommended])
    gain = paired_difference(_range_means(scores, study.seeds), _by_seed(scores, "plain"))
    result.data["range minus plain"] = asdict(gain)
    result.found.append(
        f"Mean of the paper's range minus plain, {study.metric.title}: {format_interval(gain)}: {verdict(gain)}."
    )
    result.found.append(SENSITIVITY_NOTE)
    result.data |= {"plain": plain, "values": values, "gammas": GAMMAS, "taus": TAUS}
    result.data["scores"] = _by_run_name({"test": scores})
    return result


def _add_sensitivity_map(study: Study, result: Result, values: Sequence[Sequence[float | None]]) -> None:
    marks = {(GAMMAS.index(gamma), TAUS.index(tau)) for gamma, tau in RECOMMENDED}
    rows, columns = [f"{gamma:g}" for gamma in GAMMAS], [f"{tau:g}" for tau in TAUS]
    figure = figures.heatmap(values, rows, columns, "gamma", "tau", format="{:.1f}", marks=marks)
    caption = f"Test {study.metric.title}, mean over {study.seeds} seeds; the paper's range is outlined"
    result.add_figure(caption, figure)


def _add_sensitivity_summary(
    study: Study, result: Result, range_means: Sequence[float | None], plain: float | None
) -> None:
    """Add the paper's summary row: baseline, lowest, highest, and how many settings are at least as good."""
    means = [mean for mean in range_means if mean is not None]
    if plain is None or not means:
        result.found.append("There is no summary, because runs diverged.")
        return
    good = sum((mean >= plain) if study.metric.higher_is_better else (mean <= plain) for mean in means)
    share = f"{100 * good / len(means):.0f}% ({good}/{len(means)})"
    row = [study.experiment.task.title, f"{plain:.2f}", f"{min(means):.2f}", f"{max(means):.2f}", share]
    head = ["", "baseline", "lowest in range", "highest in range", "settings at least as good"]
    result.add_table("The paper's summary row", head, [row], PAPER_SENSITIVITY_ROWS)
    deviation = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
    result.data["in range"] = {"values": means, "deviation": deviation, "at least plain": good}
    result.found.append(
        f"The means of the {len(means)} settings in the paper's range have a standard deviation of {deviation:.2f}."
    )


def _add_chance(result: Result, settings: Sequence[Sequence[float]]) -> None:
    """Add the spread of means that chance alone would give, estimated from the seeds of each setting."""
    repeated = [values for values in settings if len(values) > 1]
    if not repeated:
        return
    one_run = float(np.sqrt(np.mean([np.var(values, ddof=1) for values in repeated])))
    mean = one_run / float(np.sqrt(min(len(values) for values in repeated)))
    result.data["chance"] = {"one run": one_run, "mean": mean}
    result.found.append(
        f"Runs of one setting have a standard deviation of {one_run:.2f} over seeds, so chance alone gives the means a "
        f"standard deviation of {mean:.2f}."
    )


def _range_means(scores: Scores, seeds: int) -> dict[int, float | None]:
    """The mean score of the paper's range, by seed; None if a run of the range diverged."""
    means: dict[int, float | None] = {}
    for seed in range(seeds):
        values = [scores[grid_name(*point), seed] for point in sorted(RECOMMENDED)]
        known = [value for value in values if value is not None]
        means[seed] = float(np.mean(known)) if len(known) == len(values) else None
    return means


def _by_seed(scores: Scores, variant: str) -> dict[int, float | None]:
    return {seed: value for (name, seed), value in scores.items() if name == variant}


def _known(scores: Scores, variant: str) -> list[float]:
    """The scores of a variant's runs, without diverged ones."""
    return [value for value in _by_seed(scores, variant).values() if value is not None]


def _difference(scores: Scores, one: str, other: str) -> Interval:
    return paired_difference(_by_seed(scores, one), _by_seed(scores, other))


def _bars(scores: Scores, names: Sequence[str]) -> dict[str, tuple[float | None, float | None]]:
    """Mean and standard deviation by the title of the variant, for a bar chart."""
    spreads = {TITLES[name]: Spread.of(_known(scores, name)) for name in names}
    return {title: (spread.mean, spread.deviation) for title, spread in spreads.items()}


def _by_run_name(columns: Mapping[str, Scores]) -> dict[str, dict[str, float | None]]:
    """Columns of scores as JSON, by the name of the run."""
    return {
        column: {f"{name}-seed{seed}": x for (name, seed), x in scores.items()} for column, scores in columns.items()
    }
