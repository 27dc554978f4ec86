"""Where needles are found: the share of correct answers by depth and length, as an HTML page or an SVG figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muonssm.lab.core.files import write_text
from muonssm.lab.report import figures, page
from muonssm.lab.report.page import Article, Section

from .needle import BINS, Result, by_cell

TITLES = {"pk": "pk: number in noise", "number": "number: number in an essay", "uuid": "uuid: UUID in an essay"}
DEPTHS = [f"{100 * i // BINS} to {100 * (i + 1) // BINS}%" for i in range(BINS)]
MAX_ANSWER = 160  # characters of a wrong answer that are shown


def write_heatmap(result: Result, path: str | Path) -> Path:
    """Write the result of `run_needle` as a page (`.html`) or a figure (`.svg`), atomically."""
    path = Path(path)
    if path.suffix not in (".html", ".svg"):
        raise ValueError(f"path must end in .html or .svg, got {str(path)!r}")
    text = needle_page(result) if path.suffix == ".html" else needle_file(result)
    write_text(path, text)
    return path


def needle_page(result: Result) -> str:
    """The page as HTML text."""
    settings = result["settings"]
    introduction = (
        "Share of answers that contain the value, by the length of the prompt and the depth of the needle in it. "
        f"{settings['samples']} samples per variant and length, spread evenly over the depths; at most "
        f"{settings['answer_tokens']} tokens per answer; seed {settings['seed']}."
    )
    drawn = [page.figure(caption, figure) for caption, figure in needle_figures(result)]
    body = page.join(
        page.figures(drawn) if drawn else page.paragraph("No cell was run."),
        *(page.paragraph(text, soft=True) for text in _remarks(result)),
    )
    sections = [Section("scores", "Found by depth and length", body), *_wrong_answers(result)]
    title = "Needle in a haystack"
    return page.render(title, [Article(title, "", sections)], page.paragraph(introduction, soft=True), navigation=False)


def needle_file(result: Result) -> str:
    """The text of an .svg file with a panel per variant."""
    panels = [_panel(result, variant, TITLES.get(variant, variant)) for variant in by_cell(result)[0]]
    panels = panels or [_panel(result, "", "No cell was run.")]
    return figures.standalone(figures.side_by_side(panels, "share of needles found by depth and length"))


def needle_figures(result: Result) -> list[tuple[str, str]]:
    """The caption and the figure of each variant."""
    return [(TITLES.get(variant, variant), _panel(result, variant)) for variant in by_cell(result)[0]]


def _panel(result: Result, variant: str, title: str = "") -> str:
    _, lengths, cells = by_cell(result)
    columns = [_depths(cells.get((variant, length))) for length in lengths]
    tooltips = [
        [_tooltip(f"{variant}, {length} tokens", column[i]) for length, column in zip(lengths, columns, strict=True)]
        for i in range(BINS + 1)
    ]
    scores = [[None if column[i] is None else column[i]["score"] for column in columns] for i in range(BINS + 1)]
    return figures.heatmap(
        scores, [*DEPTHS, "all"], [str(length) for length in lengths], "depth of the needle", "length, tokens",
        format="{:.3g}", limits=(0.0, 100.0), total_row=True, title=title, tooltips=tooltips,
    )  # fmt: skip


def _depths(cell: dict[str, Any] | None) -> Sequence[Any]:
    """The bins of a cell and the whole cell; None for each if it was not run."""
    return [None] * (BINS + 1) if cell is None else [*cell["depths"], {**cell, "from": 0, "to": 1}]


def _tooltip(name: str, depth: dict[str, Any] | None) -> str:
    if depth is None or depth["score"] is None:
        return f"{name}: no sample"
    count = round(depth["score"] / 100 * depth["samples"])
    return f"{name}, depth {depth['from']:.0%} to {depth['to']:.0%}: {count} of {depth['samples']} found"


def _remarks(result: Result) -> list[str]:
    """Sentences about cells whose essay was too short for the haystack."""
    return [
        f"{cell['variant']}, {cell['length']} tokens: the essay is shorter than the haystack in {cell['repeated']} of "
        f"{cell['samples']} samples and is repeated there."
        for cell in result["cells"]
        if cell["repeated"]
    ]


def _wrong_answers(result: Result) -> list[Section]:
    """A section with the first wrong answer of each cell, if there are any."""
    rows = [
        [
            f"{cell['variant']}, {cell['length']} tokens, depth {wrong['depth']:.0%}",
            wrong["value"],
            wrong["answer"].strip()[:MAX_ANSWER],
        ]
        for cell in result["cells"]
        for wrong in cell["wrong"][:1]
    ]
    table = page.table(["cell", "needle", "answer"], rows, is_text=True)
    return [Section("wrong", "Wrong answers, one per cell", table)] if rows else []
