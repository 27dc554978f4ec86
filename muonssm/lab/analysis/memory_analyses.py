"""The analyses `spectrum`, `rank` and `memory` of an experiment: the state of the memory, plain and with Muon."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial

import numpy as np

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.variants import display_name
from muonssm.lab.report import figures

from .intervals import format_interval, format_spread, paired_difference, paired_ratio, verdict
from .per_run import PerRun
from .result import Result
from .spectra import Ranks, Spectrum, memory, rank, spectrum

SEQUENCES = 16  # of the validation set
PAPER_SPECTRUM = (
    "The memory of plain Mamba collapses onto a few directions (condition number about 2.2e6, activity recognition, "
    "64 key dimensions). With Muon the spectrum is flatter and the condition number 18 times lower (1.2e5)."
)
PAPER_RANK = (
    "Momentum with Newton-Schulz keeps a higher effective rank of the momentum: 16.62, against 12.98 to 13.34 without "
    "Newton-Schulz."
)
PAPER_MEMORY = "The paper shows memory and momentum along a sequence only as a schematic drawing."


def analyze_spectrum(experiment: Experiment) -> Result:
    """Singular values and condition number of S after the last step."""
    result = Result("spectrum", "Singular values of the memory", PAPER_SPECTRUM, settings={"sequences": SEQUENCES})
    spectra = PerRun.measure(
        experiment, lambda run: spectrum(experiment.load_model(run), experiment.validation_batch(SEQUENCES, run.fold))
    )
    variants, layers = experiment.trained_variants, spectra.first.condition.size
    for layer in layers_to_show(layers):
        curves = {variant: [_curve(each.values[layer]) for each in spectra.of(variant)] for variant in variants}
        figure = figures.lines(curves, "index of the singular value", "relative to the largest", log_y=True)
        result.add_figure(f"Layer {layer + 1}: singular values relative to the largest, after the last step", figure)
    rows = [
        [f"layer {layer + 1}", *(format_spread(_log_conditions(spectra, variant, layer)) for variant in variants)]
        for layer in range(layers)
    ]
    head = ["", *(f"{variant}, log10 of the condition number" for variant in variants)]
    result.add_table("Condition number of S, median over sequences and heads", head, rows)
    for variant in experiment.compared_variants:
        _compare_conditions(result, spectra, layers, variant)
    result.data |= spectra.to_dict()
    return result


def _condition(spectrum: Spectrum, layer: int) -> float:
    return float(spectrum.condition[layer])


def _log_conditions(spectra: PerRun[Spectrum], variant: str, layer: int) -> list[float]:
    return [math.log10(each.condition[layer]) for each in spectra.of(variant)]


def _compare_conditions(result: Result, spectra: PerRun[Spectrum], layers: int, variant: str) -> None:
    """Add a sentence per layer on the ratio of condition numbers."""
    for layer in range(layers):
        conditions = spectra.map(partial(_condition, layer=layer))
        ratio = paired_ratio(conditions.by_pair("plain"), conditions.by_pair(variant))
        result.data[f"plain over {variant}, layer {layer + 1}"] = asdict(ratio)
        result.found.append(
            f"Layer {layer + 1}: the condition number of plain divided by that of {display_name(variant)} is "
            f"{format_interval(ratio, '{:.3g}')}: {verdict(ratio, 1.0)}."
        )


def _curve(values: np.ndarray) -> list[tuple[float, float]]:
    return [(i + 1.0, float(value)) for i, value in enumerate(values) if np.isfinite(value) and value > 0]


def analyze_rank(experiment: Experiment) -> Result:
    """Effective rank of S and M along the sequence."""
    result = Result("rank", "Effective rank of memory and momentum", PAPER_RANK, settings={"sequences": SEQUENCES})
    ranks = PerRun.measure(
        experiment, lambda run: rank(experiment.load_model(run), experiment.validation_batch(SEQUENCES, run.fold))
    )
    variants, layers = experiment.trained_variants, ranks.first.S.shape[0]
    for letter, title in (("S", "memory S"), ("M", "momentum M")):
        for layer in layers_to_show(layers):
            curves = {variant: [_rank_curve(each, letter, layer) for each in ranks.of(variant)] for variant in variants}
            figure = figures.lines(curves, "step", f"effective rank of {letter}")
            result.add_figure(f"Layer {layer + 1}: effective rank of the {title}", figure)
    late = {
        (letter, layer): ranks.map(partial(_late_rank, letter=letter, layer=layer))
        for letter in "SM"
        for layer in range(layers)
    }
    rows = [
        [f"{letter}, layer {layer + 1}", *(format_spread(values.of(variant)) for variant in variants)]
        for (letter, layer), values in late.items()
    ]
    result.add_table(
        "Effective rank, mean over the second half of the steps, sequences and heads", ["", *variants], rows
    )
    if "plain" in variants:
        result.found.append("A plain memory has no momentum: its M is the last write, which has rank 1.")
    for variant in experiment.compared_variants:
        for layer in range(layers):
            change = paired_difference(late["S", layer].by_pair(variant), late["S", layer].by_pair("plain"))
            result.data[f"{variant} minus plain, S, layer {layer + 1}"] = asdict(change)
            result.found.append(
                f"Layer {layer + 1}: effective rank of S, {display_name(variant)} minus plain: "
                f"{format_interval(change)}: {verdict(change)}."
            )
    result.data |= ranks.to_dict()
    return result


def _rank_curve(ranks: Ranks, letter: str, layer: int) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(ranks.steps, getattr(ranks, letter)[layer], strict=True)]


def _late_rank(ranks: Ranks, letter: str, layer: int) -> float:
    """The mean over the second half of the steps."""
    along_steps = getattr(ranks, letter)[layer]
    return float(along_steps[len(along_steps) // 2 :].mean())


def analyze_memory(experiment: Experiment) -> Result:
    """S and M as pictures while the model reads one sequence."""
    result = Result("memory", "The memory along a sequence", PAPER_MEMORY)
    for variant in experiment.trained_variants:
        model = experiment.load_model(experiment.first_run(variant))
        states = memory(model, experiment.validation_batch(1))
        for letter, title, matrices in (("S", "memory S", states.S), ("M", "momentum M", states.M)):
            titles = [f"{letter} after {step}" for step in states.steps]
            caption = f"{variant}: {title} of the last layer, head 1"
            result.add_figure(caption, figures.pictures(list(matrices), titles))
        result.data[variant] = {"steps": states.steps, "S": _norms(states.S), "M": _norms(states.M)}
    result.found.append("Rows are value dimensions, columns are key dimensions. Each figure has one color scale.")
    return result


def _norms(matrices: np.ndarray) -> list[float]:
    """Frobenius norms of `[T, d, m]`."""
    return np.linalg.norm(matrices, axis=(1, 2)).tolist()


def layers_to_show(count: int) -> list[int]:
    """The first and the last layer, and the middle one of four or more, so that the page stays short."""
    return sorted({0, count // 2 if count > 3 else 0, count - 1})
