"""Many runs at once: one process per core, one folder per run; interrupted runs are resumed."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import multiprocessing
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .files import sentence
from .openmp import children_that_sleep, usable_cores
from .recipe import Recipe
from .run_folder import RunFolder, as_json
from .torchvision_cpu import prepare_torchvision, torchvision_is_prepared


def train_all(jobs: Mapping[Path, Recipe], title: str, workers: int | None = None) -> dict[Path, dict[str, Any]]:
    """Train every recipe into its folder and return their metrics; finished runs are not trained again.

    Args:
        jobs: recipes by the folder of their run.
        title: title of the progress bar.
        workers: number of processes, which share the cores; one per core by default.
    """
    from tqdm import tqdm

    open_jobs = {folder: recipe for folder, recipe in jobs.items() if not _is_finished(folder, recipe)}
    cores = usable_cores()
    count = max(1, min(workers or cores, len(open_jobs)))
    bar = tqdm(desc=title, total=len(jobs), initial=len(jobs) - len(open_jobs), unit="run", leave=False)
    failed: dict[Path, str] = {}
    context = multiprocessing.get_context("spawn")  # a forked process would inherit torch's threads in mid-work
    begin = (max(1, cores // count), torchvision_is_prepared())
    with bar, children_that_sleep(), ProcessPoolExecutor(count, context, _begin, begin) as pool:
        waiting = {pool.submit(_one, recipe.to_dict(), place): place for place, recipe in open_jobs.items()}
        try:
            for future in as_completed(waiting):
                error = future.exception()
                if error is not None:
                    failed[waiting[future]] = sentence(error)
                bar.update()
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    if failed:
        place, reason = next(iter(failed.items()))
        raise ValueError(f"{len(failed)} of {len(jobs)} runs failed, {place.name} first: {reason}")
    return {place: RunFolder(place).read_metrics(recipe.task.metrics) for place, recipe in jobs.items()}


def _is_finished(place: Path, recipe: Recipe) -> bool:
    folder = RunFolder(place)
    folder.check("recipe.json", recipe.to_dict(), resume=True)
    return folder.is_finished


def _begin(threads: int, stand_ins: bool) -> None:
    """Start a worker: use its share of the cores, and torchvision's stand-ins if the parent process does."""
    import torch

    threading.Thread(target=_end_with_parent, daemon=True).start()

    torch.set_num_threads(threads)
    if stand_ins:
        prepare_torchvision()


def _end_with_parent() -> None:
    """End this worker when its parent is gone, even by a kill: it would hold the lock of its run, and wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one(content: dict[str, Any], place: Path) -> None:
    """Train one recipe in a worker, without its progress bar."""
    from .trainer import train

    recipe = Recipe.from_dict(content)
    with contextlib.redirect_stderr(io.StringIO()):
        train(recipe, place, resume=True, data=_data(json.dumps(as_json(_data_settings(content)))))


def _data_settings(content: dict[str, Any]) -> dict[str, Any]:
    """The settings that the data depends on: runs of one worker with the same ones share their data."""
    return {key: value for key, value in content.items() if key not in ("muon", "training")}


@functools.lru_cache(maxsize=1)
def _data(content: str) -> Any:
    return Recipe.from_dict(json.loads(content)).task.load_data()
