"""The colors of pages and figures: CSS variables with one value for light mode and one for dark mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCALE_STEPS = 20  # the sequential color scale has the variables s0 (lowest) to s20 (highest)
SCALE_LIGHT = ("#fcefdc", "#86c2bd", "#0d566c")  # lowest, middle, highest
SCALE_DARK = ("#3d2f1f", "#2a6b76", "#6ad4ea")
TEXT_ON_SCALE = ("#000000", "#ffffff")


def rgb(color: str) -> tuple[int, ...]:
    """Return red, green and blue, 0 to 255, of `#rrggbb`."""
    return tuple(int(color[i : i + 2], 16) for i in (1, 3, 5))


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the contrast ratio of WCAG 2: from 1 (the same color) to 21 (black on white)."""

    def luminance(color: Sequence[int]) -> float:
        shares = (x / 255 for x in color)
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def scale(stops: Sequence[str]) -> dict[str, str]:
    """Interpolate three colors: `s0` to `s20` are the scale, `t0` to `t20` the text color that is readable on each."""
    colors = {}
    for i in range(SCALE_STEPS + 1):
        position = 2 * i / SCALE_STEPS
        first, second = (rgb(stop) for stop in (stops[:2] if position < 1 else stops[1:]))
        weight = position if position < 1 else position - 1
        mixed = tuple(round(x + (y - x) * weight) for x, y in zip(first, second, strict=True))
        colors[f"s{i}"] = "#" + "".join(f"{x:02x}" for x in mixed)
        colors[f"t{i}"] = max(TEXT_ON_SCALE, key=lambda text: contrast(rgb(text), mixed))
    return colors


LIGHT = {
    "ink": "#1d2430", "soft": "#5b6575", "line": "#d9dee6", "page": "#ffffff", "card": "#f6f7f9",
    "right": "#15803d", "wrong": "#b91c1c", "none": "#b4bcc8",
    "c0": "#8a94a6", "c1": "#c2410c", "c2": "#1d4ed8", "c3": "#15803d",
    "c4": "#9333ea", "c5": "#0e8fa8", "c6": "#db2777", "c7": "#a16207",
    **scale(SCALE_LIGHT),
}  # fmt: skip
DARK = {
    "ink": "#e6e9ef", "soft": "#9aa4b5", "line": "#323a48", "page": "#14181f", "card": "#1c222c",
    "right": "#4ade80", "wrong": "#f87171", "none": "#4a5464",
    "c0": "#8f9bb0", "c1": "#fb923c", "c2": "#60a5fa", "c3": "#4ade80",
    "c4": "#c084fc", "c5": "#22d3ee", "c6": "#f472b6", "c7": "#facc15",
    **scale(SCALE_DARK),
}  # fmt: skip
MAX_SERIES = 8
DASHES = ("-", (0, (4, 2)), (0, (1.2, 1.6)))  # solid; dashed from the ninth name, dotted from the seventeenth
MAX_STYLES = MAX_SERIES * len(DASHES)
FIXED_SERIES = {"plain": "c0", "muon": "c1"}  # these two have the same color in every figure


def series_colors(names: Sequence[str], argument: str) -> dict[str, str]:
    """Assign each name one of the eight series colors; `plain` and `muon` always get theirs."""
    if len(names) > MAX_SERIES:
        raise ValueError(f"{argument} must have at most {MAX_SERIES} names, one color each, got {len(names)}")
    taken = {FIXED_SERIES[name] for name in names if name in FIXED_SERIES}
    others = [f"c{i}" for i in (*range(len(FIXED_SERIES), MAX_SERIES), *range(len(FIXED_SERIES)))]
    free = iter(color for color in others if color not in taken)
    return {name: FIXED_SERIES[name] if name in FIXED_SERIES else next(free) for name in names}


def series_styles(names: Sequence[str], argument: str) -> dict[str, tuple[str, Any]]:
    """Assign each name a series color and a dash pattern; the first eight are solid, `plain` and `muon` always."""
    if len(names) > MAX_STYLES:
        raise ValueError(f"{argument} must have at most {MAX_STYLES} names, one style each, got {len(names)}")
    ordered = sorted(names, key=lambda name: name not in FIXED_SERIES)
    styles: dict[str, tuple[str, Any]] = {}
    for dash, start in zip(DASHES, range(0, len(names), MAX_SERIES), strict=False):
        colors = series_colors(ordered[start : start + MAX_SERIES], argument)
        styles |= {name: (color, dash) for name, color in colors.items()}
    return {name: styles[name] for name in names}


def css_variables(colors: Mapping[str, str]) -> str:
    """Return CSS declarations that set each variable."""
    return " ".join(f"--{name}: {value};" for name, value in colors.items())
