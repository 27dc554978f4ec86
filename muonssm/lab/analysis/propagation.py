"""The analyses `gradients` and `truncation` of a run: what reaches earlier steps, and what the last directions hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from muonssm.lab.report import figures

from .case import Case, Trained, by_kind, named
from .geometry import states_of
from .gradient_flow import GradientProfile, gradients
from .low_rank import truncation
from .replay import States
from .result import Result, paired, ratio, say, spread, verdict

GRADIENT_ITEMS, POINTS = 8, 48
TRUNCATION_ITEMS = 48
WORK = 40_000  # decompositions of a truncation, in matrices of 64 x 64: the stride follows from it
PAPER_GRADIENTS = (
    "Plain Mamba's gradient norms decay towards earlier tokens (language, 2048 tokens, 60K iterations); with Muon the "
    "profile is more uniform."
)
PAPER_TRUNCATION = "Accuracy drops clearly when only a few singular directions are kept; no figures are given."


def gradients_result(case: Case) -> Result:
    """|dL/dS_n| and |dL/dM_n| along the steps, and along training where there are snapshots."""
    result = Result(
        "gradients", "Gradients along the sequence", PAPER_GRADIENTS, settings={"sequences": GRADIENT_ITEMS}
    )
    for kind in case.kinds:
        _map(case, case.first(kind), result)
    found = {
        (s.kind, s.seed, s.fold): gradients(s.model(), case.batch(GRADIENT_ITEMS, s.fold), POINTS)
        for s in case.subjects
    }
    curves: dict[str, list[Any]] = {}
    for (kind, *_), one in found.items():
        curves.setdefault(kind, []).append(_curve(one.steps, one.S[0]))
        if kind == "muon":
            curves.setdefault("muon, momentum", []).append(_curve(one.steps, one.M[0]))
    picture = figures.lines(curves, "step", "gradient norm", log_y=True, legend=True)
    result.figure("Gradient of the loss in the first layer's memory, kept weights", picture)
    early = {key: _early(one) for key, one in found.items()}
    rows = [
        [kind, spread([x for key, x in early.items() if key[0] == kind and x is not None], "{:.3f}")]
        for kind in case.kinds
    ]
    result.table(
        "Gradient at the first eighth of the steps over that at the last eighth", ["", "early over late"], rows
    )
    if len(case.kinds) == 2:
        plain, muon = by_kind(early, case.kinds)
        change = ratio(muon, plain)
        result.data["early over late, muon over plain"] = vars(change)
        result.found.append(f"Early over late, Muon's over plain's: {say(change, '{:.3g}')}: {verdict(change, 1.0)}.")
    result.found.append(
        "Every step is read, so the state of an early step reaches more of the loss than that of a late one: a ratio "
        "above 1 is no sign of growth."
        if case.recipe.task_name != "recall"
        else "Only the answers at the end are scored: what reaches early steps has passed through all the others."
    )
    result.data |= named(found)
    return result


def _map(case: Case, subject: Trained, result: Result) -> None:
    """Steps across, training down."""
    model, batch = subject.model(), case.batch(GRADIENT_ITEMS, subject.fold)
    rows: dict[str, GradientProfile] = {}
    snapshots = subject.folder.snapshots()
    for step, path in _some(snapshots).items():
        subject.folder.load_weights(model, path)
        rows[str(step)] = gradients(model, batch, POINTS)
    if not rows:
        rows["kept"] = gradients(model, batch, POINTS)
        result.found.append(
            f"{subject.kind}: the run kept no weights along training (training.snapshots=true does): one row."
        )
    values = [[float(x) if x > 0 else None for x in profile.S[0]] for profile in rows.values()]
    steps = [str(step) for step in next(iter(rows.values())).steps]
    picture = figures.heatmap(
        values, list(rows), steps, "training step", "step n", format="{:.1e}", show=False, log=True
    )
    result.figure(f"{subject.kind}: |dL/dS_n| in the first layer", picture)
    result.data[f"map of {subject.kind}"] = {"training": list(rows), "steps": steps, "values": values}


def _some(snapshots: dict[int, Any], most: int = 12) -> dict[int, Any]:
    steps = list(snapshots)
    chosen = sorted({round(i * (len(steps) - 1) / max(1, most - 1)) for i in range(most)}) if steps else []
    return {steps[i]: snapshots[steps[i]] for i in chosen}


def _curve(steps: np.ndarray, norms: np.ndarray) -> list[tuple[float, float | None]]:
    return [(float(x), float(y) if y > 0 else None) for x, y in zip(steps, norms, strict=True)]


def _early(one: GradientProfile) -> float | None:
    """First eighth over last eighth, in the first layer's memory."""
    part = max(1, one.S.shape[1] // 8)
    late = one.S[0, -part:].mean()
    return float(one.S[0, :part].mean() / late) if late > 0 else None


def truncation_result(case: Case) -> Result:
    """Accuracy, or the loss where nothing is classified, against the rank that is read."""
    result = Result("truncation", "Reading with lower rank", PAPER_TRUNCATION)
    states = states_of(case.subjects[0].model(), case.batch(1), 1)
    full = max(min(S.shape[-2:]) for S in states.S)
    ranks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < full] + [full]
    stride = _stride(states, TRUNCATION_ITEMS * len(ranks))
    result.settings = {"sequences": TRUNCATION_ITEMS, "stride": stride}
    found = {
        (s.kind, s.seed, s.fold): truncation(s.model(), case.batch(TRUNCATION_ITEMS, s.fold), ranks, stride)
        for s in case.subjects
    }
    classifies = all(one.accuracy is not None for one in found.values())
    score = "accuracy, %" if classifies else "loss"
    values = {key: one.loss if one.accuracy is None else one.accuracy for key, one in found.items()}
    curves: dict[str, list[Any]] = {kind: [] for kind in case.kinds}
    for (kind, *_), row in values.items():
        curves[kind].append([(float(k), float(value)) for k, value in zip(ranks, row, strict=True)])
    result.figure(
        f"{score} against the rank that is read", figures.lines(curves, "rank k", score, log_x=True, legend=True)
    )
    rows = [
        [kind, *(spread([row[i] for key, row in values.items() if key[0] == kind]) for i in range(len(ranks)))]
        for kind in case.kinds
    ]
    result.table(f"{score}, by k", ["", *(f"k = {k}" for k in ranks)], rows)
    for kind in case.kinds:
        ends = [{key: float(row[i]) for key, row in values.items() if key[0] == kind} for i in (0, -1)]
        lost = paired(ends[0], ends[1])
        result.data[f"rank 1 minus all, {kind}"] = vars(lost)
        result.found.append(f"{kind}: {score} with rank 1 minus all directions: {say(lost)}.")
    if stride > 1:
        result.found.append(f"The directions are those of the memory at the end of each {stride} steps.")
    result.data |= named(found)
    return result


def _stride(states: States, times: int) -> int:
    """So that decompositions take a bounded time, where one sequence is read `times` times."""
    work = sum(
        states.steps[layer][-1] * S.shape[1] * S.shape[2] * (S.shape[-1] / 64) ** 3 for layer, S in enumerate(states.S)
    )
    return max(1, round(times * work / WORK))
