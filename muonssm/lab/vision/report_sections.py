"""The report's sections about a vision model: robustness, and pictures of its predictions."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.report import figures, page
from muonssm.lab.report.colors import MAX_SERIES
from muonssm.lab.report.page import Section

from .robustness import ALEXNET_NAME, CHECKS, ROBUSTNESS_SETS


def robustness_sections(experiment: Experiment) -> list[Section]:
    """Return the robustness scores of a classifier, if there are any."""
    pieces: list[Markup] = []
    for name, title in ROBUSTNESS_SETS.items():
        results = experiment.read_all(f"{name}.json", CHECKS[name])
        if results:
            is_c = name == "imagenet-c"
            pieces += _corruptions(experiment, results) if is_c else [_subset(experiment, name, results)]
            pieces += _gaps(title, results)
    return [Section("robustness", "Robustness", page.join(*pieces))] if pieces else []


def _gaps(title: str, results: dict[str, Any]) -> list[Markup]:
    """Return a sentence for each run whose data was incomplete."""
    gaps = {run: scores["missing"] for run, scores in results.items() if scores["missing"]}
    texts = [f"{run}, {title}: {len(lines)} gap(s) in the data, the first: {lines[0]}." for run, lines in gaps.items()]
    return [page.paragraph(text, soft=True) for text in texts]


def missing_robustness(experiment: Experiment) -> list[str]:
    """Return the command that scores robustness, if it was not run."""
    run = experiment.folder(experiment.trained_runs[-1]).path
    command = f"robustness: `muonssm eval {run} --robustness imagenet-c --data DIR`"
    return [] if experiment.has_any("imagenet-c.json") else [command]


def picture_sections(experiment: Experiment, text: str) -> list[Section]:
    """Return the pictures that `muonssm explain` wrote, if there are any; `text` says what they show."""
    pictures = [
        page.photo(_caption(location.name, path.stem, experiment.is_single_run), path)
        for location in experiment.locations()
        for path in sorted((location.folder.path / "explain").glob("*.png"))
    ]
    body = page.join(page.paragraph(text, soft=True), page.figures(pictures))
    return [Section("predictions", "What the model sees", body)] if pictures else []


def missing_pictures(experiment: Experiment) -> list[str]:
    """Return the command that draws the pictures, if it was not run."""
    has_pictures = any(any((place.folder.path / "explain").glob("*.png")) for place in experiment.locations())
    return [] if has_pictures else [f"what the model sees: `muonssm explain {experiment.path}`"]


def _caption(location: str, name: str, is_single_run: bool) -> str:
    return name if is_single_run or location == "comparison" else f"{location}: {name}"


def _corruptions(experiment: Experiment, results: dict[str, Any]) -> list[Markup]:
    """Return the corruption errors (CE), their mean (mCE), the paper's mCE, and the errors by severity."""
    names = list(dict.fromkeys(name for scores in results.values() for name in scores["ce"]))
    errors = [scores["ce"] for scores in results.values()]
    rows = [[name.replace("_", " "), *(_score(each.get(name)) for each in errors)] for name in names]
    rows.append(["mean (mCE)", *(_score(scores["mce"]) for scores in results.values())])
    references = " or ".join(dict.fromkeys(scores.get("reference", ALEXNET_NAME) for scores in results.values()))
    caption = f"Corrupted images: CE, the error relative to that of {references}, %; lower is better"
    published = experiment.comparison.paper.items()
    paper = ", ".join(f"{variant} {row['mce']:.2f}" for variant, row in published if "mce" in row)
    label = "error, mean over corruptions, %"
    curves = dict([(run, [_by_severity(scores)]) for run, scores in results.items()][:MAX_SERIES])
    return [
        page.table(["", *results], rows, caption=caption),
        page.paragraph(f"The paper's mCE: {paper}.", soft=True) if paper else Markup(),
        page.figures([page.figure(label, figures.lines(curves, "severity", label))]),
    ]


def _by_severity(scores: dict[str, Any]) -> list[tuple[int, float]]:
    """Return the mean error at each severity, over the corruptions that have all of them."""
    severities = sorted({int(severity) for errors in scores["errors"].values() for severity in errors})
    complete = [errors for errors in scores["errors"].values() if len(errors) == len(severities)]
    return [(s, sum(errors[str(s)] for errors in complete) / len(complete)) for s in severities if complete]


def _subset(experiment: Experiment, name: str, results: dict[str, Any]) -> Markup:
    rows = [
        [run, _score(scores["accuracy"]), _score(scores["accuracy_on_present"]), f"{scores['images']:,}"]
        for run, scores in results.items()
    ]
    published = experiment.comparison.paper.items()
    paper = [[f"paper, {variant}", _score(row[name]), "-", "-"] for variant, row in published if name in row]
    head = ["", "accuracy, %", "accuracy on the images present, %", "images"]
    return page.table(head, rows, paper, ROBUSTNESS_SETS[name].capitalize())


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
