"""Sections of the report that only vision tasks have: robustness, and pictures of predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.report import figures, page
from muonssm.lab.report.colors import MAX_SERIES
from muonssm.lab.report.page import Section

from .robustness import ROBUSTNESS_SETS

Results = Mapping[str, Mapping[str, Any]]  # a JSON result of `muonssm eval --robustness`, by the run's name


class Picture(NamedTuple):
    """A picture of `muonssm explain`, and its caption."""

    caption: str
    path: Path


def robustness_section(experiment: Experiment) -> Section | None:
    """Scores on corrupted images, other renderings and hard photographs; None without any."""
    body = []
    for name, title in ROBUSTNESS_SETS.items():
        results = experiment.read_all(f"{name}.json")
        if results:
            paper = experiment.comparison.paper
            body.append(_corruptions(results, paper) if name == "imagenet-c" else _subset(name, results, paper))
            body += _gaps(title, results)
    return Section("robustness", "Robustness", "".join(body)) if body else None


def _gaps(title: str, results: Results) -> list[str]:
    """A sentence for each run whose data was incomplete."""
    gaps = {run: scores["missing"] for run, scores in results.items() if scores["missing"]}
    sentences = [f"{run}, {title}: {len(lost)} gap(s) in the data, the first: {lost[0]}." for run, lost in gaps.items()]
    return [page.paragraph(sentence, "soft") for sentence in sentences]


def _corruptions(results: Results, paper: Mapping[str, Mapping[str, float]]) -> str:
    """The CE of every corruption, their mean, and the error by severity."""
    names = list(dict.fromkeys(name for scores in results.values() for name in scores["ce"]))
    rows = [[name.replace("_", " "), *(_format(s["ce"].get(name)) for s in results.values())] for name in names]
    rows.append(["mean (mCE)", *(_format(scores["mce"]) for scores in results.values())])
    caption = "Corrupted images: CE, the error relative to AlexNet's on ImageNet-C, %; lower is better"
    in_paper = ", ".join(f"{variant} {scores['mce']:.2f}" for variant, scores in paper.items())
    note = page.paragraph(f"The paper's mCE: {in_paper}.", "soft") if in_paper else ""
    curves = {run: [_errors_by_severity(scores["errors"])] for run, scores in results.items()}
    label = "error, mean over corruptions, %"
    shown = dict(list(curves.items())[:MAX_SERIES])  # the table has all
    figure = page.figure(label, figures.lines(shown, "severity", label))
    return page.table(["", *results], rows, caption=caption) + note + page.figures([figure])


def _errors_by_severity(errors: Mapping[str, Mapping[str, float]]) -> list[tuple[float, float]]:
    """Points (severity, mean error) over the corruptions that have every severity."""
    severities = sorted({int(severity) for by_severity in errors.values() for severity in by_severity})
    complete = [by_severity for by_severity in errors.values() if len(by_severity) == len(severities)]
    return [(s, sum(error[str(s)] for error in complete) / len(complete)) for s in severities if complete]


def _subset(name: str, results: Results, paper: Mapping[str, Mapping[str, float]]) -> str:
    """Accuracies on ImageNet-R or ImageNet-A."""
    head = ["", "accuracy, %", "on the images present, %", "images"]
    rows = [
        [run, _format(scores["accuracy"]), _format(scores["accuracy_on_present"]), f"{scores['images']:,}"]
        for run, scores in results.items()
    ]
    paper_rows = [[f"paper, {variant}", _format(scores[name]), "-", "-"] for variant, scores in paper.items()]
    return page.table(head, rows, paper_rows, ROBUSTNESS_SETS[name].capitalize())


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def find_pictures(experiment: Experiment) -> list[Picture]:
    """All pictures of `muonssm explain`, of the comparison first."""
    pictures = []
    for location in experiment.locations():
        of_run = not experiment.is_single_run and location.folder.path != experiment.path
        for path in sorted((location.folder.path / "explain").glob("*.png")):
            pictures.append(Picture(f"{location.name}: {path.stem}" if of_run else path.stem, path))
    return pictures


def picture_section(experiment: Experiment, text: str) -> Section | None:
    """The pictures of `muonssm explain` below a text that says what they show; None without any."""
    pictures = find_pictures(experiment)
    if not pictures:
        return None
    shown = page.figures([page.photo(*picture) for picture in pictures])
    return Section("pictures", "What the model sees", page.paragraph(text, "soft") + shown)
