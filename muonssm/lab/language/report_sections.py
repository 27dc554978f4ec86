"""The report's sections about a language model: zero-shot tasks and needles in haystacks."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.report import page
from muonssm.lab.report.page import Section

from . import zero_shot
from .needle import paper_needle
from .needle_page import needle_figures
from .result_files import check_needle, check_zero_shot

Scores = dict[str, dict[str, float]]  # by the row's name and the column's key


def sections(experiment: Experiment) -> list[Section]:
    """A section for each kind of evaluation that was run."""
    scores = experiment.read_all("zero-shot.json", check_zero_shot)
    needles = experiment.read_all("needle.json", check_needle)
    backbone = experiment.task.model.backbone  # type: ignore[attr-defined]
    return [
        *([Section("zero-shot", "Zero-shot", zero_shot_section(scores, backbone))] if scores else []),
        *([Section("needle", "Needle in a haystack", needle_section(needles, backbone))] if needles else []),
    ]


def missing_evaluations(experiment: Experiment) -> list[str]:
    """Evaluations that were not run, each with its command."""
    run = experiment.folder(experiment.trained_runs[-1]).path
    commands = {
        "zero-shot.json": f"zero-shot scores: `muonssm eval {run} --tasks paper`",
        "needle.json": f"needle in a haystack: `muonssm needle {run}`",
    }
    return [text for name, text in commands.items() if not experiment.has_any(name)]


def zero_shot_section(results: dict[str, Any], backbone: str) -> Markup:
    """Zero-shot scores of some models of one backbone, by name, beside the paper's."""
    rows: Scores = {}
    remarks, others = [], []
    for name, result in results.items():
        scores, other_scores = zero_shot.split_scores(result)
        if scores:
            rows |= {name: scores, f"{name}: standard error": zero_shot.standard_errors(result)}
            remarks += [f"{name}: {text}" for text in [zero_shot.missing_columns(scores)] if text]
        remarks += [f"{name}: {text}" for text in zero_shot.notes(result)]
        others += [[name, key, zero_shot.format_score(value, 4)] for key, value in other_scores.items()]
    text = "Tasks of lm-eval without examples in the prompt; accuracies in percent, ppl is perplexity."
    return page.join(
        page.paragraph(text, soft=True),
        _zero_shot_table(rows, backbone) if rows else Markup(),
        page.table(["", "other tasks", "score"], others) if others else Markup(),
        *(page.paragraph(remark, soft=True) for remark in remarks),
    )


def _zero_shot_table(rows: Scores, backbone: str) -> Markup:
    published = {f"paper, {variant}": row for variant, row in zero_shot.paper_zero_shot(backbone).items()}
    (tasks, units, *ours), (_, _, *paper) = zero_shot.table_cells(rows), zero_shot.table_cells(published)
    head = [f"{task} {unit}".strip() for task, unit in zip(tasks, units, strict=True)]
    return page.table(head, ours, paper)


def needle_section(results: dict[str, Any], backbone: str) -> Markup:
    """Needles that some models of one backbone found, by name, beside the paper's; and heat maps."""
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
    measured = {key for row in scores.values() for key in row}
    published = {
        f"paper, {variant}": {(needle, n): score for needle, row in rows.items() for n, score in row.items()}
        for variant, rows in paper_needle(backbone).items()
    }

    shared = {name: row for name, row in published.items() if row.keys() & measured}
    paper = shared or published  # other lengths than the paper's stand beside all of its scores
    columns = sorted(measured if shared else measured.union(*published.values()))

    def cells(rows: dict[str, Any]) -> list[list[str]]:
        return [[name, *(f"{row[key]:.1f}" if key in row else "-" for key in columns)] for name, row in rows.items()]

    head = ["found, %", *(f"{needle}, {length}" for needle, length in columns)]
    return page.table(head, cells(scores), cells(paper))
