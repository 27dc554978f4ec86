"""The analysis `convergence` of a comparison: training steps until a variant is as good as plain, and the reverse.

    target = the worse of both runs' best validation losses, which both reach
    ratio  = training steps of plain to the target / training steps of the variant to the target

The loss is interpolated linearly between two validations. Runs without a validation loss are compared by their error,
100% minus the validation score, and the table also has the steps to a score of 90%.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import NamedTuple

from muonssm.lab.core.compare import ComparedRun
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.variants import display_name
from muonssm.lab.report import figures

from .intervals import format_interval, format_spread, paired_ratio, verdict
from .per_run import PerRun
from .result import Result

PAPER = "With Muon, LongHorn reaches the same pre-training loss in 1.3 times fewer steps (FineWeb-Edu, 10B tokens)."
GOOD_SCORE = 90.0  # percent
Curve = Sequence[tuple[float, float]]  # training step, validation loss or error


class StepsToTarget(NamedTuple):
    """A loss that both runs of a pair reach, and the training steps that each needs."""

    target: float
    plain: float
    other: float


def steps_to_loss(curve: Curve, target: float) -> float | None:
    """Training steps until the loss first is `target` or lower; None if it never is."""
    previous: tuple[float, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if previous is None or previous[1] == loss:
                return step
            return previous[0] + (step - previous[0]) * (previous[1] - target) / (previous[1] - loss)
        previous = (step, loss)
    return None


def steps_to_target(plain: Curve, other: Curve) -> StepsToTarget:
    """Training steps of both runs to the lowest loss that both reach."""
    target = max(min(loss for _, loss in curve) for curve in (plain, other))
    steps = [step for curve in (plain, other) if (step := steps_to_loss(curve, target)) is not None]
    return StepsToTarget(target, *steps)


def analyze_convergence(experiment: Experiment) -> Result:
    """Validation losses of every pair, and the ratio of training steps, for each variant compared with plain."""
    result = Result("convergence", "Steps to the same validation loss", PAPER)
    if not experiment.compared_variants:
        raise ValueError("RUN must be a comparison of plain and another variant, for convergence")
    curves = PerRun.measure(experiment, lambda run: _curve(experiment, run, "validation_loss"))
    name, score = "loss", None
    if not all(curves.all):
        score = experiment.metrics[0]
        if score.unit != "%" or not score.higher_is_better:
            raise ValueError("RUN must have a validation loss in the history of every run, for convergence")
        name = f"{score.title} error"
        scores = PerRun.measure(experiment, lambda run: _curve(experiment, run, f"validation_{score.name}"))
        if not all(scores.all):
            wanted = f"a validation loss or {score.title} in the history of every run"
            raise ValueError(f"RUN must have {wanted}, for convergence")
        curves = scores.map(lambda curve: [(step, 100 - value) for step, value in curve])
        result.title = f"Steps to the same validation {score.title}"
    drawn = {variant: curves.of(variant) for variant in experiment.trained_variants}
    unit = ", %" if score else ""
    result.add_figure(f"Validation {name}", figures.lines(drawn, "training step", f"validation {name}{unit}"))
    rows: list[list[str]] = []
    for variant in experiment.compared_variants:
        rows += _compare(result, curves, variant)
    result.add_table(
        f"Training steps to the lowest {name} that both reach", ["", "steps"], rows, [["paper, LongHorn", "1.3"]]
    )
    if score:
        _add_good_scores(result, curves, experiment.trained_variants, score.title)
    return result


def _compare(result: Result, curves: PerRun[list[tuple[float, float]]], variant: str) -> list[list[str]]:
    """Add the sentence and the numbers of one variant; return its rows of the table."""
    plain, other = curves.by_pair("plain"), curves.by_pair(variant)
    pairs = {key: steps_to_target(curve, other[key]) for key, curve in plain.items() if key in other}
    ratio = paired_ratio(
        {key: steps.plain for key, steps in pairs.items()}, {key: steps.other for key, steps in pairs.items()}
    )
    result.found.append(
        f"Plain needs {format_interval(ratio, '{:.3f}')} times the training steps of {display_name(variant)}: "
        f"{verdict(ratio, 1.0)}."
    )
    named = {f"seed{seed}-fold{fold}": steps._asdict() for (seed, fold), steps in pairs.items()}
    result.data[f"plain over {variant}, steps"] = asdict(ratio)  # at the top, where a study's page looks for intervals
    result.data[f"steps of each pair, {variant}"] = named
    plain_label = "plain" if len(curves.variants) == 2 else f"plain, paired with {variant}"
    return [
        [plain_label, format_spread([steps.plain for steps in pairs.values()], "{:.0f}")],
        [variant, format_spread([steps.other for steps in pairs.values()], "{:.0f}")],
        [f"plain over {variant}", format_interval(ratio, "{:.3f}")],
    ]


def _add_good_scores(
    result: Result, curves: PerRun[list[tuple[float, float]]], variants: Sequence[str], title: str
) -> None:
    """Add the table of steps to `GOOD_SCORE`: the mean of the runs that reach it, and how many do."""
    steps = curves.map(partial(steps_to_loss, target=100 - GOOD_SCORE))
    rows = []
    for variant in variants:
        reached = [step for step in steps.of(variant) if step is not None]
        count = f"{len(reached)} of {len(steps.of(variant))}"
        rows.append([variant, count, format_spread(reached, "{:.0f}") if reached else "-"])
        result.data[f"steps to {GOOD_SCORE:g}%, {variant}"] = steps.of(variant)
    head = ["", "runs that reach it", "training steps of those"]
    result.add_table(f"Training steps to {GOOD_SCORE:g}% validation {title}", head, rows)


def _curve(experiment: Experiment, run: ComparedRun, name: str) -> list[tuple[float, float]]:
    """Training steps and values of a run's history, without values that are not a number."""
    rows = experiment.folder(run).read("history.json")
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]
