"""The training of an experiment as sections: scores beside the paper's, learning curves, confusion matrices, setup."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from muonssm.lab.core.compare import VARIANTS, ComparedRun, Spread, diverged, paper_score
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.task import Metric

from . import figures, page
from .page import Section

FAIRNESS = (
    "Both runs of a pair start from the same weights where shapes agree, see the same batches in the same order, and "
    "can train for the same number of steps. "
)
KEPT_WEIGHTS = {
    "best": "The weights with the best validation score are kept, and the test set is scored once with them.",
    "last": "The weights of the last step are kept; the set they are scored on selects nothing.",
}


def summary(experiment: Experiment) -> str:
    """Say in one line how many runs there are, how long they train and by which recipe."""
    comparison, training = experiment.comparison, experiment.recipe.training
    budget = f"{training.steps} steps" if training.steps else f"at most {training.epochs} epochs"
    runs = f"{_count(comparison.seeds, 'seed')}, {_count(comparison.folds, 'fold')}"
    if experiment.is_single_run:
        runs = f"one run, seed {training.seed}"
    return f"{runs}, {budget} with a batch size of {training.batch_size}; recipe {experiment.recipe.name}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sections(experiment: Experiment) -> list[Section]:
    """Return scores, learning curves and, for classifiers, confusion matrices."""
    made = [Section("scores", "Scores on the test set", _scores(experiment)), _curves(experiment)]
    classifiers = [run for run in experiment.runs if "confusion" in run.scores]
    return [*made, _confusion(experiment, classifiers)] if classifiers else made


def setup_section(experiment: Experiment) -> Section:
    """Return how the runs were compared, every run, the data, the configuration and the versions."""
    fairness = "" if experiment.is_single_run else FAIRNESS
    versions = experiment.folder(experiment.trained_runs[0]).read("versions.json")
    body = page.join(
        page.paragraph(fairness + KEPT_WEIGHTS[experiment.recipe.training.keep]),
        _runs(experiment),
        page.details("Data", experiment.metadata()["summary"]),
        page.details("Configuration", experiment.comparison.recipe),
        page.details("Versions", versions),
    )
    return Section("run", "What was run", body)


def overview(experiments: Sequence[Experiment]) -> Markup:
    """Return a table with one row per experiment: plain, Muon, their difference and the paper's scores."""
    rows = []
    for experiment in experiments:
        metric, comparison = experiment.metrics[0], experiment.comparison
        ours = [
            str(comparison.spread(variant, metric.name)) if variant in comparison.variants else "-"
            for variant in VARIANTS
        ]
        difference = str(comparison.difference("muon", metric.name)) if "muon" in comparison.compared else "-"
        paper = [paper_score(comparison.paper.get(variant, {}), metric) for variant in VARIANTS]
        rows.append([comparison.title, metric.heading, *ours, difference, *paper])
    return page.table(
        ["", "score, test set", "plain", "Muon", "Muon minus plain [95%]", "paper, plain", "paper, Muon"], rows
    )


# scores


def verdict(experiment: Experiment) -> str:
    """Say what the comparison shows for the headline score."""
    if experiment.is_single_run:
        return "This is a single run. To compare plain with Muon, run `muonssm compare`."
    metric = experiment.metrics[0]
    interval = experiment.comparison.difference("muon", metric.name)
    if interval.mean is None:
        return "Every pair has a run that diverged, so there is no difference to report."
    better = "higher" if metric.higher_is_better else "lower"
    unit = " percentage points" if metric.unit == "%" else f" ({better} is better)"
    text = f"Muon minus plain, {metric.title}: **{interval.mean:+.2f}**{unit}"
    if interval.low is None or interval.high is None:
        return f"{text}, from one pair of runs: too few to tell it from chance (use `--seeds` for more)."
    bounds = f"[{interval.low:+.2f}, {interval.high:+.2f}]"
    is_clear = interval.low > 0 or interval.high < 0
    zero = "does not contain zero" if is_clear else "contains zero: no clear difference"
    return f"{text}, 95% interval {bounds} over {interval.pairs} pairs, which {zero}."


def _scores(experiment: Experiment) -> Markup:
    comparison, metrics = experiment.comparison, experiment.metrics
    rows = [[v, *(str(comparison.spread(v, metric.name)) for metric in metrics)] for v in comparison.variants]
    if experiment.is_single_run:
        rows.append(["validation set", *_validation_scores(experiment)])
    for name in comparison.extra_tests:
        for variant in comparison.variants:
            score = str(comparison.spread(variant, metrics[0].name, name))
            rows.append([f"{variant}, {name}", score, *[""] * (len(metrics) - 1)])
    paper = [[f"paper, {v}", *(paper_score(row, metric) for metric in metrics)] for v, row in comparison.paper.items()]
    return page.join(
        page.paragraph(verdict(experiment)),
        *(page.paragraph(f"{sentence}.") for sentence in diverged(comparison)),
        page.table(["", *(metric.heading for metric in metrics)], rows, paper),
        Markup() if paper else page.paragraph("The paper has no scores for this data and model.", soft=True),
        _mean_figure(experiment, metrics[0]),
    )


def _validation_scores(experiment: Experiment) -> list[str]:
    scores = experiment.folder(experiment.runs[0]).read("metrics.json")["validation"]
    return [str(Spread.of([scores[metric.name]])) for metric in experiment.metrics]


def _mean_figure(experiment: Experiment, metric: Metric) -> Markup:
    """Return a figure of the headline score, unless it would show no more than one number per variant."""
    comparison = experiment.comparison
    spreads = {variant: comparison.spread(variant, metric.name) for variant in comparison.variants}
    paper = {v: row[metric.name] for v, row in comparison.paper.items() if v in spreads and metric.name in row}
    if not paper and all(spread.deviation is None for spread in spreads.values()):
        return Markup()
    groups = {variant: (spread.mean, spread.deviation) for variant, spread in spreads.items()}
    beside = ", beside the paper's" if paper else ""
    caption = f"{metric.heading}: mean and standard deviation{beside}"
    return page.figures([page.figure(caption, figures.bars(groups, metric.heading, paper=paper))])


# curves and matrices


def _curves(experiment: Experiment) -> Section:
    metric = experiment.metrics[0]
    x_label = "step" if experiment.recipe.training.evaluate_every else "epoch"
    labels = {
        "loss": "training loss",
        "validation_loss": "validation loss",
        f"validation_{metric.name}": f"validation {metric.heading}",
    }
    histories = [(run.variant, experiment.folder(run).read("history.json")) for run in experiment.trained_runs]
    drawn = []
    for key, label in labels.items():
        curves: dict[str, list] = {variant: [] for variant in experiment.trained_variants}
        for variant, history in histories:
            curves[variant].append([(row[x_label], row[key]) for row in history if key in row])
        if any(curve for group in curves.values() for curve in group):
            drawn.append(page.figure(label, figures.lines(curves, x_label, label)))
    body = page.figures(drawn) if drawn else page.paragraph("The runs recorded no learning curves.")
    return Section("curves", "Learning curves", body)


def _confusion(experiment: Experiment, runs: Sequence[ComparedRun]) -> Section:
    classes, drawn = experiment.metadata()["classes"], []
    for variant in dict.fromkeys(run.variant for run in runs):
        matrices = [run.scores["confusion"] for run in runs if run.variant == variant]
        total = [[sum(counts) for counts in zip(*rows, strict=True)] for rows in zip(*matrices, strict=True)]
        drawn.append(page.figure(variant, figures.confusion(total, classes)))
    summed = "" if len(runs) == len(drawn) else ", summed over the runs of a variant"
    text = f"Items of the test set by true class (rows) and predicted class (columns){summed}."
    return Section("confusion", "Confusion matrices", page.join(page.paragraph(text, soft=True), page.figures(drawn)))


# setup


def _runs(experiment: Experiment) -> Markup:
    metric, rows = experiment.metrics[0], []
    for run in experiment.runs:
        metrics = experiment.folder(run).read("metrics.json")
        counts = (f"{metrics[key]:,.0f}" if key in metrics else "-" for key in ("parameters", "steps"))
        seconds, score = _seconds(experiment, run), metric.format(run.scores[metric.name])
        rows.append([run.variant, run.seed, run.fold, *counts, seconds, score])
    return page.table(["run", "seed", "fold", "parameters", "steps", "seconds", f"{metric.title}, test"], rows)


def _seconds(experiment: Experiment, run: ComparedRun) -> str:
    folder = experiment.folder(run)
    timing = folder.read("timing.json") if (folder.path / "timing.json").is_file() else []
    return f"{timing[-1]['seconds']:.0f}" if timing else "-"
