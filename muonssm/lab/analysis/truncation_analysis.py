"""The analysis `truncation` of an experiment: scores when only k singular directions of the memory are read."""

from __future__ import annotations

from dataclasses import asdict
from operator import itemgetter

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.report import figures

from .intervals import format_interval, format_spread, paired_difference
from .low_rank import TruncatedScores, truncation
from .per_run import PerRun
from .replay import StateRecorder
from .result import Result
from .spectra import record_states

SEQUENCES = 48
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_DECOMPOSITIONS = 40_000  # of 64 x 64 matrices, per model; the stride follows from it
PAPER = "Accuracy drops clearly when only a few singular directions are kept; the paper gives no numbers."


def analyze_truncation(experiment: Experiment) -> Result:
    """Accuracy, or the loss of models that do not classify, against the rank of the read."""
    result = Result("truncation", "Reading with a lower rank", PAPER)
    states = record_states(experiment.load_model(experiment.trained_runs[0]), experiment.validation_batch(1), 1)
    full_rank = max(min(S.shape[-2:]) for S in states.S)
    ranks = [k for k in RANKS if k < full_rank] + [full_rank]
    stride = _affordable_stride(states, SEQUENCES * len(ranks))
    result.settings = {"sequences": SEQUENCES, "stride": stride}
    scores = PerRun.measure(
        experiment,
        lambda run: truncation(
            experiment.load_model(run), experiment.validation_batch(SEQUENCES, run.fold), ranks, stride
        ),
    )
    _add_scores(result, scores, ranks, experiment.trained_variants)
    if stride > 1:
        result.found.append(f"The singular directions are those of the memory at the end of every {stride} steps.")
    result.data |= scores.to_dict()
    return result


def _add_scores(result: Result, scores: PerRun[TruncatedScores], ranks: list[int], variants: list[str]) -> None:
    """Add the figure, the table and the loss of score at rank 1."""
    classifies = all(each.accuracy is not None for each in scores.all)
    name = "accuracy, %" if classifies else "loss"
    by_rank = scores.map(lambda each: [float(x) for x in (each.loss if each.accuracy is None else each.accuracy)])
    curves = {
        variant: [[(float(k), value) for k, value in zip(ranks, values, strict=True)] for values in by_rank.of(variant)]
        for variant in variants
    }
    result.add_figure(f"{name} against the rank of the read", figures.lines(curves, "rank k", name, log_x=True))
    rows = [
        [variant, *(format_spread(values) for values in zip(*by_rank.of(variant), strict=True))] for variant in variants
    ]
    result.add_table(f"{name}, by rank k", ["", *(f"k = {k}" for k in ranks)], rows)
    for variant in variants:
        lowest, full = (by_rank.map(itemgetter(i)).by_pair(variant) for i in (0, -1))
        change = paired_difference(lowest, full)
        result.data[f"rank 1 minus all, {variant}"] = asdict(change)
        result.found.append(f"{variant}: {name} with rank 1 minus full rank: {format_interval(change)}.")


def _affordable_stride(states: StateRecorder, reads: int) -> int:
    """The stride that keeps a model below `MAX_DECOMPOSITIONS` when it reads one sequence `reads` times."""
    decompositions = sum(
        states.steps[layer][-1] * S.shape[1] * S.shape[2] * (S.shape[-1] / 64) ** 3 for layer, S in enumerate(states.S)
    )
    return max(1, round(reads * decompositions / MAX_DECOMPOSITIONS))
