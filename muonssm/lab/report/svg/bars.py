"""Means with their deviations, a row each, and what the paper has beside them."""

from __future__ import annotations

from collections.abc import Mapping

from .axes import Axis, number
from .colours import MOST, colours_of
from .frame import frame, text, titled, width_of

ROW, PLOT = 28, 250
LONGEST = 96  # pixels of a name beside its row; if one is longer, all names stand above their rows
ABOVE = 18  # pixels of that line


def bars(
    groups: Mapping[str, tuple[float | None, float | None]], y_label: str, *, paper: Mapping[str, float] | None = None
) -> str:
    """A dot a name with whiskers of one deviation, and the number beside; a diamond where the paper has one.

    Dots, since the axis need not begin at 0.

    Args:
        groups: name to `(mean, deviation)`; the mean is None of runs that diverged, the deviation of a single run.
        y_label: what is measured.
        paper: the paper's figure, by name.
    """
    paper = paper or {}
    colours = colours_of(list(groups), "groups") if len(groups) <= MOST else dict.fromkeys(groups, 2)
    ends = [m + s * (d or 0.0) for m, d in groups.values() if m is not None for s in (-1, 1)]
    longest = max((1.1 * width_of(name) for name in groups), default=0)
    above = ABOVE if longest > LONGEST else 0  # beside long names a phone has no room for a chart
    left, row_height = 10 + (0 if above else longest + 8), ROW + above
    axis = Axis.over([*ends, *(paper[name] for name in groups if name in paper)], left, left + PLOT, padded=True)
    bottom = 8 + row_height * len(groups)
    parts = []
    for x in axis.ticks():
        at = axis.at(x)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="8" y2="{bottom}"/>')
        parts.append(text(at, bottom + 15, number(x), "middle"))
    for i, (name, (mean, deviation)) in enumerate(groups.items()):
        y = 8 + row_height * i + above + ROW / 2
        said = _said(mean, deviation)
        marks = "" if mean is None else _dot(axis, y, mean, deviation, colours[name])
        lines = [f"{name}: {said}"]
        if name in paper:
            marks += _diamond(axis.at(paper[name]), y)
            lines.append(f"paper: {paper[name]:g}")
        named = (
            text(left, y - above + 2, name, "start", "strong")
            if above
            else text(left - 8, y + 4, name, "end", "strong")
        )
        row = named + marks + text(left + PLOT + 10, y + 4, said)
        parts.append(titled(row, lines))
    parts.append(text(left + PLOT / 2, bottom + 32, y_label, "middle"))
    if any(name in paper for name in groups):
        parts.append(_diamond(left + PLOT + 16, bottom + 28) + text(left + PLOT + 26, bottom + 32, "paper"))
    width = left + PLOT + 20 + max((width_of(_said(*group)) for group in groups.values()), default=0)
    return frame(round(max(width, longest + 20)), bottom + 40, y_label, parts)


def _said(mean: float | None, deviation: float | None) -> str:
    if mean is None:
        return "diverged"
    if deviation is None:
        return f"{mean:.4g}"
    return f"{mean:.4g} ± {0 if deviation < 1e-6 * abs(mean) else deviation:.2g}"  # rounding is no deviation


def _dot(axis: Axis, y: float, mean: float, deviation: float | None, colour: int) -> str:
    dot = f'<circle class="dot c{colour}" cx="{axis.at(mean):.1f}" cy="{y:.1f}" r="5"/>'
    if deviation is None:
        return dot
    low, high = (axis.at(mean + sign * deviation) for sign in (-1, 1))
    ends = "".join(
        f'<line class="whisker c{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 5:.1f}" y2="{y + 5:.1f}"/>'
        for x in (low, high)
    )
    across = f'<line class="whisker c{colour}" x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return across + ends + dot


def _diamond(x: float, y: float) -> str:
    corners = ((x - 5.5, y), (x, y - 5.5), (x + 5.5, y), (x, y + 5.5))
    return f'<polygon class="paper" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}"/>'
