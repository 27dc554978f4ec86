"""The page and the table of a study in stages: losses, zero-shot scores and needles beside the paper's rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from muonssm.lab.core.files import write_text
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.task import Metric
from muonssm.lab.report import page
from muonssm.lab.report.page import Article, Section
from muonssm.lab.report.report import write_report
from muonssm.version import __version__

from . import zero_shot
from .needle import paper_needle
from .pipeline import NEEDLE, PRETRAIN, SFT, ZERO_SHOT, CellResult, PipelineResult
from .report_sections import needle_section, zero_shot_section

LINKS = "Curves, settings and evaluations of each run are on its own page:"


def write_pipeline(result: PipelineResult) -> Path:
    """Write the page of every run, then study.json and the study's report.html; return the path of the last."""
    for cell in result.cells:
        for run in cell.runs.values():
            write_report([run])
    RunFolder(result.path).write("study.json", to_dict(result))
    path, title = result.path / "report.html", result.pipeline.title
    footer = f"Made by muonssm {__version__} from `{result.path}`."
    text = page.render(title, [Article(title, "", list(_sections(result)))], footer=footer)
    write_text(path, text)
    return path


def to_dict(result: PipelineResult) -> dict[str, Any]:
    """The study's numbers, as JSON."""
    scores = {
        cell.cell.folder: {
            "training": {stage: RunFolder(run).read("metrics.json") for stage, run in cell.runs.items()},
            **cell.evaluations,
        }
        for cell in result.cells
    }
    return {"study": asdict(result.pipeline), "scores": scores}


def text_table(result: PipelineResult) -> str:
    """Losses, zero-shot scores and needles as text, each with the paper's rows below."""
    blocks = [_block(training_rows(result))]
    for backbone in result.pipeline.backbones:
        cells = _cells_of(result, backbone)
        if ZERO_SHOT in result.pipeline.stages:
            blocks.append(_block(zero_shot.table_cells(_zero_shot_rows(cells, backbone))))
        if NEEDLE in result.pipeline.stages:
            blocks.append(_block(needle_rows(cells, backbone)))
    remarks = {note for cell in result.cells if ZERO_SHOT in cell.evaluations for note in _notes(cell)}
    return "\n\n".join([*blocks, *(["\n".join(sorted(remarks))] if remarks else [])])


def _block(rows: list[list[str]]) -> str:
    return "\n".join(line.rstrip() for line in zero_shot.aligned(rows))


def _notes(cell: CellResult) -> list[str]:
    return zero_shot.notes(cell.evaluations[ZERO_SHOT])


def _cells_of(result: PipelineResult, backbone: str) -> list[CellResult]:
    return [cell for cell in result.cells if cell.cell.backbone == backbone]


def _name(cell: CellResult) -> str:
    return f"{cell.cell.backbone}, {cell.cell.variant}" + (f", seed {cell.cell.seed}" if cell.cell.seed else "")


def training_rows(result: PipelineResult) -> list[list[str]]:
    """The headline score of every training stage on its validation set."""
    task = RunFolder(result.cells[0].runs[PRETRAIN]).read_recipe().task
    stages = [stage for stage in result.pipeline.stages if stage in (PRETRAIN, SFT)]
    rows = [["", "parameters", *(f"{stage} {task.metrics[0].heading}" for stage in stages)]]
    for cell in result.cells:
        found = {stage: RunFolder(run).read_metrics(task.metrics) for stage, run in cell.runs.items()}
        scores = [_score(task.metrics[0], found.get(stage)) for stage in stages]
        rows.append([_name(cell), f"{found[PRETRAIN].get('parameters') or 0:,}", *scores])
    return rows


def _score(metric: Metric, metrics: dict[str, Any] | None) -> str:
    """The headline score of a training stage; it has no metrics if an earlier one diverged."""
    if metrics is None:
        return "-"
    return "diverged" if "diverged" in metrics else metric.format(metrics["validation"][metric.name])


def _zero_shot_rows(cells: list[CellResult], backbone: str) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for cell in cells:
        if ZERO_SHOT not in cell.evaluations:
            continue
        result = cell.evaluations[ZERO_SHOT]
        scores, _ = zero_shot.split_scores(result)
        rows |= {_name(cell): scores, f"{_name(cell)}: standard error": zero_shot.standard_errors(result)}
    published = zero_shot.paper_zero_shot(backbone)
    return rows | {f"paper's 170M, {variant}": row for variant, row in published.items()}


def needle_rows(cells: list[CellResult], backbone: str) -> list[list[str]]:
    """Needles found in percent, by needle and length; the paper's rows have other lengths where there are none."""
    found = {
        _name(cell): {(each["variant"], each["length"]): each["score"] for each in cell.evaluations[NEEDLE]["cells"]}
        for cell in cells
        if NEEDLE in cell.evaluations
    }
    for variant, needles in paper_needle(backbone).items():
        row = {(needle, length): score for needle, scores in needles.items() for length, score in scores.items()}
        found[f"paper's 170M, {variant}"] = row
    columns = sorted({key for row in found.values() for key in row})
    head = ["found, %", *(f"{needle} {length}" for needle, length in columns)]
    return [head, *([name, *(f"{row[c]:.1f}" if c in row else "-" for c in columns)] for name, row in found.items())]


def _sections(result: PipelineResult) -> Iterator[Section]:
    rows = training_rows(result)
    text = "Scores of the kept weights on the validation sets."
    yield Section("training", "Training", page.join(page.paragraph(text, soft=True), page.table(rows[0], rows[1:])))
    for stage, title, section in (
        (ZERO_SHOT, "Zero-shot", zero_shot_section),
        (NEEDLE, "Needle in a haystack", needle_section),
    ):
        for backbone in result.pipeline.backbones if stage in result.pipeline.stages else ():
            cells = [cell for cell in _cells_of(result, backbone) if stage in cell.evaluations]
            results = {_name(cell): cell.evaluations[stage] for cell in cells}
            heading = title if len(result.pipeline.backbones) == 1 else f"{title}: {backbone}"
            yield Section(f"{stage}-{backbone}", heading, section(results, backbone))
    runs = [run.relative_to(result.path).as_posix() for cell in result.cells for run in cell.runs.values()]
    links = [Markup('<a href="{0}/report.html">{0}</a>').format(run) for run in runs]
    yield Section("runs", "Runs", page.join(page.paragraph(LINKS), page.bullets(links)))
    yield Section("setup", "Setup", page.details("Settings", asdict(result.pipeline)))
