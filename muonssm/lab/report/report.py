"""`muonssm report`: runs and comparisons on one page that needs nothing else, for screens, phones and paper.

write_report(["runs/compare-watch"])                      # beside what it is about: RUN/report.html
write_report(["runs/one", "runs/two"], "both.html")
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from muonssm.lab.core.experiment import Subject
from muonssm.lab.core.files import atomic
from muonssm.version import __version__

from . import analysis_sections as findings
from . import evaluation_sections as evaluations
from . import page
from . import training_sections as outcome
from .page import Section

SEVERAL = "runs/report.html"  # where a page on several runs goes


def write_report(runs: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Writes the page, all of it or nothing, and returns its path.

    Args:
        runs: folders of finished runs and comparisons, in the order of the page.
        output: an .html file; None: report.html in the folder of a single run, or else `SEVERAL`.
    """
    if not runs:
        raise ValueError("runs is empty; it may have one or more folders of finished runs or comparisons")
    path = Path(output or (Path(runs[0]) / "report.html" if len(runs) == 1 else SEVERAL))
    if path.suffix != ".html" or path.is_dir():
        raise ValueError(f"--output is {str(path)!r}; it may be a file that ends in .html")
    text = report([Subject.read(run) for run in runs])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def report(subjects: Sequence[Subject]) -> str:
    """The HTML."""
    parts = [_sections(subject) for subject in subjects]
    foot = f"<footer>Made by muonssm {escape(__version__)} from {_folders(subjects)}.</footer>"
    if len(subjects) == 1:
        title = subjects[0].title
        top = f"<h1>{escape(title)}</h1>{page.paragraph(outcome.setup(subjects[0]), 'soft')}"
        body = f"{top}<nav>{_links(0, parts[0])}</nav><main>{_body(0, parts[0], 2)}</main>"
        return page.document(title, body + foot)
    title = f"{len(subjects)} runs of muonssm"
    links = "".join(
        f'<p><a href="#r{i}">{escape(subject.title)}</a></p>{_links(i, its)}'
        for i, (subject, its) in enumerate(zip(subjects, parts, strict=True))
    )
    articles = "".join(
        f'<article><h2 id="r{i}">{escape(subject.title)}</h2>{page.paragraph(outcome.setup(subject), "soft")}'
        f"{_body(i, its, 3)}</article>"
        for i, (subject, its) in enumerate(zip(subjects, parts, strict=True))
    )
    body = f"<h1>{escape(title)}</h1>{outcome.overview(subjects)}<nav>{links}</nav><main>{articles}</main>"
    return page.document(title, body + foot)


def _sections(subject: Subject) -> list[Section]:
    absent = evaluations.missing(subject) + findings.missing(subject)
    return [
        *outcome.sections(subject),
        *evaluations.sections(subject),
        *findings.sections(subject),
        *([Section("absent", "Not on this page", _list(absent))] if absent else []),
        outcome.what_was_run(subject),
    ]


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(page.paragraph(text).replace('<p>', '<li>').replace('</p>', '</li>') for text in texts)}</ul>"


def _links(number: int, sections: Sequence[Section]) -> str:
    items = "".join(f'<li><a href="#r{number}-{each.slug}">{escape(each.title)}</a></li>' for each in sections)
    return f"<ul>{items}</ul>"


def _body(number: int, sections: Sequence[Section], level: int) -> str:
    return "\n".join(
        f'<section><h{level} id="r{number}-{escape(each.slug)}">{escape(each.title)}</h{level}>{each.body}</section>'
        for each in sections
    )


def _folders(subjects: Sequence[Subject]) -> str:
    return ", ".join(f"<code>{escape(str(subject.path))}</code>" for subject in subjects)
