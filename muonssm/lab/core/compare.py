"""Variants of one recipe on equal terms: same initial weights, same batches, same budget, over seeds and folds.

Runs with the same seed and fold differ in the memory rule alone: weights, batches, dropout and augmentation are drawn
from the same seed. Every variant is compared with plain, pair by pair. Each run's test set is scored once, with the
weights that its validation set selected.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .lock import locked
from .parallel_runs import train_all
from .recipe import Recipe, check_name
from .run_files import check_comparison, check_scores
from .run_folder import RunFolder, as_json
from .task import DataSplits, Metric, PaperScores
from .trainer import train
from .variants import DEFAULT_VARIANTS, PLAIN, check_variants


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with its 95% confidence interval (Student's t); no bounds for a single pair."""

    mean: float | None
    low: float | None
    high: float | None
    pairs: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Interval:
        """From one difference per pair."""
        if not differences:
            return cls(None, None, None, 0)
        mean, n = statistics.fmean(differences), len(differences)
        if n < 2:
            return cls(mean, None, None, n)
        from scipy.stats import t

        half = float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)

    def __str__(self) -> str:
        if not self.pairs:
            return "unknown: every pair has a run that diverged"
        if self.low is None:
            return f"{self.mean:+.2f} (one pair: no interval)"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of a score over runs; None for the mean of diverged runs, or of a single run's."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        """Diverged runs (None) are left out."""
        known = [value for value in values if value is not None]
        deviation = statistics.stdev(known) if len(known) > 1 else None
        return cls(statistics.fmean(known) if known else None, deviation)

    def __str__(self) -> str:
        if self.mean is None:
            return "diverged"
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison: its variant, seed, fold and folder, and its scores on the test sets."""

    variant: str
    seed: int
    fold: int
    folder: str
    scores: dict[str, Any]
    extra_tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    why_diverged: str | None = None

    @property
    def diverged(self) -> bool:
        """Whether training diverged, or the loss is not a number; see `divergence`."""
        return bool(self.why_diverged) or self.scores.get("loss", 0) is None

    def score(self, metric: str, extra_test: str | None = None) -> float | None:
        """A score on the test set, or on a further one; None for a diverged run, whatever its scores are."""
        return None if self.diverged else (self.extra_tests[extra_test] if extra_test else self.scores)[metric]


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`, as comparison.json has it.

    Attributes:
        title: what was compared.
        metrics: the scores; the first is the headline.
        recipe: the recipe of which the runs are variants, as JSON.
        seeds, folds, against: the arguments of `compare`.
        runs: every run.
        paper: the paper's scores by variant and metric; empty where it has none.
    """

    title: str
    metrics: tuple[Metric, ...]
    recipe: dict[str, Any]
    seeds: int
    folds: int
    against: str | None
    runs: tuple[ComparedRun, ...]
    paper: PaperScores = field(default_factory=dict)

    @property
    def variants(self) -> list[str]:
        """Names of the variants, in the order of the runs."""
        return list(dict.fromkeys(run.variant for run in self.runs))

    @property
    def extra_tests(self) -> list[str]:
        """Names of the further test sets."""
        return list(dict.fromkeys(name for run in self.runs for name in run.extra_tests))

    def runs_of(self, variant: str) -> list[ComparedRun]:
        """The runs of one variant."""
        return [run for run in self.runs if run.variant == variant]

    def spread(self, variant: str, metric: str, extra_test: str | None = None) -> Spread:
        """Mean and deviation of a variant's score on the test set, or on a further one."""
        return Spread.of([run.score(metric, extra_test) for run in self.runs_of(variant)])

    def paired_differences(self, variant: str, metric: str) -> list[float]:
        """The variant minus plain, pair by pair (same seed, same fold); pairs with a diverged run are left out."""
        base = {(run.seed, run.fold): run.score(metric) for run in self.runs_of(PLAIN)}
        pairs = [(run.score(metric), base[run.seed, run.fold]) for run in self.runs_of(variant)]
        return [one - other for one, other in pairs if one is not None and other is not None]

    def difference(self, variant: str, metric: str) -> Interval:
        """The mean of `paired_differences`, with its interval."""
        return Interval.of(self.paired_differences(variant, metric))

    @property
    def compared(self) -> list[str]:
        """The variants that have a difference to plain, peers included."""
        return [variant for variant in self.variants if variant != PLAIN] if PLAIN in self.variants else []

    @property
    def trained_variants(self) -> list[str]:
        """The variants that this library trained, plain first."""
        return sorted((v for v in self.variants if v != self.against), key=lambda variant: variant != PLAIN)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with means and differences, so that the file can be read without this library."""
        names = [metric.name for metric in self.metrics]
        means = {v: {name: asdict(self.spread(v, name)) for name in names} for v in self.variants}
        differences = {v: {name: asdict(self.difference(v, name)) for name in names} for v in self.compared}
        own = {**asdict(self), "metrics": [metric._asdict() for metric in self.metrics]}
        return as_json({**own, "means": means, "differences": differences})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Comparison:
        """The inverse of `to_dict`; raise ValueError if the content is not that of a comparison."""
        check_comparison(content)
        own = {key: value for key, value in content.items() if key not in ("means", "differences")}
        try:
            own["metrics"] = tuple(Metric(**metric) for metric in own["metrics"])
            own["runs"] = tuple(ComparedRun(**run) for run in own["runs"])
            result = cls(**own)
        except TypeError as error:
            raise ValueError(f"its fields must be those of a comparison, got {error}") from error
        for run in result.runs:
            check_name("folder", run.folder)
        return result


def compare(
    recipe: Recipe,
    output: str | Path,
    seeds: int = 1,
    folds: int = 1,
    against: str | None = None,
    resume: bool = False,
    variants: Sequence[str] = DEFAULT_VARIANTS,
    workers: int | None = 1,
) -> Comparison:
    """Train every variant into folders below `output`; write comparison.json there and return its content.

    Args:
        recipe: the recipe of which the runs are variants.
        output: a folder.
        seeds, folds: how many of each; every variant runs with every seed on every fold.
        against: a peer of the task, trained on the same data.
        resume: continue an earlier call with the same recipe, also with more variants, seeds or folds.
        variants: names in `muonssm.lab.core.variants.VARIANTS`. Without plain there are no differences.
        workers: the number of processes that train runs side by side, with their share of the cores each; None is one
            per core.
    """
    _check(recipe, seeds, folds, against, workers)
    names = check_variants(variants)
    for name in names:
        with _naming(name):
            recipe.variant(name, 0, 0)
    with locked(output):
        return _compare(recipe, RunFolder(output), seeds, folds, against, resume, names, workers)


def _compare(
    recipe: Recipe,
    folder: RunFolder,
    seeds: int,
    folds: int,
    against: str | None,
    resume: bool,
    names: Sequence[str],
    workers: int | None,
) -> Comparison:
    folder.clean()
    settings = {"recipe": recipe.to_dict()}  # a comparison can be resumed with more variants, seeds, folds or peers
    folder.check("comparison-settings.json", settings, resume)
    runs: list[ComparedRun] = []
    paper: PaperScores = {}
    for fold in range(folds):
        data = recipe.task.with_fold(fold).load_data()
        if not fold:
            _check_models(recipe, names, data)
        folder.begin("comparison-settings.json", settings)  # only now: unreadable data leaves no folder behind
        paper = recipe.task.paper_scores(data.metadata)
        if workers != 1:
            jobs = dict(_job(recipe, variant, seed, fold, folder) for seed in range(seeds) for variant in names)
            train_all(jobs, folder.path.name, workers)
        for seed in range(seeds):
            runs += [_run(recipe, variant, seed, fold, data, folder) for variant in names]
            if against:
                runs.append(run_peer(recipe, against, seed, fold, data, folder))
    task, content = recipe.task, recipe.to_dict()
    result = Comparison(task.title, task.metrics, content, seeds, folds, against, tuple(runs), paper)
    folder.write("comparison.json", result.to_dict())
    return read_comparison(folder)


def read_comparison(folder: RunFolder) -> Comparison:
    """The comparison in a folder; an error names its file."""
    content = folder.read("comparison.json")
    try:
        return Comparison.from_dict(content)
    except ValueError as error:
        raise ValueError(f"{folder.path / 'comparison.json'} is damaged: {error}") from error


@contextlib.contextmanager
def _naming(variant: str) -> Iterator[None]:
    """Name the variant in an error, unless the recipe itself is wrong."""
    try:
        yield
    except ValueError as error:
        if variant in DEFAULT_VARIANTS:
            raise
        raise ValueError(f"--variants must be possible for this recipe, got {variant!r}: {error}") from error


def _check_models(recipe: Recipe, variants: Sequence[str], data: DataSplits) -> None:
    """Build the model of every variant, so that one that is not possible is refused before any is trained."""
    for name in variants:
        with _naming(name):
            recipe.variant(name, 0, 0).task.build_model(data.metadata)


def _job(recipe: Recipe, variant: str, seed: int, fold: int, folder: RunFolder) -> tuple[Path, Recipe]:
    """The folder of one run, and its recipe."""
    run = recipe.variant(variant, recipe.training.seed + seed, fold)
    return folder.path / f"{variant}-seed{seed}-fold{fold}", run


def _run(recipe: Recipe, variant: str, seed: int, fold: int, data: DataSplits, folder: RunFolder) -> ComparedRun:
    """Train one variant, unless its folder is finished."""
    place, run = _job(recipe, variant, seed, fold, folder)
    metrics = train(run, place, resume=True, data=data)
    extra, reason = metrics.get("extra_tests", {}), metrics.get("diverged")
    return ComparedRun(variant, seed, fold, place.name, metrics["test"], extra, reason)


def run_peer(recipe: Recipe, peer: str, seed: int, fold: int, data: DataSplits, folder: RunFolder) -> ComparedRun:
    """Train a peer, unless its folder is finished."""
    name = f"{peer}-seed{seed}-fold{fold}"
    run = RunFolder(folder.path / name)
    if not run.is_finished:
        scores = recipe.task.score_peer(peer, data, recipe.training.seed + seed)
        run.path.mkdir(parents=True, exist_ok=True)
        run.write("metadata.json", data.metadata)
        run.write("metrics.json", {"test": scores})
    names = [metric.name for metric in recipe.task.metrics]
    metrics = run.read("metrics.json", lambda content: check_scores("test", content["test"], names))
    return ComparedRun(peer, seed, fold, name, metrics["test"])


def _check(recipe: Recipe, seeds: int, folds: int, against: str | None, workers: int | None) -> None:
    if seeds < 1:
        raise ValueError(f"--seeds must be 1 or more, got {seeds}")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be 1 or more, got {workers}")
    if not 1 <= folds <= recipe.task.folds:
        wanted = f"in 1 to {recipe.task.folds} (data.folds)" if recipe.task.folds > 1 else "1 for this task"
        raise ValueError(f"--folds must be {wanted}, got {folds}")
    recipe.task.with_fold(folds - 1)
    if against is not None and against not in recipe.task.peers:
        wanted = f"one of {', '.join(recipe.task.peers)}" if recipe.task.peers else "left out for this task"
        raise ValueError(f"--against must be {wanted}, got {against!r}")


def table(result: Comparison) -> str:
    """The comparison as text: a row per variant, the paper's rows, then the differences."""
    metrics, headline = result.metrics, result.metrics[0]
    rows = [["test set", *(metric.heading for metric in metrics)]]
    rows += [[variant, *(str(result.spread(variant, m.name)) for m in metrics)] for variant in result.variants]
    rows += [[f"paper, {v}", *(paper_score(scores, m) for m in metrics)] for v, scores in result.paper.items()]
    for name in result.extra_tests:
        rows += [[f"{v}, {name}", str(result.spread(v, headline.name, name))] for v in result.trained_variants]
    first, rest = max(len(row[0]) for row in rows), max(len(text) for row in rows for text in row[1:])
    lines = [f"{row[0]:<{first}}" + "".join(f"  {text:>{rest}}" for text in row[1:]) for row in rows]
    lines.append("")
    for variant in result.compared:
        interval = result.difference(variant, headline.name)
        over = f", 95% interval over {interval.pairs} paired runs" if interval.pairs > 1 else ""
        lines.append(f"{variant} minus plain, {headline.title}: {interval}{over}")
    return "\n".join([*lines, *diverged(result)])


def paper_score(scores: Mapping[str, float], metric: Metric) -> str:
    """The paper's score as text; a dash where it has none."""
    return f"{scores[metric.name]:.2f}" if metric.name in scores else "-"


def diverged(result: Comparison) -> list[str]:
    """A sentence for each variant with diverged runs."""
    sentences = []
    for variant in result.variants:
        runs = result.runs_of(variant)
        count = sum(run.diverged for run in runs)
        if count:
            found = dict.fromkeys(run.why_diverged or "their loss is not a number" for run in runs if run.diverged)
            reasons = "; ".join(found)
            sentences.append(f"{count} of {len(runs)} runs of {variant} diverged: {reasons}")
    return sentences
