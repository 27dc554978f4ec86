"""Confusion matrices: what was taken for what."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .frame import frame


def confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Counts by true class (rows) and found class (columns), shaded by the share of their row."""
    n = len(names)
    longest = max(len(name) for name in names)
    cell, left = (38 if n <= 12 else 18), min(150, 14 + 7 * longest)
    top = min(120, 14 + 5 * longest)
    parts = []
    for i, (row, name) in enumerate(zip(matrix, names, strict=True)):
        y, total = top + i * cell, max(1, sum(row))
        parts.append(f'<text x="{left - 6}" y="{y + cell / 2 + 4}" text-anchor="end">{escape(name)}</text>')
        x = left + i * cell + cell / 2
        where = f'x="{x}" y="{top - 6}" transform="rotate(-40 {x} {top - 6})"'
        parts.append(f"<text {where}>{escape(name)}</text>")
        for j, count in enumerate(row):
            title = f"{escape(name)} taken for {escape(names[j])}: {count} of {sum(row)}"
            place = f'x="{left + j * cell}" y="{y}" width="{cell - 1}" height="{cell - 1}"'
            kind = "right" if i == j else "wrong"
            parts.append(
                f'<rect class="{kind}" {place} fill-opacity="{count / total:.3f}"><title>{title}</title></rect>'
            )
            if count and n <= 12:
                at = f'x="{left + j * cell + cell / 2}" y="{y + cell / 2 + 4}"'
                strong = " on" if count / total > 0.55 else ""
                parts.append(f'<text class="count{strong}" {at} text-anchor="middle">{count}</text>')
    return frame(left + n * cell + 60, top + n * cell + 8, "confusion matrix, rows are true classes", parts)
