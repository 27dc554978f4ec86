"""Many runs at once: one process a core, each run in a folder of its own, taken up where it stopped."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .recipe import Recipe
from .run_folder import RunFolder, as_json


def train_all(jobs: Mapping[Path, Recipe], title: str, workers: int | None = None) -> dict[Path, dict[str, Any]]:
    """Trains every recipe into its folder, and returns their metrics; runs that are over are not done again.

    Args:
        jobs: recipes by the folder of their run.
        title: stands before the bar of progress.
        workers: processes, which share the cores; by default one a core.
    """
    from tqdm import tqdm

    open_jobs = {place: recipe for place, recipe in jobs.items() if not _is_done(place, recipe)}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(workers or cores, len(open_jobs)))
    bar = tqdm(desc=title, total=len(jobs), initial=len(jobs) - len(open_jobs), unit="run", leave=False)
    failed: dict[Path, str] = {}
    context = multiprocessing.get_context("spawn")  # a forked process would inherit torch's threads in mid-work
    with bar, ProcessPoolExecutor(count, context, _begin, (max(1, cores // count),)) as pool:
        waiting = {pool.submit(_one, recipe.to_dict(), place): place for place, recipe in open_jobs.items()}
        try:
            for future in as_completed(waiting):
                if future.exception() is not None:
                    failed[waiting[future]] = str(future.exception())
                bar.update()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    if failed:
        place, reason = next(iter(failed.items()))
        raise ValueError(f"{len(failed)} of {len(jobs)} runs failed, {place.name} first: {reason}")
    return {place: RunFolder(place).read("metrics.json") for place in jobs}


def _is_done(place: Path, recipe: Recipe) -> bool:
    folder = RunFolder(place)
    folder.check("recipe.json", recipe.to_dict(), resume=True)
    return folder.is_over


def _begin(threads: int) -> None:
    """What a process does first: no more threads than its share of the cores."""
    import torch

    torch.set_num_threads(threads)


def _one(content: dict[str, Any], place: Path) -> None:
    """One run, in a process of the pool; its own bar is kept quiet."""
    from .trainer import train

    recipe = Recipe.from_dict(content)
    with contextlib.redirect_stderr(io.StringIO()):
        train(recipe, place, resume=True, prepared=_data(json.dumps(as_json(_of_data(content)))))


def _of_data(content: dict[str, Any]) -> dict[str, Any]:
    """A recipe without what its data does not depend on, so that runs of one process share their data."""
    return {key: value for key, value in content.items() if key not in ("muon", "training")}


@functools.lru_cache(maxsize=1)
def _data(content: str) -> Any:
    return Recipe.from_dict(json.loads(content)).task.prepare()
