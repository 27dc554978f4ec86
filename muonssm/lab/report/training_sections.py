"""What training gave, as sections of the page: scores beside the paper's, curves, confusion matrices, what was run."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from muonssm.lab.core.compare import KINDS, Interval, cell
from muonssm.lab.core.experiment import Subject
from muonssm.lab.core.task import Metric

from . import page, svg
from .page import Section

FAIRNESS = (
    "Both sides of a pair start from the same weights where shapes agree, see the same batches in the same order, and "
    "may train for the same number of steps. "
)
KEPT = {
    "best": "The weights of the best validation are kept, and the test part is scored once with them.",
    "last": "The weights of the last step are kept; nothing is chosen by the part they are scored on.",
}


def setup(subject: Subject) -> str:
    """In a line: how often, for how long, by what recipe."""
    settings, training = subject.result["settings"], subject.recipe["training"]
    budget = f"{training['steps']} steps" if training["steps"] else f"at most {training['epochs']} epochs"
    often = f"{settings['seeds']} seed(s), {settings['folds']} fold(s)"
    if subject.alone:
        often = f"one run, seed {training['seed']}"
    return f"{often}, {budget} with batches of {training['batch_size']}; recipe {subject.recipe['name']}"


def sections(subject: Subject) -> list[Section]:
    """Scores, learning curves and, of classifiers, confusion."""
    found = [Section("scores", "Scores on the test part", _scores(subject)), _curves(subject)]
    confused = [trial for trial in subject.trials if "confusion" in trial["scores"]]
    return [*found, _confusion(subject, confused)] if confused else found


def what_was_run(subject: Subject) -> Section:
    """How it was compared, every run, the configuration, the data and the versions."""
    fair = "" if subject.alone else FAIRNESS
    folder = subject.folder(subject.trained[0])
    return Section(
        "run",
        "What was run",
        page.paragraph(fair + KEPT[subject.recipe["training"]["keep"]])
        + _runs(subject)
        + page.details("Data", folder.read("metadata.json")["summary"])
        + page.details("Configuration", subject.recipe)
        + page.details("Versions", folder.read("versions.json")),
    )


# scores


def head(metric: Metric) -> str:
    """The name of a score with its unit."""
    return f"{metric.title}, {metric.unit}" if metric.unit else metric.title


def verdict(subject: Subject) -> str:
    """What the comparison says of the first score, in HTML."""
    if subject.alone:
        return "One run: nothing is compared here; <code>muonssm compare</code> does that."
    metric = subject.metrics[0]
    interval = Interval(**subject.result["differences"]["muon"][metric.name])
    if interval.mean is None:
        return "No pair of runs is without one that diverged: there is nothing to compare."
    unit = " percentage points" if metric.unit == "%" else f" ({'more' if metric.higher else 'less'} is better)"
    text = f"Muon minus plain, {escape(metric.title)}: <strong>{interval.mean:+.2f}</strong>{unit}"
    if interval.low is None or interval.high is None:
        return f"{text}, from one pair of runs: too few to tell it from chance (more: <code>--seeds</code>)."
    clear = interval.low > 0 or interval.high < 0
    word = "does not contain zero" if clear else "contains zero: no clear difference"
    return (
        f"{text}, 95% interval [{interval.low:+.2f}, {interval.high:+.2f}] over {interval.pairs} pairs, which {word}."
    )


def _scores(subject: Subject) -> str:
    result, metrics = subject.result, subject.metrics
    rows = [[kind, *(cell(scores[metric.name]) for metric in metrics)] for kind, scores in result["kinds"].items()]
    if subject.alone:
        rows += [["validation part", *_validation(subject)]]
    for part, row in result["more"].items():
        rows += [[f"{kind}, {part}", cell(score), *[""] * (len(metrics) - 1)] for kind, score in row.items()]
    paper = [
        [f"paper, {kind}", *(_given(scores, metric) for metric in metrics)] for kind, scores in subject.paper.items()
    ]
    table = page.table(["", *map(head, metrics)], rows, paper)
    beside = "" if paper else page.paragraph("The paper has no such scores for this data and model.", "soft")
    return f"<p>{verdict(subject)}</p>{_diverged(subject)}{table}{beside}{_means(subject)}"


def _given(scores: dict[str, float], metric: Metric) -> str:
    return f"{scores[metric.name]:.2f}" if metric.name in scores else "-"


def _validation(subject: Subject) -> list[str]:
    scores = subject.folder(subject.trials[0]).read("metrics.json")["validation"]
    return [cell({"mean": scores[metric.name], "deviation": None}) for metric in subject.metrics]


def _diverged(subject: Subject) -> str:
    lines = []
    for kind in subject.kinds:
        its = [trial for trial in subject.trials if trial["kind"] == kind]
        count = sum(trial["scores"].get("loss", 0) is None for trial in its)
        if count:
            lines.append(page.paragraph(f"{count} of {len(its)} runs of {kind} diverged: their loss is not a number."))
    return "".join(lines)


def _means(subject: Subject) -> str:
    """A picture of the first score, where there is more to see than one number a kind."""
    metric, kinds = subject.metrics[0], subject.result["kinds"]
    spread = {kind: (row[metric.name]["mean"], row[metric.name]["deviation"]) for kind, row in kinds.items()}
    paper = {kind: row[metric.name] for kind, row in subject.paper.items() if kind in spread}
    if not paper and all(deviation is None for _, deviation in spread.values()):
        return ""
    caption = f"{head(metric)}: mean, and one deviation to each side" + (", beside the paper's" if paper else "")
    return page.figures([page.figure(caption, svg.bars(spread, head(metric), paper=paper))])


# curves and matrices


def _curves(subject: Subject) -> Section:
    found, metric = [], subject.metrics[0]
    along = "step" if subject.recipe["training"]["evaluate_every"] else "epoch"
    titles = {"loss": "training loss", "validation_loss": "validation loss"}
    titles[f"validation_{metric.name}"] = f"validation {head(metric)}"
    histories = [(trial["kind"], subject.folder(trial).read("history.json")) for trial in subject.trained]
    for key, label in titles.items():
        curves: dict[str, list] = {kind: [] for kind in KINDS if kind in subject.kinds}
        for kind, history in histories:
            curves[kind].append([(row[along], row[key]) for row in history if key in row])
        if any(curve for group in curves.values() for curve in group):
            found.append(page.figure(label, svg.lines(curves, along, label)))
    return Section("curves", "Learning curves", page.figures(found) or page.paragraph("The runs have no curves."))


def _confusion(subject: Subject, trials: Sequence[dict[str, Any]]) -> Section:
    classes, found = subject.folder(trials[0]).read("metadata.json")["classes"], []
    for kind in dict.fromkeys(trial["kind"] for trial in trials):
        matrices = [trial["scores"]["confusion"] for trial in trials if trial["kind"] == kind]
        total = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
        found.append(page.figure(kind, svg.confusion(total, classes)))
    what = "Windows" if subject.task == "activity" else "Images"
    together = "" if len(trials) == len(found) else ", all runs of a kind together"
    text = f"{what} of the test part by true class (rows) and found class (columns){together}."
    return Section("confusion", "Confusion", page.paragraph(text, "soft") + page.figures(found))


# what was run


def _runs(subject: Subject) -> str:
    metric, rows = subject.metrics[0], []
    for trial in subject.trials:
        metrics, timing = subject.folder(trial).read("metrics.json"), _seconds(subject, trial)
        score = trial["scores"][metric.name]
        counts = (f"{metrics[key]:,.0f}" if key in metrics else "-" for key in ("parameters", "steps"))
        rows.append([trial["kind"], str(trial["seed"]), str(trial["fold"]), *counts, timing, metric.show(score)])
    names = ["run", "seed", "fold", "parameters", "steps", "seconds", f"{metric.title}, test"]
    return page.table(names, rows)


def _seconds(subject: Subject, trial: dict[str, Any]) -> str:
    path = subject.path / trial["folder"] / "timing.json"
    rows = subject.folder(trial).read("timing.json") if path.is_file() else []
    return f"{rows[-1]['seconds']:.0f}" if rows else "-"


def overview(subjects: Sequence[Subject]) -> str:
    """A row for each subject: its first score, plain and with Muon, the difference, and the paper's."""
    rows = []
    for subject in subjects:
        metric, result = subject.metrics[0], subject.result
        ours = [cell(result["kinds"][kind][metric.name]) if kind in result["kinds"] else "-" for kind in KINDS]
        difference = result["differences"].get("muon")
        said = str(Interval(**difference[metric.name])) if difference else "-"
        paper = [_given(subject.paper.get(kind, {}), metric) for kind in KINDS]
        rows.append([result["title"], head(metric), *ours, said, *paper])
    names = ["", "test part", "plain", "Muon", "Muon minus plain [95%]", "paper, plain", "paper, Muon"]
    return page.table(names, rows)
