"""Curves with their bands, on linear or logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from .axes import Axis, number
from .colours import colours_of
from .frame import frame, legend, text, titled, width_of

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM, TOP = 340, 230, 50, 330, 40, 12
FEW = 12  # points up to which each is marked
PLACES = 60  # at most so many places along x say their values
Points = Sequence[tuple[float, float | None]]
Known = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]


def lines(
    curves: Mapping[str, Sequence[Points]],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    bands: Mapping[str, Band] | None = None,
    legend: bool = True,
) -> str:
    """Curves by name, each name in one colour; a name may have several (seeds, folds).

    Where y is None (a run that diverged) there is no point, nor where a logarithm has none; the latter is said.

    Args:
        curves: points `(x, y)`; at most eight names, of which plain and muon always have the same colour.
        x_label, y_label: what the axes are.
        log_x, log_y: whether an axis is logarithmic.
        bands: `(x, low, high)` by name, a translucent area in the name's colour.
        legend: whether a key stands above, if there is more than one name.
    """
    bands = bands or {}
    colours = colours_of(list(dict.fromkeys([*curves, *bands])), "curves")
    key, top = _key(colours) if legend and len(colours) > 1 else ([], TOP)

    def has_place(x: float, *ys: float) -> bool:
        return not (log_x and x <= 0) and not (log_y and min(ys) <= 0)

    known = {name: [_known(curve) for curve in group] for name, group in curves.items()}
    shown = {name: [[p for p in curve if has_place(*p)] for curve in group] for name, group in known.items()}
    areas = {name: [p for p in band if has_place(*p)] for name, band in bands.items()}
    points = [p for group in shown.values() for curve in group for p in curve]
    corners = [(p[0], y) for band in areas.values() for p in band for y in p[1:]]
    xs, ys = ([p[i] for p in (*points, *corners)] for i in (0, 1))
    y_axis = Axis.over(ys, HEIGHT - BOTTOM, top, log_y, padded=True)
    left = max(LEFT, *(26 + width_of(number(y)) for y in y_axis.ticks()), 0)
    x_axis = Axis.over(xs, left, RIGHT, log_x)
    parts = [*key, _axes(x_axis, y_axis, x_label, y_label, xs)]
    parts += [_area(x_axis, y_axis, band, colours[name]) for name, band in areas.items() if band]
    parts += [_curve(x_axis, y_axis, p, name, colours[name]) for name, group in shown.items() for p in group]
    parts += _values(x_axis, top, shown, x_label)
    lost = sum(len(curve) for group in known.values() for curve in group) - len(points)
    if lost:
        parts.append(text(RIGHT, top + 10, f"{lost} not above 0, not shown", "end"))
    return frame(WIDTH, HEIGHT, f"{y_label} against {x_label}", parts)


def _known(points: Points) -> Known:
    return [(x, y) for x, y in points if y is not None and math.isfinite(y)]


def _key(colours: dict[str, int]) -> tuple[list[str], float]:
    parts, height = legend(colours, LEFT, RIGHT)
    return parts, height + TOP - 6


def _axes(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str, xs: Sequence[float]) -> str:
    parts = []
    for y in y_axis.ticks():
        at = y_axis.at(y)
        parts.append(f'<line class="grid" x1="{x_axis.start:g}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(text(x_axis.start - 6, at + 4, number(y), "end"))
    for x in x_axis.ticks(xs):
        inside = WIDTH - width_of(number(x)) / 2
        parts.append(text(min(x_axis.at(x), inside), HEIGHT - BOTTOM + 16, number(x), "middle"))
    parts.append(text((x_axis.start + RIGHT) / 2, HEIGHT - 6, x_label, "middle"))
    parts.append(text(12, (y_axis.start + y_axis.end) / 2, y_label, "middle", turn=-90))
    return "".join(parts)


def _area(x_axis: Axis, y_axis: Axis, band: Band, colour: int) -> str:
    there = [(x, low) for x, low, _ in band]
    back = [(x, high) for x, _, high in reversed(band)]
    return f'<polygon class="band c{colour}" points="{_path(x_axis, y_axis, [*there, *back])}"/>'


def _curve(x_axis: Axis, y_axis: Axis, points: Known, name: str, colour: int) -> str:
    path = _path(x_axis, y_axis, points)
    line = f'<polyline class="curve c{colour}" points="{path}"><title>{escape(name)}</title></polyline>'
    if len(points) > FEW:
        return line
    places = (place.split(",") for place in path.split())
    return line + "".join(f'<circle class="dot c{colour}" cx="{x}" cy="{y}" r="3"/>' for x, y in places)


def _path(x_axis: Axis, y_axis: Axis, points: Known) -> str:
    return " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)


def _values(x_axis: Axis, top: float, shown: Mapping[str, Sequence[Known]], x_label: str) -> list[str]:
    """Strips from top to bottom that say, when pointed at, what the curves have there."""
    by_x: dict[float, dict[str, list[str]]] = {}
    for name, group in shown.items():
        for curve in group:
            for x, y in curve:
                by_x.setdefault(x, {}).setdefault(name, []).append(f"{y:.4g}")
    every = -(-len(by_x) // PLACES) or 1
    xs = sorted(by_x)[::every]
    if not xs:  # all runs diverged
        return []
    at = [x_axis.at(x) for x in xs]
    edges = [x_axis.start, *((a + b) / 2 for a, b in pairwise(at)), float(RIGHT)]
    parts = []
    for x, (left, right) in zip(xs, pairwise(edges), strict=True):
        said = [f"{x_label} {x:g}", *(f"{name}: {', '.join(values)}" for name, values in by_x[x].items())]
        place = f'x="{left:.2f}" y="{top:.1f}" width="{right - left:.2f}" height="{HEIGHT - BOTTOM - top:.1f}"'
        parts.append(titled(f'<rect class="hit" {place}/>', said))
    return parts
