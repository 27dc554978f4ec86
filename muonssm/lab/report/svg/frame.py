"""What all pictures have: the element around them, their style, lines of text, and the form of a file of their own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from .colours import DARK, LIGHT, MOST, SCALE_DARK, SCALE_LIGHT, resolved, scale

READABLE = 440  # pixels that may shrink to a phone's width
LETTER = 6.8  # width of a letter of 11 pixels in a wide font, about
SERIES = "".join(
    f".c{i} {{ stroke: var(--c{i}); }} .dot.c{i}, .band.c{i} {{ fill: var(--c{i}); }}\n" for i in range(MOST)
)
RULES = f"""
svg text {{ font: 11px system-ui, sans-serif; fill: var(--soft); }}
svg text.strong {{ fill: var(--ink); font-weight: 600; }}
.grid {{ stroke: var(--line); stroke-width: 1; }}
.frame {{ fill: none; stroke: var(--line); }}
.curve {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; }}
{SERIES}.dot {{ stroke: var(--card); stroke-width: 1; }} .band {{ stroke: none; fill-opacity: 0.18; }}
.whisker {{ stroke-width: 1.8; }} .paper {{ fill: none; stroke: var(--ink); stroke-width: 1.4; }}
.hit {{ fill: none; pointer-events: all; }}
.none {{ fill: none; stroke: var(--none); stroke-dasharray: 3 3; }}
.mark {{ fill: none; stroke: var(--c1); stroke-width: 2.5; }}
.right {{ fill: var(--right); stroke: var(--line); }} .wrong {{ fill: var(--wrong); stroke: var(--line); }}
svg text.count {{ fill: var(--ink); }} svg text.on {{ fill: var(--page); font-weight: 600; }}
"""


def _step(element: str, i: int) -> str:
    return f"svg {element}.s{i}"


RULES_LIGHT, RULES_DARK = scale(SCALE_LIGHT, _step), scale(SCALE_DARK, _step)
ALONE = "svg { background: var(--card); }\n"


def frame(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """The element, which shrinks with the page, a wide one not to where its text cannot be read, and never grows."""
    least = f"min-width:{0.75 * width:.0f}px;" if width > READABLE else ""
    size = f'viewBox="0 0 {width:g} {height:g}" style="{least}max-width:{width:g}px"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def standalone(picture: str) -> str:
    """The same picture as the text of an .svg file, with colours for light and dark of its own.

    One that is such a file already stays as it is.
    """
    head = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"[^>]*>', picture)
    if "xmlns=" in picture.partition(">")[0]:
        return picture
    if head is None:
        raise ValueError(f"picture is {picture[:40]!r}...; it may be what a function of muonssm.lab.report.svg returns")
    light = resolved(ALONE + RULES, LIGHT) + RULES_LIGHT
    dark = resolved(ALONE + RULES, DARK) + RULES_DARK
    style = f"<style>{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n</style>"
    size = f'xmlns="http://www.w3.org/2000/svg" width="{head[1]}" height="{head[2]}"'
    return f"<svg {size}{head[0][4:]}{style}{picture[head.end() :]}"


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "", turn: float = 0) -> str:
    """A line of text at a point, turned about it by degrees."""
    turned = f' transform="rotate({turn:g} {x:.1f} {y:.1f})"' if turn else ""
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>{escape(content)}</text>'


def width_of(content: str) -> float:
    """About how wide a line of text is."""
    return LETTER * len(content)


def legend(colours: dict[str, int], left: float, right: float) -> tuple[list[str], float]:
    """A key of the names in rows from the top, and how much height they take."""
    parts, x, y = [], left, 12.0
    for name, i in colours.items():
        width = 22 + width_of(name) + 14
        if x > left and x + width - 14 > right:
            x, y = left, y + 16
        parts.append(f'<line class="curve c{i}" x1="{x:.1f}" x2="{x + 16:.1f}" y1="{y - 4:.1f}" y2="{y - 4:.1f}"/>')
        parts.append(text(x + 22, y, name))
        x += width
    return parts, y + 6


def titled(content: str, lines: Sequence[str]) -> str:
    """Marks with lines that show when they are pointed at."""
    return f"<g><title>{escape(chr(10).join(lines))}</title>{content}</g>"
