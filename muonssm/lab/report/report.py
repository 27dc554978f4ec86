"""`muonssm report`: one HTML page about runs and comparisons, without other files, for screens, phones and paper.

write_report(["runs/compare-watch"])                      # writes runs/compare-watch/report.html
write_report(["runs/one", "runs/two"], "both.html")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.files import write_text
from muonssm.version import __version__

from . import analysis_sections, page, training_sections
from .page import Article, Section

DEFAULT_OUTPUT = "runs/report.html"  # of a page about several experiments


def write_report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page atomically and return its path.

    Args:
        runs: folders of finished runs and comparisons, in the order of the page.
        output: an .html file; None: report.html in the folder of a single run or comparison, else `DEFAULT_OUTPUT`.
    """
    if not runs:
        raise ValueError("runs must have at least one folder of a finished run or comparison, got none")
    path = Path(output or (Path(runs[0]) / "report.html" if len(runs) == 1 else DEFAULT_OUTPUT))
    if path.suffix != ".html" or path.is_dir():
        raise ValueError(f"--output must be a file that ends in .html, got {str(path)!r}")
    text = render_report([Experiment.read(run) for run in runs])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def render_report(experiments: Sequence[Experiment]) -> str:
    """Return the page as HTML text."""
    folders = ", ".join(f"`{experiment.path}`" for experiment in experiments)
    footer = f"Made by muonssm {__version__} from {folders}."
    summaries = [page.paragraph(training_sections.summary(experiment), soft=True) for experiment in experiments]
    if len(experiments) == 1:
        (experiment,) = experiments
        articles = [Article(experiment.title, "", report_sections(experiment))]
        return page.render(experiment.title, articles, summaries[0], footer=footer)
    articles = [
        Article(experiment.title, summary, report_sections(experiment))
        for experiment, summary in zip(experiments, summaries, strict=True)
    ]
    title = f"{len(experiments)} experiments with muonssm"
    return page.render(title, articles, training_sections.overview(experiments), footer=footer)


def report_sections(experiment: Experiment) -> list[Section]:
    """Return all sections of an experiment: training, the task's own, analyses, missing evaluations, setup."""
    return [
        *training_sections.sections(experiment),
        *experiment.task.report_sections(experiment),
        *analysis_sections.sections(experiment),
        *_missing(experiment),
        training_sections.setup_section(experiment),
    ]


def _missing(experiment: Experiment) -> list[Section]:
    """Return a section with the missing evaluations and the commands that produce them, if there are any."""
    texts = experiment.task.missing_evaluations(experiment) + analysis_sections.missing(experiment)
    introduction = page.paragraph("Evaluations that were not run, and the commands that produce them:", soft=True)
    return [Section("missing", "Missing evaluations", page.join(introduction, page.bullets(texts)))] if texts else []
