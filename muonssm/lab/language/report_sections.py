"""The report's sections about a language model: zero-shot tasks and needles in haystacks."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.report import page
from muonssm.lab.report.page import Section

from . import zero_shot
from .needle_page import needle_figures
from .paper import published_needle, published_zero_shot


def sections(experiment: Experiment) -> list[Section]:
    """Return a section for each kind of evaluation that was run."""
    scores, needles = experiment.read_all("zero-shot.json"), experiment.read_all("needle.json")
    backbone = experiment.task.model.backbone  # type: ignore[attr-defined]
    return [
        *([Section("zero-shot", "Zero-shot", _zero_shot(scores, backbone))] if scores else []),
        *([Section("needle", "Needle in a haystack", _needle(needles, backbone))] if needles else []),
    ]


def missing(experiment: Experiment) -> list[str]:
    """Return the evaluations that were not run, each with its command."""
    run = experiment.folder(experiment.trained_runs[-1]).path
    commands = {
        "zero-shot.json": f"zero-shot scores: `muonssm eval {run} --tasks paper`",
        "needle.json": f"needle in a haystack: `muonssm needle {run}`",
    }
    return [text for name, text in commands.items() if not experiment.read_all(name)]


def _zero_shot(results: dict[str, Any], backbone: str) -> Markup:
    rows: dict[str, dict[str, float]] = {}
    remarks, others = [], []
    for name, result in results.items():
        paper_columns, other_scores = zero_shot.rows(result, {}, name)
        rows |= {f"{name}: {row}" if row == "standard error" else row: scores for row, scores in paper_columns.items()}
        gaps = [zero_shot.missing(paper_columns[name])] if paper_columns else []
        remarks += [f"{name}: {text}" for text in (*gaps, *zero_shot.notes(result)) if text]
        others += [[name, key, zero_shot.number(value, 4)] for key, value in other_scores.items()]
    text = "Tasks of lm-eval without examples in the prompt; accuracies in percent, ppl is perplexity."
    return page.join(
        page.paragraph(text, soft=True),
        _zero_shot_table(rows, backbone) if rows else Markup(),
        page.table(["", "other tasks", "score"], others) if others else Markup(),
        *(page.paragraph(remark, soft=True) for remark in remarks),
    )


def _zero_shot_table(rows: dict[str, dict[str, float]], backbone: str) -> Markup:
    published = {f"paper, {variant}": row for variant, row in published_zero_shot(backbone).items()}
    (tasks, units, *ours), paper = zero_shot.cells(rows), zero_shot.cells(published)[2:]
    head = [f"{task} {unit}".strip() for task, unit in zip(tasks, units, strict=True)]
    return page.table(head, ours, paper)


def _needle(results: dict[str, Any], backbone: str) -> Markup:
    text = "Share of answers that contain the value, by the length of the prompt and the depth of the needle in it."
    samples = "; ".join(f"{name}: {result['settings']['samples']} samples per cell" for name, result in results.items())
    pictures = [
        page.figures(page.figure(f"{name}, {caption}", picture) for caption, picture in needle_figures(result))
        for name, result in results.items()
    ]
    table = _needle_table(results, backbone)
    return page.join(page.paragraph(text, soft=True), table, page.paragraph(f"{samples}.", soft=True), *pictures)


def _needle_table(results: dict[str, Any], backbone: str) -> Markup:
    scores = {
        name: {(cell["variant"], cell["length"]): cell["score"] for cell in result["cells"]}
        for name, result in results.items()
    }
    columns = sorted({key for row in scores.values() for key in row})
    published = {
        f"paper, {variant}": {(needle, n): score for needle, row in rows.items() for n, score in row.items()}
        for variant, rows in published_needle(backbone).items()
    }

    def cells(rows: dict[str, Any]) -> list[list[str]]:
        return [[name, *(f"{row[key]:.1f}" if key in row else "-" for key in columns)] for name, row in rows.items()]

    paper = {name: row for name, row in published.items() if row.keys() & set(columns)}
    head = ["found, %", *(f"{needle}, {length}" for needle, length in columns)]
    return page.table(head, cells(scores), cells(paper))
