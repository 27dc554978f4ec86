"""Where needles are found: depth against length for every variant, as an SVG picture or an HTML page.

Colours are given as classes, with a set for light and one for dark: the picture follows the reader's setting also where
it stands alone, and a program that knows no such setting shows the light one.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from muonssm.lab.core.files import atomic
from muonssm.lab.report.page import document
from muonssm.lab.report.svg.colours import SCALE_DARK, SCALE_LIGHT, STEPS, scale

from .needle import BINS, Result, by_cell

CELL_WIDTH, CELL_HEIGHT, LEFT, TOP, GAP, LEGEND = 62, 24, 78, 46, 8, 48
LEAST_WIDTH = 310  # the legend and a panel's title have room
NAMES = {"pk": "pk: number in noise", "number": "number: number in an essay", "uuid": "uuid: UUID in an essay"}

PICTURE_STYLE = """
.hm { font: 11px system-ui, sans-serif; } .hm .value { font-variant-numeric: tabular-nums; }
.hm text { fill: #5b6575; } .hm .name { fill: #1d2430; font-size: 13px; font-weight: 600; }
.hm .none { fill: none; stroke: #b4bcc8; stroke-dasharray: 3 3; }
"""
PICTURE_STYLE_DARK = ".hm text { fill: #9aa4b5; } .hm .name { fill: #e6e9ef; } .hm .none { stroke: #4a5464; }\n"


def write_heatmap(result: Result, path: str | Path) -> Path:
    """Writes the result of `run_needle` as a page (`.html`) or a picture (`.svg`), all of it or nothing."""
    path = Path(path)
    if path.suffix not in (".html", ".svg"):
        raise ValueError(f"path is {str(path)!r}; it may end in .html or .svg")
    text = page(result) if path.suffix == ".html" else picture(result, by_cell(result)[0])
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def needle_figures(result: Result) -> list[tuple[str, str]]:
    """Name and picture of every variant, and of the scale of colours."""
    pictures = [(variant, picture(result, [variant], legend=False)) for variant in by_cell(result)[0]]
    return [*pictures, ("scale of colours", _svg(LEAST_WIDTH, LEGEND, "the scale of colours", [_legend(0)]))]


def page(result: Result) -> str:
    """The HTML, without outside files."""
    settings = result["settings"]
    figures = "".join(f"<figure>{figure}</figure>" for _, figure in needle_figures(result)[:-1])
    about = (
        f"{settings['samples']} samples a variant and length, of which every tenth of the depth has about a tenth; "
        f"at most {settings['answer_tokens']} tokens for an answer; seed {settings['seed']}."
    )
    body = [
        "<h1>Needle in a haystack</h1>",
        '<p class="soft">Share of answers that contain the value, by how long the prompt is and how deep in it the '
        f"needle lies. {escape(about)}</p>",
        f'<div class="figures">{figures or "<p>No cell was run.</p>"}</div>',
        needle_figures(result)[-1][1],
        *_repeated(result),
        _wrong(result),
    ]
    return document("Needle in a haystack", "".join(body))


def _repeated(result: Result) -> list[str]:
    """What has to be known of essays that were too short."""
    return [
        f'<p class="soft">{escape(cell["variant"])}, {cell["length"]} tokens: the essay is shorter than the haystack '
        f"in {cell['repeated']} of {cell['samples']} samples, and begins anew there.</p>"
        for cell in result["cells"]
        if cell["repeated"]
    ]


def _wrong(result: Result) -> str:
    """The first wrong answers, to see what the model says instead."""
    rows = []
    for cell in result["cells"]:
        for one in cell["wrong"][:1]:
            where = f"{cell['variant']}, {cell['length']} tokens, depth {one['depth']:.0%}"
            texts = (f"<td><code>{escape(text)}</code></td>" for text in (one["value"], one["answer"].strip()[:160]))
            rows.append(f"<tr><td>{escape(where)}</td>{''.join(texts)}</tr>")
    if not rows:
        return ""
    head = "<tr><th>where</th><th>needle</th><th>answer</th></tr>"
    return f'<h2>Wrong answers, one of each</h2><div class="wide answers"><table>{head}{"".join(rows)}</table></div>'


def picture(result: Result, variants: Sequence[str], legend: bool = True) -> str:
    """SVG text: a panel for every variant, side by side, and the legend below."""
    _, lengths, cells = by_cell(result)
    step = max(LEAST_WIDTH, LEFT + CELL_WIDTH * len(lengths) + 12)
    bottom = TOP + CELL_HEIGHT * (BINS + 1) + GAP + 38
    parts = []
    for i, variant in enumerate(variants):
        columns = [cells.get((variant, length)) for length in lengths]
        parts.append(f'<g transform="translate({i * step} 0)">{_panel(variant, lengths, columns)}</g>')
    if legend:
        parts.append(f'<g transform="translate({LEFT} 0)">{_legend(bottom)}</g>')
    size = step * max(1, len(variants)), bottom + (LEGEND if legend else 0)
    return _svg(*size, "share of needles found by depth and length", parts)


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    light, dark = PICTURE_STYLE + scale(SCALE_LIGHT, _step), PICTURE_STYLE_DARK + scale(SCALE_DARK, _step)
    style = f"{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n"
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="hm" {size} role="img" aria-label="{escape(label)}">'
    return f"{head}<style>{style}</style>{''.join(parts)}</svg>"


def _step(element: str, i: int) -> str:
    """A colour of the scale, from s0 (nothing found) to s20 (all): of a cell, and of the number in it."""
    return f".hm {element}.s{i}"


def _panel(variant: str, lengths: Sequence[int], columns: Sequence[dict[str, Any] | None]) -> str:
    bottom = TOP + CELL_HEIGHT * BINS + GAP
    middle = LEFT + CELL_WIDTH * len(lengths) / 2
    parts = [_text(LEFT, 18, NAMES.get(variant, variant), "start", "name")]
    parts.append(_text(LEFT, 36, "depth of the needle (down), found in %", "start"))
    for i in range(BINS):
        y = TOP + CELL_HEIGHT * i
        parts.append(_text(LEFT - 6, y + CELL_HEIGHT / 2 + 4, f"{100 * i // BINS} to {100 * (i + 1) // BINS}%", "end"))
    parts.append(_text(LEFT - 6, bottom + CELL_HEIGHT / 2 + 4, "all", "end"))
    for j, (length, cell) in enumerate(zip(lengths, columns, strict=True)):
        x = LEFT + CELL_WIDTH * j
        depths = [] if cell is None else [*cell["depths"], {**cell, "from": 0, "to": 1}]
        for i in range(BINS + 1):
            y = TOP + CELL_HEIGHT * i if i < BINS else bottom
            parts.append(_square(x, y, f"{variant}, {length} tokens", depths[i] if depths else None))
        parts.append(_text(x + CELL_WIDTH / 2, bottom + CELL_HEIGHT + 15, f"{length}", "middle"))
    parts.append(_text(middle, bottom + CELL_HEIGHT + 30, "length, tokens", "middle"))
    return "".join(parts)


def _square(x: float, y: float, name: str, depth: dict[str, Any] | None) -> str:
    """A cell with the share in percent, coloured by it; an outline where there is no sample."""
    place = f'x="{x + 1:g}" y="{y + 1:g}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" rx="3"'
    if depth is None or depth["score"] is None:
        return f'<rect class="none" {place}><title>{escape(name)}: no sample</title></rect>'
    found, step = (round(depth["score"] / 100 * count) for count in (depth["samples"], STEPS))
    title = f"{name}, depth {depth['from']:.0%} to {depth['to']:.0%}: {found} of {depth['samples']} found"
    number = _text(x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2 + 4, f"{depth['score']:.3g}", "middle", f"value s{step}")
    return f'<g><title>{escape(title)}</title><rect class="s{step}" {place}/>{number}</g>'


def _legend(y: float) -> str:
    each = 110 / (STEPS + 1)
    steps = (
        f'<rect class="key s{i}" x="{1 + each * i:.2f}" y="{y + 14}" width="{each + 0.3:.2f}" height="10"/>'
        for i in range(STEPS + 1)
    )
    return (
        "".join(steps)
        + _text(1, y + 38, "0% found", "start")
        + _text(111, y + 38, "100%", "end")
        + f'<rect class="none" x="130" y="{y + 13}" width="16" height="12" rx="3"/>'
        + _text(152, y + 23, "no sample", "start")
    )


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
