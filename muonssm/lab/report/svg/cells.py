"""A table of numbers in colours: what two settings do together."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .colours import STEPS
from .frame import frame, text, titled, width_of

HEIGHT, GAP, BAR = 26, 18, 12  # of a cell; between cells and the colour scale; of the scale
NARROW, WIDE, MOST = 14, 52, 460  # width of a cell, and of all where there are many
SPACED = 18  # least distance of two names below the cells, where they stand aslant
Values = Sequence[Sequence[float | None]]


def heatmap(
    values: Values,
    rows: Sequence[str],
    columns: Sequence[str],
    row_label: str,
    column_label: str,
    *,
    format: str = "{:.2f}",
    show: bool = True,
    log: bool = False,
    marks: Collection[tuple[int, int]] = (),
) -> str:
    """Cells coloured from the least to the most of `values`, with a scale beside them.

    Args:
        values: a list a row; None where there is nothing, which is an empty outline.
        rows, columns: their names.
        row_label, column_label: what the names are of.
        format: of a number.
        show: whether cells with enough room have their number in them.
        log: colours by the logarithm; what is not above 0 has no colour then.
        marks: cells `(row, column)` with a strong outline.
    """
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        sizes = [len(row) for row in values]
        raise ValueError(f"values has rows of {sizes} cells; it may have {len(rows)} rows of {len(columns)}")
    known = [x for row in values for x in row if x is not None and _has_colour(x, log)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    width = max(NARROW, min(WIDE, MOST / max(1, len(columns))))
    left, top = 24 + max(map(width_of, rows), default=0), 8
    bottom, right = top + HEIGHT * len(rows), left + width * len(columns)
    parts = [text(12, (top + bottom) / 2, row_label, "middle", turn=-90)]
    parts += [text(left - 6, top + HEIGHT * (i + 0.5) + 4, name, "end") for i, name in enumerate(rows)]
    names, below = _column_names(columns, left, bottom, width)
    parts += [*names, text((left + right) / 2, bottom + below + 14, column_label, "middle")]
    numbers = show and all(width_of(format.format(x)) + 4 <= width for x in known)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            said = "nothing" if value is None else format.format(value)
            title = [f"{row_label} {rows[i]}, {column_label} {columns[j]}: {said}"]
            step = _step(value, low, high, log) if value is not None and _has_colour(value, log) else None
            number = said if numbers else ""
            parts.append(titled(_cell(left + width * j, top + HEIGHT * i, width, step, number), title))
    parts += [_mark(left + width * j, top + HEIGHT * i, width) for i, j in sorted(marks)]
    ends = [format.format(x) for x in (high, low)] if known else ["", ""]
    parts.append(_scale(right + GAP, top, bottom, ends))
    full = right + GAP + BAR + 12 + max(map(width_of, ends))
    return frame(math.ceil(full), bottom + below + 22, f"by {row_label} and {column_label}", parts)


def _has_colour(value: float, log: bool) -> bool:
    return math.isfinite(value) and not (log and value <= 0)


def _step(value: float, low: float, high: float, log: bool) -> int:
    """0 for the least to STEPS for the most; the middle where all are the same."""
    if low == high:
        return STEPS // 2
    low, high, at = (math.log(x) if log else x for x in (low, high, value))
    return round((at - low) / (high - low) * STEPS)


def _column_names(columns: Sequence[str], left: float, bottom: float, width: float) -> tuple[list[str], float]:
    """Below the cells, aslant where they are long and not all where they would touch, and the height that takes."""
    longest = max(map(width_of, columns), default=0)
    at = [left + width * (j + 0.5) for j in range(len(columns))]
    if longest + 4 <= width:
        return [text(x, bottom + 16, name, "middle") for x, name in zip(at, columns, strict=True)], 18
    shown = list(zip(at, columns, strict=True))[:: math.ceil(SPACED / width)]
    parts = [text(x + 4, bottom + 12, name, "end", turn=-45) for x, name in shown]
    return parts, 14 + 0.71 * longest


def _cell(x: float, y: float, width: float, step: int | None, number: str) -> str:
    place = f'x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{HEIGHT - 2}" rx="3"'
    if step is None:
        return f'<rect class="none" {place}/>'
    return f'<rect class="s{step}" {place}/>' + (
        text(x + width / 2, y + HEIGHT / 2 + 4, number, "middle", f"s{step}") if number else ""
    )


def _mark(x: float, y: float, width: float) -> str:
    return f'<rect class="mark" x="{x + 1:.1f}" y="{y + 1:.1f}" width="{width - 2:.1f}" height="{HEIGHT - 2}" rx="3"/>'


def _scale(x: float, top: float, bottom: float, ends: Sequence[str]) -> str:
    each = (bottom - top) / (STEPS + 1)
    steps = (
        f'<rect class="key s{i}" x="{x:.1f}" y="{y:.2f}" width="{BAR}" height="{each + 0.3:.2f}"/>'
        for i, y in ((i, bottom - each * (i + 1)) for i in range(STEPS + 1))
    )
    high, low = ends
    if bottom - top < 2 * 12:  # one row: both at its ends would touch
        return "".join(steps) + text(x + BAR + 5, (top + bottom) / 2 + 4, f"{low} to {high}" if high != low else low)
    return "".join(steps) + text(x + BAR + 5, top + 9, high) + text(x + BAR + 5, bottom - 1, low)
