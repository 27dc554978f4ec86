"""`muonssm analyze`: every analysis of a run, each written as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muonssm.lab.core.recipe import Recipe, changed
from muonssm.lab.core.run_folder import RunFolder, as_json

from . import studies
from .case import Case
from .convergence import convergence
from .propagation import gradients_result, truncation_result
from .result import Result
from .scaling import scaling
from .states import memory_result, rank_result, spectrum_result
from .studies import Study
from .variants import small

SEQUENCES = ("activity", "language", "recall")
CLASSIFIERS = ("activity", "recall", "vision", "language")
ALL = ("activity", "language", "recall", "vision", "detection", "segmentation")


class Analysis(NamedTuple):
    """How to do it, for which tasks it is done without being asked for, and whether it trains."""

    run: Callable[[Any], Result]
    kinds: Sequence[str]
    trains: bool = False


ANALYSES: dict[str, Analysis] = {
    "spectrum": Analysis(spectrum_result, ALL),
    "rank": Analysis(rank_result, ALL),
    "gradients": Analysis(gradients_result, ("activity", "language", "recall", "vision", "segmentation")),
    "memory": Analysis(memory_result, ALL),
    "truncation": Analysis(truncation_result, CLASSIFIERS),
    "ablation": Analysis(studies.ablation, ("activity",), trains=True),
    "ns-steps": Analysis(studies.ns_steps, ("activity",), trains=True),
    "capacity": Analysis(studies.capacity, ("activity",), trains=True),
    "sensitivity": Analysis(studies.sensitivity, ("activity",), trains=True),
    "convergence": Analysis(convergence, ALL),
    "scaling": Analysis(scaling, SEQUENCES),
}


class Plan(NamedTuple):
    """What is asked for.

    what        names in `ANALYSES`; none means all that apply
    changes     settings of the recipe that studies train, like `training.steps=200`
    seeds       of studies
    workers     processes of studies; None is one a core
    resume      keeps results that are there
    """

    what: Sequence[str] = ()
    changes: Sequence[str] = ()
    seeds: int = 1
    workers: int | None = None
    resume: bool = False


def analyze(run: str | Path, plan: Plan = Plan()) -> Iterator[tuple[str, list[str]]]:  # noqa: B008  a frozen value
    """Does every analysis and yields its name and what it says; its files are in RUN/analysis by then."""
    from tqdm import tqdm

    case = Case.of(run)
    names = _names(case, plan)
    study = Study(case, _recipe(case, plan), plan.seeds, plan.workers)
    for name in tqdm(names, desc="analyze", unit="analysis", leave=False):
        folder = RunFolder(case.place)
        if plan.resume and _is_there(folder, name, study):
            yield name, ["kept, as it was there"]
            continue
        analysis = ANALYSES[name]
        try:
            result = analysis.run(study if analysis.trains else case)
        except ValueError as error:
            if name in plan.what:
                raise ValueError(f"--what {name} cannot be done of this run: {error}") from error
            yield name, [f"left out: {error}"]
            continue
        result.write(case.place)
        yield name, result.found


def _names(case: Case, plan: Plan) -> list[str]:
    for name in plan.what:
        if name not in ANALYSES:
            raise ValueError(f"--what is {name!r}; it may be one of {', '.join(ANALYSES)}")
        kinds = ANALYSES[name].kinds
        if case.recipe.task_name not in kinds and not ANALYSES[name].trains:
            raise ValueError(
                f"--what is {name!r}, which is for runs of {', '.join(kinds)}, not of {case.recipe.task_name}"
            )
    if plan.seeds < 1:
        raise ValueError(f"--seeds is {plan.seeds}; it may be 1 or more")
    if plan.workers is not None and plan.workers < 1:
        raise ValueError(f"--workers is {plan.workers}; it may be 1 or more")
    chosen = list(ANALYSES) if not plan.what else [name for name in ANALYSES if name in plan.what]
    return chosen if plan.what else [name for name in chosen if case.recipe.task_name in ANALYSES[name].kinds]


def _recipe(case: Case, plan: Plan) -> Recipe:
    """What studies train: small by default where it is known how, otherwise the recipe with the changes asked for."""
    return changed(small(case.recipe, case.metadata()), plan.changes)


def _is_there(folder: RunFolder, name: str, study: Study) -> bool:
    if not (folder.path / f"{name}.json").is_file():
        return False
    settings = folder.read(f"{name}.json")["settings"]
    return not ANALYSES[name].trains or settings == as_json(study.settings())
