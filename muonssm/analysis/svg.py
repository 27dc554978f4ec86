"""Small pictures as SVG text, drawn with the colours of the page they stand in (light, dark or print)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 340, 230, 50, 40, 12
Points = Sequence[tuple[float, float | None]]


def lines(curves: Mapping[str, Sequence[Points]], x_label: str, y_label: str) -> str:
    """Curves by name, each name in one colour; a name may have several (seeds, folds). x counts whole things.

    Where y is None (a run that diverged) there is no point.
    """
    shown = {name: [[(x, y) for x, y in curve if y is not None] for curve in group] for name, group in curves.items()}
    points = [point for group in shown.values() for curve in group for point in curve] or [(0.0, 0.0)]
    xs, ys = ([point[i] for point in points] for i in (0, 1))
    x_low, x_high, y_low, y_high = min(xs), max(xs), *_padded(min(ys), max(ys))
    right = WIDTH - 10

    def place(x: float, y: float) -> tuple[float, float]:
        along = (x - x_low) / (x_high - x_low or 1)
        return LEFT + along * (right - LEFT), HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - BOTTOM - TOP)

    parts = [_axes(x_low, x_high, y_low, y_high, place, x_label, y_label)]
    for i, (name, group) in enumerate(shown.items()):
        for curve in group:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
            parts.append(f'<polyline class="curve c{i}" points="{path}"><title>{escape(name)}</title></polyline>')
    return _svg(WIDTH, HEIGHT, f"{y_label} against {x_label}", parts)


def _axes(x_low: float, x_high: float, y_low: float, y_high: float, place, x_label: str, y_label: str) -> str:  # type: ignore[no-untyped-def]
    parts = []
    for y in _ticks(y_low, y_high):
        (x0, at), (x1, _) = place(x_low, y), place(x_high, y)
        parts.append(f'<line class="grid" x1="{x0:.1f}" x2="{x1:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{x0 - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in _ticks(x_low, x_high, least=1.0):
        at, bottom = place(x, y_low)
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{x:g}</text>')
    middle = (LEFT + WIDTH - 10) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    up = (HEIGHT - BOTTOM + TOP) / 2
    turned = f'transform="rotate(-90 12 {up})" text-anchor="middle"'
    parts.append(f'<text x="12" y="{up}" {turned}>{escape(y_label)}</text>')
    return "".join(parts)


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
    return _svg(left + n * cell + 60, top + n * cell + 8, "confusion matrix, rows are true classes", parts)


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px"'
    head = f'<svg {size} role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low or abs(high) or 1.0) * 0.05
    return (low - room if low < 0 or low > room else 0.0), high + room


def _ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """About five round numbers from low to high, `least` apart at least."""
    span = high - low or 1.0
    power = 10.0
    while power > span:
        power /= 10
    while power * 10 <= span:
        power *= 10
    step = next((factor * power for factor in (0.2, 0.5, 1.0, 2.0) if span / (factor * power) <= 6), 5 * power)
    step = max(step, least)
    first = -(-low // step)
    return [round(step * (first + i), 10) for i in range(int((high - first * step) / step + 1e-9) + 1)]
