"""The training of an experiment as sections: scores beside the paper's, learning curves, confusion matrices, setup."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from muonssm.lab.core.compare import ComparedRun, Interval, Spread, diverged, paper_score
from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.task import Metric
from muonssm.lab.core.variants import DEFAULT_VARIANTS, display_name

from . import figures, page
from .page import Section

FAIRNESS = (
    "Both runs of a pair start from the same weights where shapes agree, see the same batches in the same order, and "
    "can train for the same number of steps. "
)
FAIRNESS_OF_SIZES = (
    "Runs with a doubled state draw other initial weights, because shapes differ; batches, their order and the number "
    "of steps are the same. "
)
KEPT_WEIGHTS = {
    "best": "The weights with the best validation score are kept, and the test set is scored once with them.",
    "last": "The weights of the last step are kept; the set they are scored on selects nothing.",
}


def summary(experiment: Experiment) -> str:
    """Say in one line how many runs there are, how long they train and by which recipe."""
    comparison, training = experiment.comparison, experiment.recipe.training
    budget = f"{training.steps} steps" if training.steps else f"at most {training.epochs} epochs"
    runs = f"{page.counted(comparison.seeds, 'seed')}, {page.counted(comparison.folds, 'fold')}"
    if experiment.is_single_run:
        runs = f"one run, seed {training.seed}"
    return f"{runs}, {budget} with a batch size of {training.batch_size}; recipe {experiment.recipe.name}"


def sections(experiment: Experiment) -> list[Section]:
    """Return scores, learning curves and, for classifiers, confusion matrices."""
    made = [Section("scores", "Scores on the test set", _scores(experiment)), _curves(experiment)]
    classifiers = [run for run in experiment.runs if "confusion" in run.scores]
    return [*made, _confusion(experiment, classifiers)] if classifiers else made


def setup_section(experiment: Experiment) -> Section:
    """Return how the runs were compared, every run, the data, the configuration and the versions."""
    fairness = "" if experiment.is_single_run else FAIRNESS
    if fairness and "doubled" in experiment.trained_variants:
        fairness += FAIRNESS_OF_SIZES
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
    """Return a table with one row per experiment: each variant, its difference from plain, and the paper's scores."""
    variants = _columns(experiments)
    rows = []
    for experiment in experiments:
        metric, comparison = experiment.metrics[0], experiment.comparison
        ours = [
            str(comparison.spread(variant, metric.name)) if variant in comparison.variants else "-"
            for variant in variants
        ]
        differences = [
            str(comparison.difference(variant, metric.name)) if variant in comparison.compared else "-"
            for variant in variants[1:]
        ]
        paper = [paper_score(comparison.paper.get(variant, {}), metric) for variant in DEFAULT_VARIANTS]
        rows.append([comparison.title, metric.heading, *ours, *differences, *paper])
    names = [display_name(variant) for variant in variants]
    minus_plain = [f"{name} minus plain [95%]" for name in names[1:]]
    papers = [f"paper, {display_name(variant)}" for variant in DEFAULT_VARIANTS]
    return page.table(["", "score, test set", *names, *minus_plain, *papers], rows)


def _columns(experiments: Sequence[Experiment]) -> list[str]:
    """Return the trained variants of all experiments, plain first; those of the default if there are no others."""
    found = dict.fromkeys(variant for experiment in experiments for variant in experiment.trained_variants)
    if set(found) <= set(DEFAULT_VARIANTS):
        return list(DEFAULT_VARIANTS)
    return list(dict.fromkeys([DEFAULT_VARIANTS[0], *found]))


# scores


def verdicts(experiment: Experiment) -> list[str]:
    """Say what the comparison shows for the headline score, a sentence per variant that is compared with plain."""
    if experiment.is_single_run:
        return ["This is a single run. To compare plain with Muon, run `muonssm compare`."]
    if not experiment.compared_variants:
        return ["There is no plain run to compare with, and so there are no differences."]
    metric = experiment.metrics[0]
    differences = experiment.comparison.difference
    return [verdict(variant, differences(variant, metric.name), metric) for variant in experiment.compared_variants]


def verdict(variant: str, interval: Interval, metric: Metric) -> str:
    """Say what the difference of a variant from plain shows."""
    if interval.mean is None:
        whose = "" if variant in DEFAULT_VARIANTS else f" of {variant}"
        return f"Every pair{whose} has a run that diverged, so there is no difference to report."
    better = "higher" if metric.higher_is_better else "lower"
    unit = " percentage points" if metric.unit == "%" else f" ({better} is better)"
    text = f"{display_name(variant)} minus plain, {metric.title}: **{interval.mean:+.2f}**{unit}"
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
        for variant in comparison.trained_variants:
            score = str(comparison.spread(variant, metrics[0].name, name))
            rows.append([f"{variant}, {name}", score, *[""] * (len(metrics) - 1)])
    paper = [[f"paper, {v}", *(paper_score(row, metric) for metric in metrics)] for v, row in comparison.paper.items()]
    return page.join(
        page.bullets(verdicts(experiment)),
        *(page.paragraph(f"{sentence}.") for sentence in diverged(comparison)),
        page.table(["", *(metric.heading for metric in metrics)], rows, paper),
        _differences(experiment),
        Markup() if paper else page.paragraph("The paper has no scores for this data and model.", soft=True),
        _mean_figure(experiment, metrics[0]),
    )


def _differences(experiment: Experiment) -> Markup:
    """Return a table of differences from plain, if more than one variant is compared with it."""
    comparison, compared = experiment.comparison, experiment.compared_variants
    if len(compared) < 2:
        return Markup()
    names = [metric.name for metric in experiment.metrics]
    rows = [[f"{v} minus plain", *(str(comparison.difference(v, name)) for name in names)] for v in compared]
    head = ["", *(metric.heading for metric in experiment.metrics)]
    return page.table(head, rows, caption="Differences of paired runs, with 95% intervals")


def _validation_scores(experiment: Experiment) -> list[str]:
    run = experiment.runs[0]
    scores = experiment.folder(run).read("metrics.json")["validation"]
    return [str(Spread.of([None if run.diverged else scores[metric.name]])) for metric in experiment.metrics]


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
        sizes = {len(matrix) for matrix in matrices}
        if sizes != {len(classes)}:
            wanted = f"a row for each of the {len(classes)} classes in metadata.json"
            raise ValueError(f"{experiment.path}: confusion of {variant} must have {wanted}, got {sorted(sizes)} rows")
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
        known = (metrics.get(key) for key in ("parameters", "steps"))
        counts = ("-" if count is None else f"{count:,.0f}" for count in known)
        seconds = _seconds(experiment, run)
        score = "diverged" if run.diverged else metric.format(run.score(metric.name))
        rows.append([run.variant, run.seed, run.fold, *counts, seconds, score])
    return page.table(["run", "seed", "fold", "parameters", "steps", "seconds", f"{metric.title}, test"], rows)


def _seconds(experiment: Experiment, run: ComparedRun) -> str:
    folder = experiment.folder(run)
    timing = folder.read("timing.json") if (folder.path / "timing.json").is_file() else []
    return f"{timing[-1]['seconds']:.0f}" if timing else "-"
