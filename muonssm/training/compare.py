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

from ..tasks.activity import METRICS, Prepared
from .folder import RunFolder
from .published import published
from .recipe import Recipe
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

    mean: float
    low: float | None
    high: float | None
    pairs: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Interval:
        """From one difference a pair."""
        mean, n = statistics.fmean(differences), len(differences)
        if n < 2:
            return cls(mean, None, None, n)
        from scipy.stats import t

        half = float(t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
        return cls(mean, mean - half, mean + half, n)

    def __str__(self) -> str:
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
        resume: goes on where an earlier call with the same settings stopped.
    """
    _check(recipe, seeds, folds, against)
    folder = RunFolder(output)
    settings = {"recipe": recipe.to_dict(), "seeds": seeds, "folds": folds, "against": against}
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
                    scores = train(variant, place, resume=True, prepared=data)["test"]
                else:
                    scores = _minirocket(recipe, data, recipe.training.seed + seed, RunFolder(place))
                trials.append(Trial(kind, seed, fold, place.name, scores))
    result = summary(recipe, trials) | {"settings": settings}
    folder.write("comparison.json", result)
    return result


def _check(recipe: Recipe, seeds: int, folds: int, against: str | None) -> None:
    if seeds < 1:
        raise ValueError(f"--seeds is {seeds}; it may be 1 or more")
    if not 1 <= folds <= recipe.task.data.folds:
        raise ValueError(f"--folds is {folds}; with data.folds = {recipe.task.data.folds} it may be 1 to that")
    if folds > 1 and recipe.task.data.split not in ("subject", "kfold"):
        split = recipe.task.data.split
        raise ValueError(f"--folds is {folds} with data.split = {split!r}, whose test part never changes; it may be 1")
    if against not in (None, *PEERS):
        raise ValueError(f"--against is {against!r}; it may be one of {', '.join(PEERS)}")


def summary(recipe: Recipe, trials: Sequence[Trial]) -> dict[str, Any]:
    """Mean and deviation of every kind, differences to plain, and the paper's figures."""
    kinds = list(dict.fromkeys(trial.kind for trial in trials))
    by_kind = {kind: [trial for trial in trials if trial.kind == kind] for kind in kinds}
    rows = {}
    for kind, its in by_kind.items():
        values = {name: [trial.scores[name] for trial in its] for name in METRICS}
        rows[kind] = {
            name: {"mean": statistics.fmean(v), "deviation": statistics.stdev(v) if len(v) > 1 else None}
            for name, v in values.items()
        }
    differences = {
        kind: {name: vars(_difference(by_kind[kind], by_kind["plain"], name)) for name in METRICS}
        for kind in kinds
        if kind != "plain"
    }
    return {
        "kinds": rows,
        "differences": differences,
        "paper": published(recipe.task.data.source, recipe.task.model.backbone),
        "trials": [vars(trial) for trial in trials],
    }


def _difference(ones: Sequence[Trial], others: Sequence[Trial], metric: str) -> Interval:
    """Pair by pair: the same seed on the same fold."""
    base = {(trial.seed, trial.fold): trial.scores[metric] for trial in others}
    return Interval.of([trial.scores[metric] - base[trial.seed, trial.fold] for trial in ones])


def table(result: dict[str, Any]) -> str:
    """What is printed: a row a kind, then the differences."""
    trials = max(1, len(result["trials"]) // len(result["kinds"]))
    lines = [f"{'test part, %':<14}" + "".join(f"{name:>18}" for name in METRICS)]
    for kind, row in result["kinds"].items():
        cells = (f"{c['mean']:.2f}" + (f" ± {c['deviation']:.2f}" if trials > 1 else "") for c in row.values())
        lines.append(f"{kind:<14}" + "".join(f"{cell:>18}" for cell in cells))
    for kind, row in result["paper"].items():
        lines.append(f"{'paper, ' + kind:<14}" + "".join(f"{row[name]:>18.2f}" for name in METRICS))
    lines.append("")
    for kind, row in result["differences"].items():
        interval = Interval(**row["accuracy"])
        over = f", 95% interval over {interval.pairs} paired runs" if interval.pairs > 1 else ""
        lines.append(f"{kind} minus plain, accuracy: {interval}{over}")
    for kind in result["kinds"]:
        diverged = [t for t in result["trials"] if t["kind"] == kind and t["scores"].get("loss", 0) is None]
        if diverged:
            lines.append(f"{len(diverged)} of {trials} runs of {kind} diverged: their loss is not a number")
    return "\n".join(lines)


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
    train_set, test_set = (part.windows for part in (data.train, data.test))  # type: ignore[attr-defined]
    model = MiniRocketClassifier(random_state=seed, n_jobs=-1)
    model.fit(train_set.x.mT.numpy(), train_set.y.numpy())
    found = model.predict(test_set.x.mT.numpy())
    logits = np.eye(len(data.facts["classes"]))[found]
    scores = {key: value for key, value in recipe.task.score(logits, test_set.y.numpy()).items() if key != "loss"}
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write("facts.json", data.facts)
    folder.write("metrics.json", {"test": scores})
    return scores
