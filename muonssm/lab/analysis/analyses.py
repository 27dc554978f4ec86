"""The table of analyses, and `analyze`, which runs those that apply to a finished run or comparison.

`Task.analyses` lists the analyses that apply to a task and run by default. An analysis that trains models can be named
for any task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.files import remove_leftovers
from muonssm.lab.core.lock import locked
from muonssm.lab.core.recipe import Recipe, changed
from muonssm.lab.core.run_folder import RunFolder, as_json
from muonssm.lab.core.task import Task

from .convergence import analyze_convergence
from .gradient_analysis import analyze_gradients
from .memory_analyses import analyze_memory, analyze_rank, analyze_spectrum
from .result import Result
from .scaling import analyze_scaling
from .studies import Study, ablation, capacity, ns_steps, sensitivity
from .truncation_analysis import analyze_truncation


class Analysis(NamedTuple):
    """How to run an analysis, and whether it trains models."""

    run: Callable[[Study], Result]
    trains: bool


def _without_training(analyze_experiment: Callable[[Experiment], Result]) -> Analysis:
    return Analysis(lambda study: analyze_experiment(study.experiment), trains=False)


ANALYSES: dict[str, Analysis] = {
    "spectrum": _without_training(analyze_spectrum),
    "rank": _without_training(analyze_rank),
    "gradients": _without_training(analyze_gradients),
    "memory": _without_training(analyze_memory),
    "truncation": _without_training(analyze_truncation),
    "ablation": Analysis(ablation, trains=True),
    "ns-steps": Analysis(ns_steps, trains=True),
    "capacity": Analysis(capacity, trains=True),
    "sensitivity": Analysis(sensitivity, trains=True),
    "convergence": _without_training(analyze_convergence),
    "scaling": _without_training(analyze_scaling),
}


def analyze(
    run: str | Path,
    names: Sequence[str] = (),
    changes: Sequence[str] = (),
    seeds: int = 1,
    workers: int | None = None,
    resume: bool = False,
) -> Iterator[tuple[str, list[str]]]:
    """Run analyses, write each to RUN/analysis as soon as it is finished, and yield its name and its sentences.

    Args:
        run: the folder of a finished run or comparison.
        names: names in `ANALYSES`; by default all that apply to the task.
        changes: changes to the recipe that studies train, like `training.steps=200`.
        seeds: the number of seeds of studies.
        workers: the number of processes of studies; one per core by default.
        resume: keep results that exist already.
    """
    experiment = Experiment.read(run)
    _check(experiment, names, seeds, workers)
    study = Study(experiment, study_recipe(experiment, changes), seeds, workers)
    with locked(experiment.analysis_folder, "RUN"):
        remove_leftovers(experiment.analysis_folder)
        yield from _analyze(study, names, resume)


def _analyze(study: Study, names: Sequence[str], resume: bool) -> Iterator[tuple[str, list[str]]]:
    from tqdm import tqdm

    experiment = study.experiment
    for name in tqdm(_selected(experiment, names), desc="analyze", unit="analysis", leave=False):
        if resume and _is_finished(study, name):
            yield name, ["kept: the result exists already"]
            continue
        try:
            result = ANALYSES[name].run(study)
        except ValueError as error:
            if name in names:
                raise ValueError(f"--what must be possible for this run, got {name!r}: {error}") from error
            yield name, [f"skipped: {error}"]
            continue
        result.write(experiment.analysis_folder)
        yield name, result.found


def study_recipe(experiment: Experiment, changes: Sequence[str]) -> Recipe:
    """The recipe that studies train: the experiment's, at the size that its task chooses, with the changes."""
    recipe = experiment.recipe
    task, training = recipe.task.shrink(experiment.metadata(), recipe.training)
    return changed(replace(recipe, task=task, training=training), changes)


def _selected(experiment: Experiment, names: Sequence[str]) -> list[str]:
    """The analyses to run, in the order of the table."""
    return [name for name in ANALYSES if name in (names or experiment.task.analyses)]


def check_names(task: Task, names: Sequence[str], argument: str = "--what") -> None:
    """Raise unless all are analyses that apply to a task."""
    possible = [name for name in ANALYSES if name in task.analyses or ANALYSES[name].trains]
    for name in names:
        if name not in possible:
            reason = " (it does not apply to this task)" if name in ANALYSES else ""
            raise ValueError(f"{argument} must be one of {', '.join(possible)}, got {name!r}{reason}")


def _check(experiment: Experiment, names: Sequence[str], seeds: int, workers: int | None) -> None:
    check_names(experiment.task, names)
    if seeds < 1:
        raise ValueError(f"--seeds must be 1 or more, got {seeds}")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be 1 or more, got {workers}")


def _is_finished(study: Study, name: str) -> bool:
    """Whether the result exists; that of a study must have the same settings."""
    folder = RunFolder(study.experiment.analysis_folder)
    if not (folder.path / f"{name}.json").is_file():
        return False
    return not ANALYSES[name].trains or folder.read(f"{name}.json").get("settings") == as_json(study.settings())
