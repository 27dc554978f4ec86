"""Steps to the same validation loss: how much faster one of two runs learns.

    target = the higher of both runs' lowest losses, which both reach
    ratio  = steps of plain to the target / steps of Muon to the target

Between two validations the loss is taken to move along a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from muonssm.lab.report import figures

from .case import Case, Trained
from .result import Result, ratio, say, spread, verdict

PAPER = "With Muon LongHorn reaches the same pre-training loss in 1.3 times fewer steps (FineWeb-Edu, 10B tokens)."
Curve = Sequence[tuple[float, float]]  # steps and losses


class Race(NamedTuple):
    """Of one pair: the loss both reach, and the steps until then."""

    target: float
    plain: float
    muon: float


def steps_to(curve: Curve, target: float) -> float | None:
    """Steps until the loss is first as low as `target`; None if it never is."""
    before: tuple[float, float] | None = None
    for step, loss in curve:
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = (step, loss)
    return None


def race(plain: Curve, muon: Curve) -> Race:
    """The steps of both to a loss that both reach."""
    target = max(min(loss for _, loss in curve) for curve in (plain, muon))
    reached = [step for curve in (plain, muon) if (step := steps_to(curve, target)) is not None]
    return Race(target, *reached)


def convergence(case: Case) -> Result:
    """Validation losses of every pair, and the ratio of steps."""
    result = Result("convergence", "Steps to the same validation loss", PAPER)
    curves = {(s.kind, s.seed, s.fold): curve(s) for s in case.subjects}
    if len(case.kinds) < 2:
        raise ValueError("it needs a comparison of plain and Muon")
    if not all(curves.values()):
        raise ValueError("a run's history has no validation loss")
    pairs = {
        key[1:]: race(points, curves["muon", *key[1:]])
        for key, points in curves.items()
        if key[0] == "plain" and ("muon", *key[1:]) in curves
    }
    drawn = {kind: [points for key, points in curves.items() if key[0] == kind] for kind in case.kinds}
    result.figure("Validation loss", figures.lines(drawn, "step", "validation loss", legend=True))
    found = ratio({key: one.plain for key, one in pairs.items()}, {key: one.muon for key, one in pairs.items()})
    result.found.append(f"Plain takes {say(found, '{:.3f}')} times the steps of Muon: {verdict(found, 1.0)}.")
    rows = [
        ["plain", spread([one.plain for one in pairs.values()], "{:.0f}")],
        ["muon", spread([one.muon for one in pairs.values()], "{:.0f}")],
        ["plain over muon", say(found, "{:.3f}")],
    ]
    result.table("Steps to the loss that both reach", ["", "steps"], rows, [["paper, LongHorn", "1.3"]])
    result.data |= {"ratio": vars(found), "pairs": {f"seed{s}-fold{f}": one._asdict() for (s, f), one in pairs.items()}}
    return result


def curve(subject: Trained) -> list[tuple[float, float]]:
    """Steps and validation losses of a run, without what is not a number."""
    rows: list[dict[str, Any]] = subject.folder.read("history.json")
    return [(row["step"], row["validation_loss"]) for row in rows if row.get("validation_loss") is not None]
