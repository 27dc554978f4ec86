"""Plain against Muon: the same weights to start from, the same batches, the same budget, over seeds and folds.

What differs between two runs of a pair is the memory update alone: both draw their weights, batches, dropout and
augmentation from the same seed. The test part of each is scored once, with the weights of the best validation epoch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muonssm.lab.activity.paper import published

from .recipe import Recipe
from .run_folder import RunFolder, as_json
from .task import Metric, Prepared
from .trainer import train

KINDS = ("plain", "muon")
PEERS = ("minirocket",)


@dataclass(frozen=True)
class Trial:
    """One run of a comparison: who, with what seed, on what fold, in what folder, with what scores on the test part."""

    kind: str
    seed: int
    fold: int
    folder: str
    scores: dict[str, Any]


@dataclass(frozen=True)
class Interval:
    """A mean of paired differences, and its 95% confidence interval by Student's t; no bounds for a single pair."""

    mean: float | None
    low: float | None
    high: float | None
    pairs: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Interval:
        """From one difference a pair."""
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
            return "unknown: no pair of runs without one that diverged"
        if self.low is None:
            return f"{self.mean:+.2f} (one pair: no interval)"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def compare(
    recipe: Recipe, output: str | Path, seeds: int = 1, folds: int = 1, against: str | None = None, resume: bool = False
) -> dict[str, Any]:
    """Runs every pair into folders below `output`, and returns what is also written there as comparison.json.

    Args:
        recipe: what Muon's side does; the plain side is the same without Muon.
        output: a folder.
        seeds, folds: how many of each; every seed is run on every fold.
        against: `"minirocket"` for aeon's classifier on the same windows.
        resume: goes on where an earlier call of the same recipe stopped, also with more seeds or folds.
    """
    _check(recipe, seeds, folds, against)
    folder = RunFolder(output)
    settings = {"recipe": recipe.to_dict()}  # a comparison may be resumed with more seeds, folds or peers
    folder.check("comparison-settings.json", settings, resume)
    trials = []
    for fold in range(folds):
        data = recipe.variant(False, 0, fold).task.prepare()
        folder.begin("comparison-settings.json", settings)  # only now: data that cannot be read leaves no folder
        for seed in range(seeds):
            for kind in (*KINDS, *([against] if against else [])):
                place = folder.path / f"{kind}-seed{seed}-fold{fold}"
                if kind in KINDS:
                    variant = recipe.variant(kind == "plain", recipe.training.seed + seed, fold)
                    scores = _scores(train(variant, place, resume=True, prepared=data))
                else:
                    scores = _minirocket(recipe, data, recipe.training.seed + seed, RunFolder(place))
                trials.append(Trial(kind, seed, fold, place.name, scores))
    told = {**settings, "seeds": seeds, "folds": folds, "against": against}
    result = as_json(summary(recipe, trials) | {"settings": told})
    folder.write("comparison.json", result)
    return result


def _scores(metrics: dict[str, Any]) -> dict[str, Any]:
    """The test part's, and those of further parts."""
    return {**metrics["test"], **({"more": metrics["more"]} if "more" in metrics else {})}


def _check(recipe: Recipe, seeds: int, folds: int, against: str | None) -> None:
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}; it may be 1 or more")
    if not 1 <= folds <= recipe.task.folds:
        may = f"1 to {recipe.task.folds}, the recipe's data.folds" if recipe.task.folds > 1 else "1 for this task"
        raise ValueError(f"--folds is {folds}; it may be {may}")
    recipe.task.on_fold(folds - 1)
    if against not in (None, *PEERS):
        raise ValueError(f"--against is {against!r}; it may be one of {', '.join(PEERS)}")
    if against is not None and recipe.kind != "activity":
        raise ValueError(
            f"--against is {against!r}, which classifies windows; of a {recipe.kind} task it may be left out"
        )


def summary(recipe: Recipe, trials: Sequence[Trial]) -> dict[str, Any]:
    """Mean and deviation of every kind, differences to plain, and the paper's figures."""
    kinds, metrics = list(dict.fromkeys(trial.kind for trial in trials)), recipe.task.metrics
    by_kind = {kind: [trial for trial in trials if trial.kind == kind] for kind in kinds}
    rows = {kind: {metric.name: _spread(its, metric.name) for metric in metrics} for kind, its in by_kind.items()}
    differences = {
        kind: {metric.name: vars(_difference(by_kind[kind], by_kind["plain"], metric.name)) for metric in metrics}
        for kind in kinds
        if kind != "plain" and "plain" in by_kind
    }
    parts = list(dict.fromkeys(name for trial in trials for name in trial.scores.get("more", {})))
    first = metrics[0].name
    return {
        "title": recipe.task.title,
        "metrics": [metric._asdict() for metric in metrics],
        "kinds": rows,
        "differences": differences,
        "more": {part: {kind: _spread(its, first, part) for kind, its in by_kind.items()} for part in parts},
        "paper": published(recipe.task),
        "trials": [vars(trial) for trial in trials],
    }


def _spread(trials: Sequence[Trial], metric: str, part: str | None = None) -> dict[str, float | None]:
    """Mean and deviation of a score; of runs that diverged nothing is known."""
    found = [trial.scores if part is None else trial.scores["more"][part] for trial in trials]
    values = [scores[metric] for scores in found if scores[metric] is not None]
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values) if values else None, "deviation": deviation}


def _difference(ones: Sequence[Trial], others: Sequence[Trial], metric: str) -> Interval:
    """Pair by pair: the same seed on the same fold; pairs with a run that diverged are left out."""
    base = {(trial.seed, trial.fold): trial.scores[metric] for trial in others}
    pairs = [(trial.scores[metric], base[trial.seed, trial.fold]) for trial in ones]
    return Interval.of([one - other for one, other in pairs if one is not None and other is not None])


def metrics_of(result: dict[str, Any]) -> list[Metric]:
    """The scores a comparison is about."""
    return [Metric(**metric) for metric in result["metrics"]]


def table(result: dict[str, Any]) -> str:
    """What is printed: a row a kind, then the differences."""
    metrics = metrics_of(result)
    rows = [["test part", *(_head(metric) for metric in metrics)]]
    rows += [[kind, *(cell(score) for score in row.values())] for kind, row in result["kinds"].items()]
    rows += [[f"paper, {kind}", *(f"{row[m.name]:.2f}" for m in metrics)] for kind, row in result["paper"].items()]
    for part, row in result["more"].items():
        rows += [[f"{kind}, {part}", cell(score)] for kind, score in row.items()]
    first, rest = max(len(row[0]) for row in rows), max(len(text) for row in rows for text in row[1:])
    lines = [f"{row[0]:<{first}}" + "".join(f"  {text:>{rest}}" for text in row[1:]) for row in rows]
    lines.append("")
    for kind, row in result["differences"].items():
        interval = Interval(**row[metrics[0].name])
        over = f", 95% interval over {interval.pairs} paired runs" if interval.pairs > 1 else ""
        lines.append(f"{kind} minus plain, {metrics[0].title}: {interval}{over}")
    for kind in result["kinds"]:
        its = [trial for trial in result["trials"] if trial["kind"] == kind]
        diverged = [trial for trial in its if trial["scores"].get("loss", 0) is None]
        if diverged:
            lines.append(f"{len(diverged)} of {len(its)} runs of {kind} diverged: their loss is not a number")
    return "\n".join(lines)


def _head(metric: Metric) -> str:
    return f"{metric.title}, {metric.unit}" if metric.unit else metric.title


def cell(score: dict[str, Any]) -> str:
    """A mean and, where there is one, its deviation."""
    if score["mean"] is None:
        return "diverged"
    return f"{score['mean']:.2f}" + ("" if score["deviation"] is None else f" ± {score['deviation']:.2f}")


def _minirocket(recipe: Recipe, data: Prepared, seed: int, folder: RunFolder) -> dict[str, Any]:
    """aeon's MiniRocket, trained on the training windows, scored on the test windows."""
    if folder.is_over:
        return folder.read("metrics.json")["test"]
    import numpy as np

    try:
        from aeon.classification.convolution_based import MiniRocketClassifier
    except ImportError as error:
        message = f"--against minirocket needs the extra `bench` (pip install 'muonssm[bench]'): {error}"
        raise ImportError(message) from error
    train_set, test_set = (part.windows for part in (data.train, data.test))  # type: ignore[union-attr]
    model = MiniRocketClassifier(random_state=seed, n_jobs=-1)
    model.fit(train_set.x.mT.numpy(), train_set.y.numpy())
    found = model.predict(test_set.x.mT.numpy())
    logits = np.eye(len(data.facts["classes"]))[found]
    scores = {key: value for key, value in recipe.task.score(logits, test_set.y.numpy()).items() if key != "loss"}
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write("facts.json", data.facts)
    folder.write("metrics.json", {"test": scores})
    return scores
