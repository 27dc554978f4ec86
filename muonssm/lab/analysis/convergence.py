"""The analysis `convergence` of a comparison: training steps until both variants reach the same validation loss.

    target = the higher of both runs' lowest validation losses, which both reach
    ratio  = training steps of plain to the target / training steps of Muon to the target

The loss is interpolated linearly between two validations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

from muonssm.lab.core.compare import ComparedRun
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.report import figures

from .intervals import format_interval, format_spread, paired_ratio, verdict
from .per_run import PerRun
from .result import Result

PAPER = "With Muon, LongHorn reaches the same pre-training loss in 1.3 times fewer steps (FineWeb-Edu, 10B tokens)."
LossCurve = Sequence[tuple[float, float]]  # training step, validation loss


class StepsToTarget(NamedTuple):
    """A loss that both runs of a pair reach, and the training steps that each needs."""

    target: float
    plain: float
    muon: float


def steps_to_loss(curve: LossCurve, target: float) -> float | None:
    """Training steps until the loss first is `target` or lower; None if it never is."""
    previous: tuple[float, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if previous is None or previous[1] == loss:
                return step
            return previous[0] + (step - previous[0]) * (previous[1] - target) / (previous[1] - loss)
        previous = (step, loss)
    return None


def steps_to_target(plain: LossCurve, muon: LossCurve) -> StepsToTarget:
    """Training steps of both runs to the lowest loss that both reach."""
    target = max(min(loss for _, loss in curve) for curve in (plain, muon))
    steps = [step for curve in (plain, muon) if (step := steps_to_loss(curve, target)) is not None]
    return StepsToTarget(target, *steps)


def analyze_convergence(experiment: Experiment) -> Result:
    """Validation losses of every pair, and the ratio of training steps."""
    result = Result("convergence", "Steps to the same validation loss", PAPER)
    if len(experiment.trained_variants) < 2:
        raise ValueError("convergence needs a comparison of plain and Muon")
    curves = PerRun.measure(experiment, lambda run: _loss_curve(experiment, run))
    if not all(curves.all):
        raise ValueError("convergence needs a validation loss in the history of every run")
    plain, muon = curves.by_pair("plain"), curves.by_pair("muon")
    pairs = {key: steps_to_target(curve, muon[key]) for key, curve in plain.items() if key in muon}
    drawn = {variant: curves.of(variant) for variant in experiment.trained_variants}
    result.add_figure("Validation loss", figures.lines(drawn, "training step", "validation loss"))
    ratio = paired_ratio(
        {key: steps.plain for key, steps in pairs.items()}, {key: steps.muon for key, steps in pairs.items()}
    )
    result.found.append(
        f"Plain needs {format_interval(ratio, '{:.3f}')} times the training steps of Muon: {verdict(ratio, 1.0)}."
    )
    rows = [
        ["plain", format_spread([steps.plain for steps in pairs.values()], "{:.0f}")],
        ["muon", format_spread([steps.muon for steps in pairs.values()], "{:.0f}")],
        ["plain over muon", format_interval(ratio, "{:.3f}")],
    ]
    paper = [["paper, LongHorn", "1.3"]]
    result.add_table("Training steps to the lowest loss that both reach", ["", "steps"], rows, paper)
    named = {f"seed{seed}-fold{fold}": steps._asdict() for (seed, fold), steps in pairs.items()}
    result.data |= {"ratio": asdict(ratio), "pairs": named}
    return result


def _loss_curve(experiment: Experiment, run: ComparedRun) -> list[tuple[float, float]]:
    """Training steps and validation losses of a run, without losses that are not a number."""
    epochs = experiment.folder(run).read("history.json")
    return [(each["step"], each["validation_loss"]) for each in epochs if each.get("validation_loss") is not None]
