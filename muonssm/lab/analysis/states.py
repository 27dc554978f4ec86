"""The analyses `spectrum`, `rank` and `memory` of a run: what its memory looks like, plain beside Muon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from muonssm.lab.report import figures

from .case import Case, by_kind, named
from .geometry import Memory, Ranks, memory, rank, spectrum
from .result import Result, paired, ratio, say, spread, verdict

ITEMS = 16  # sequences that are looked at
PAPER_SPECTRUM = (
    "Plain Mamba's memory collapses onto a few directions (condition number about 2.2e6, activity recognition, keys of "
    "64); with Muon the spectrum is flatter and the number 18 times lower (1.2e5)."
)
PAPER_RANK = "Momentum and Newton-Schulz writes keep a higher effective rank (momentum: 16.62 against 12.98 to 13.34)."
PAPER_MEMORY = "Shown in the paper as a scheme only: the memory and its momentum while a sequence is read."


def spectrum_result(case: Case) -> Result:
    """Singular values and condition number of S after the last step."""
    result = Result("spectrum", "Singular values of the memory", PAPER_SPECTRUM, settings={"sequences": ITEMS})
    found = {(s.kind, s.seed, s.fold): spectrum(s.model(), case.batch(ITEMS, s.fold)) for s in case.subjects}
    layers = next(iter(found.values())).condition.size
    for layer in shown_layers(layers):
        curves = {kind: [_points(one.values[layer]) for one in _of(found, kind)] for kind in case.kinds}
        picture = figures.lines(curves, "singular value", "share of the largest", log_y=True, legend=True)
        result.figure(f"Layer {layer + 1}: singular values over the largest, after the last step", picture)
    rows = []
    for layer in range(layers):
        cells = [spread([math.log10(one.condition[layer]) for one in _of(found, kind)]) for kind in case.kinds]
        rows.append([f"layer {layer + 1}", *cells])
    head = ["", *(f"{kind}, log10 of the condition number" for kind in case.kinds)]
    result.table("Condition number of S, median over sequences and heads", head, rows)
    if len(case.kinds) == 2:
        for layer in range(layers):
            change = ratio(*by_kind({key: one.condition[layer] for key, one in found.items()}, case.kinds))
            result.data[f"plain over muon, layer {layer + 1}"] = vars(change)
            text = f"plain's condition number is {say(change, '{:.3g}')} times Muon's: {verdict(change, 1.0)}."
            result.found.append(f"Layer {layer + 1}: {text}")
    result.data |= named(found)
    return result


def rank_result(case: Case) -> Result:
    """Effective rank of S and M along the steps."""
    result = Result("rank", "Effective rank of memory and momentum", PAPER_RANK, settings={"sequences": ITEMS})
    found = {(s.kind, s.seed, s.fold): rank(s.model(), case.batch(ITEMS, s.fold)) for s in case.subjects}
    layers = next(iter(found.values())).S.shape[0]
    for letter, title in (("S", "memory S"), ("M", "momentum M")):
        for layer in shown_layers(layers):
            curves = {kind: [_along(one, letter, layer) for one in _of(found, kind)] for kind in case.kinds}
            picture = figures.lines(curves, "step", f"effective rank of {letter}", legend=True)
            result.figure(f"Layer {layer + 1}: effective rank of the {title}", picture)
    rows = [
        [f"{letter}, layer {layer + 1}", *(spread(_last(found, kind, letter, layer)) for kind in case.kinds)]
        for letter in "SM"
        for layer in range(layers)
    ]
    result.table("Effective rank, mean over the last half of the steps, sequences and heads", ["", *case.kinds], rows)
    if "plain" in case.kinds:
        result.found.append("A plain memory has no momentum: its M is the last write alone, of rank 1.")
    if len(case.kinds) == 2:
        for layer in range(layers):
            plain, muon = by_kind({key: _late(one, "S", layer) for key, one in found.items()}, case.kinds)
            change = paired(muon, plain)
            result.data[f"muon minus plain, S, layer {layer + 1}"] = vars(change)
            result.found.append(f"Layer {layer + 1}: S with Muon minus plain {say(change)}: {verdict(change)}.")
    result.data |= named(found)
    return result


def memory_result(case: Case) -> Result:
    """S and M while one sequence is read, as small pictures."""
    result = Result("memory", "The memory while a sequence is read", PAPER_MEMORY)
    for kind in case.kinds:
        seen: Memory = memory(case.first(kind).model(), case.batch(1))
        for letter, matrices in (("S", seen.S), ("M", seen.M)):
            titles = [f"{letter} after {step}" for step in seen.steps]
            caption = f"{kind}: {'memory' if letter == 'S' else 'momentum'} {letter} of the last layer, head 1"
            result.figure(caption, figures.pictures(list(matrices), titles))
        result.data[kind] = {"steps": seen.steps, "S": norms(seen.S), "M": norms(seen.M)}
    result.found.append("Values down, keys across; one colour scale for each row of pictures.")
    return result


def norms(matrices: np.ndarray) -> list[float]:
    """Frobenius norms of `[T, d, m]`."""
    return np.linalg.norm(matrices, axis=(1, 2)).tolist()


def shown_layers(count: int) -> list[int]:
    """First and last, and of many the middle one: a page shows no more."""
    return sorted({0, count // 2 if count > 3 else 0, count - 1})


def _of(found: dict[Any, Any], kind: str) -> list[Any]:
    return [one for key, one in found.items() if key[0] == kind]


def _points(values: np.ndarray) -> list[tuple[float, float]]:
    return [(i + 1.0, float(value)) for i, value in enumerate(values) if np.isfinite(value) and value > 0]


def _along(one: Ranks, letter: str, layer: int) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(one.steps, getattr(one, letter)[layer], strict=True)]


def _late(one: Ranks, letter: str, layer: int) -> float:
    row = getattr(one, letter)[layer]
    return float(row[len(row) // 2 :].mean())


def _last(found: dict[Any, Ranks], kind: str, letter: str, layer: int) -> Sequence[float]:
    return [_late(one, letter, layer) for one in _of(found, kind)]
