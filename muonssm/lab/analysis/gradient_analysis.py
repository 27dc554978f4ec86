"""The analysis `gradients` of an experiment: how much of the gradient reaches the memory of early steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from muonssm.lab.core.compare import ComparedRun
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.scorer import IGNORED
from muonssm.lab.core.variants import WITHOUT_MOMENTUM, display_name
from muonssm.lab.report import figures

from .gradient_flow import GradientProfile, gradients
from .intervals import format_interval, format_spread, paired_ratio, verdict
from .per_run import PerRun
from .result import Result

SEQUENCES, POINTS = 8, 48
MAX_SNAPSHOTS = 12
PAPER = (
    "The gradient norms of plain Mamba decay towards earlier tokens (language, 2048 tokens, 60K iterations). With Muon "
    "the profile is more uniform."
)
EVERY_STEP_SCORED = (
    "The loss depends on the output of every step, so the state of an early step reaches more of the loss than that of "
    "a late one. A ratio above 1 does not mean that gradients grow."
)
LABELED_STEPS_SCORED = (
    "Only the labeled steps are scored: the gradient at any other step has passed through all steps up to the next "
    "label."
)


def analyze_gradients(experiment: Experiment) -> Result:
    """|dL/dS_n| and |dL/dM_n| along the sequence, and over training where the run has snapshots."""
    result = Result("gradients", "Gradients along the sequence", PAPER, settings={"sequences": SEQUENCES})
    variants = experiment.trained_variants
    for variant in variants:
        _add_map(result, experiment, experiment.first_run(variant))
    profiles = PerRun.measure(experiment, lambda run: _profile(experiment, run))
    _add_curves(result, profiles, variants)
    early_over_late = profiles.map(_early_over_late)
    rows = [
        [variant, format_spread([x for x in early_over_late.of(variant) if x is not None], "{:.3f}")]
        for variant in variants
    ]
    caption = "Gradient norm in the first eighth of the steps divided by that in the last eighth"
    result.add_table(caption, ["", "early over late"], rows)
    for variant in experiment.compared_variants:
        ratio = paired_ratio(early_over_late.by_pair(variant), early_over_late.by_pair("plain"))
        result.data[f"early over late, {variant} over plain"] = asdict(ratio)
        result.found.append(
            f"Early over late, {display_name(variant)} divided by plain: {format_interval(ratio, '{:.3g}')}: "
            f"{verdict(ratio, 1.0)}."
        )
    every_step = scores_every_step(experiment.validation_batch(SEQUENCES))
    result.found.append(EVERY_STEP_SCORED if every_step else LABELED_STEPS_SCORED)
    result.data |= profiles.to_dict()
    return result


def scores_every_step(batch: Mapping[str, Any]) -> bool:
    """Whether the loss depends on the output of every step: false if labels per step `[B, L]` leave some steps out."""
    labels = batch["labels"]
    return labels.ndim != 2 or not bool((labels == IGNORED).any())


def _profile(experiment: Experiment, run: ComparedRun) -> GradientProfile:
    return gradients(experiment.load_model(run), experiment.validation_batch(SEQUENCES, run.fold), POINTS)


def _add_curves(result: Result, profiles: PerRun[GradientProfile], variants: list[str]) -> None:
    """Add the figure of gradient norms in the first layer, with the weights that each run kept.

    With two variants, the figure also has the norms in the momentum.
    """
    curves = {}
    for variant in variants:
        curves[variant] = [_curve(each.steps, each.S[0]) for each in profiles.of(variant)]
        if len(variants) <= 2 and variant not in WITHOUT_MOMENTUM:
            curves[f"{variant}, momentum"] = [_curve(each.steps, each.M[0]) for each in profiles.of(variant)]
    figure = figures.lines(curves, "step", "gradient norm", log_y=True)
    result.add_figure("Gradient norm in the memory of the first layer, kept weights", figure)


def _add_map(result: Result, experiment: Experiment, run: ComparedRun) -> None:
    """Add the heat map of |dL/dS_n|: a row per snapshot of training, a column per step."""
    folder = experiment.folder(run)
    model, batch = experiment.load_model(run), experiment.validation_batch(SEQUENCES, run.fold)
    profiles: dict[str, GradientProfile] = {}
    for training_step, path in _evenly_chosen(folder.snapshots()).items():
        folder.load_weights(model, path)
        profiles[str(training_step)] = gradients(model, batch, POINTS)
    if not profiles:
        profiles["kept"] = gradients(model, batch, POINTS)
        result.found.append(
            f"{run.variant}: the map has one row, because the run has no snapshots (set training.snapshots=true)."
        )
    values = [[float(x) if x > 0 else None for x in profile.S[0]] for profile in profiles.values()]
    steps = [str(step) for step in next(iter(profiles.values())).steps]
    figure = figures.heatmap(
        values, list(profiles), steps, "training step", "step n", format="{:.1e}", show=False, log=True
    )
    result.add_figure(f"{run.variant}: |dL/dS_n| in the first layer", figure)
    result.data[f"map of {run.variant}"] = {"training": list(profiles), "steps": steps, "values": values}


def _evenly_chosen(snapshots: dict[int, Path]) -> dict[int, Path]:
    """At most `MAX_SNAPSHOTS` snapshots, the first and the last among them."""
    steps = list(snapshots)
    last = len(steps) - 1
    chosen = sorted({round(i * last / (MAX_SNAPSHOTS - 1)) for i in range(MAX_SNAPSHOTS)}) if steps else []
    return {steps[i]: snapshots[steps[i]] for i in chosen}


def _curve(steps: np.ndarray, norms: np.ndarray) -> list[tuple[float, float | None]]:
    return [(float(x), float(y) if y > 0 else None) for x, y in zip(steps, norms, strict=True)]


def _early_over_late(profile: GradientProfile) -> float | None:
    """The mean norm in the first eighth of the steps over that in the last eighth, in the first layer's memory."""
    eighth = max(1, profile.S.shape[1] // 8)
    late = profile.S[0, -eighth:].mean()
    return float(profile.S[0, :eighth].mean() / late) if late > 0 else None
