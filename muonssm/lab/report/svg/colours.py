"""The colours of pages and pictures: names with a value for light and one for dark, and scales from one to another."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

LIGHT = {
    "ink": "#1d2430", "soft": "#5b6575", "line": "#d9dee6", "page": "#ffffff", "card": "#f6f7f9",
    "right": "#15803d", "wrong": "#b91c1c", "none": "#b4bcc8",
    "c0": "#8a94a6", "c1": "#c2410c", "c2": "#1d4ed8", "c3": "#15803d",
    "c4": "#9333ea", "c5": "#0e8fa8", "c6": "#db2777", "c7": "#a16207",
}  # fmt: skip
DARK = {
    "ink": "#e6e9ef", "soft": "#9aa4b5", "line": "#323a48", "page": "#14181f", "card": "#1c222c",
    "right": "#4ade80", "wrong": "#f87171", "none": "#4a5464",
    "c0": "#8f9bb0", "c1": "#fb923c", "c2": "#60a5fa", "c3": "#4ade80",
    "c4": "#c084fc", "c5": "#22d3ee", "c6": "#f472b6", "c7": "#facc15",
}  # fmt: skip
FIXED = {"plain": 0, "muon": 1}  # the same on every picture
MOST = 8

STEPS = 20  # of the sequential scale: classes s0 to s20
SCALE_LIGHT = ("#fcefdc", "#86c2bd", "#0d566c")  # least, middle, most
SCALE_DARK = ("#3d2f1f", "#2a6b76", "#6ad4ea")
INKS = ("#000000", "#ffffff")  # for numbers on it: whichever stands out more


def colours_of(names: Sequence[str], argument: str) -> dict[str, int]:
    """Which of the eight colours a name has: plain and muon always theirs, others the next that is free."""
    if len(names) > MOST:
        raise ValueError(f"{argument} has {len(names)} names; it may have at most {MOST}, a colour each")
    taken = {FIXED[name] for name in names if name in FIXED}
    free = iter(i for i in (*range(len(FIXED), MOST), *FIXED.values()) if i not in taken)
    return {name: FIXED[name] if name in FIXED else next(free) for name in names}


def variables(colours: Mapping[str, str]) -> str:
    """CSS that gives every name its value."""
    return " ".join(f"--{name}: {value};" for name, value in colours.items())


def resolved(rules: str, colours: Mapping[str, str]) -> str:
    """CSS with values for names, for programs that know no variables."""
    return re.sub(r"var\(--(\w+)\)", lambda found: colours[found[1]], rules)


def scale(stops: Sequence[str], selector: Callable[[str, int], str]) -> str:
    """CSS of the steps of a scale: `selector("rect", i)` is filled, `selector("text", i)` is readable on it."""
    rules = []
    for i in range(STEPS + 1):
        at = 2 * i / STEPS
        first, second = (rgb(stop) for stop in (stops[:2] if at < 1 else stops[1:]))
        mixed = tuple(round(x + (y - x) * (at if at < 1 else at - 1)) for x, y in zip(first, second, strict=True))
        ink = max(INKS, key=lambda ink: contrast(rgb(ink), mixed))
        fill = "#" + "".join(f"{x:02x}" for x in mixed)
        rules.append(f"{selector('rect', i)} {{ fill: {fill}; }} {selector('text', i)} {{ fill: {ink}; }}\n")
    return "".join(rules)


def rgb(colour: str) -> tuple[int, ...]:
    """Red, green and blue, 0 to 255, of `#rrggbb`."""
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """As WCAG 2 defines it: from 1 (the same) to 21 (black on white)."""

    def light(colour: Sequence[int]) -> float:
        shares = (x / 255 for x in colour)
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)
