"""Zero-shot scores of a language model through lm-eval.

    result = run_harness(model, tokenizer, ["paper"])                    # the nine tasks of the paper's table
    result = run_harness(model, tokenizer, ["./mine.yaml", "piqa"])      # a task of one's own, in lm-eval's YAML
    print(table(result, published))                                      # of zero_shot.py

Tasks run one after the other, and a run that was stopped goes on from what it had. lm-eval gets the data of its tasks
from a hub; tasks whose data is in local files need no network. A result is a dict that JSON can hold:

    settings    what the scores depend on: lm-eval's version, shots, limit, max_length, a digest of the weights
    tasks       by name: metrics as lm-eval computes them (accuracies in [0, 1]), samples, version, and truncated: texts
                whose beginning was cut off
"""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from muonssm.checks import is_int
from muonssm.lab.core.resume import check_same_settings

from .generate import evaluating
from .zero_shot import PAPER_TASKS

Result = dict[str, Any]


PAPER = "paper"  # stands for all of them in a list of tasks
LOCAL = ("arrow", "csv", "json", "parquet", "text", "xml")  # readers of local files; any other data is of a hub
NOISY = ("lm_eval.models.huggingface", "lm_eval.api.task")  # warn of every text cut off, and of every default used


class TaskDataError(OSError):
    """Tasks whose data could not be had: `failed` has the reasons by name, `result` what the other tasks gave."""

    def __init__(self, failed: dict[str, str], result: Result) -> None:
        super().__init__("\n".join(failed.values()))
        self.failed, self.result = failed, result


class _Found(NamedTuple):
    """A task to run: its name, what lm-eval loads it by, its `dataset_path` if any, and the members of a group."""

    name: str
    spec: str
    data: str | None
    members: tuple[str, ...] = ()


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    include_path: str | Path | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    max_length: int | None = None,
    save: Callable[[Result], None] | None = None,
    done: Result | None = None,
    progress: bool = True,
) -> Result:
    """Scores a model on tasks without examples in the prompt, with lm-eval's seeds set anew for each task.

    Args:
        model: a transformers model for causal language modelling.
        tokenizer: its transformers tokenizer; a copy is used.
        tasks: names of lm-eval's tasks, tags and groups; `"paper"` for those of the paper's table; YAML files of
            tasks (`mine.yaml`), and folders of them, written with a slash (`./mine`).
        include_path: a folder of YAML files, whose tasks may be named in `tasks` and come before lm-eval's own.
        batch_size: texts a forward pass. Logits of a batch are held: batch_size x max_length x vocabulary numbers.
        limit: only so many samples of each task, the first ones; for a look, not for figures.
        max_length: tokens that the model is given at most. None: what its config says, or else its tokenizer, or 2048.
        save: is called with the result so far after each task.
        done: an earlier result of the same model and settings; its tasks are not run again.
        progress: shows a bar for each task.

    Raises:
        TaskDataError: for tasks whose data could not be had, after all others have run.
    """
    _check(model, tokenizer, batch_size, limit, max_length)
    with _quiet(), evaluating(model):
        manager, found = _find(tasks, include_path)
        lm = _language_model(model, tokenizer, batch_size, max_length, progress)
        result = _take_up(done, _settings(model, limit, lm.max_length))
        loaded, failed = _load(manager, [task for task in found if task.name not in result["tasks"]])
        for name in list(loaded):
            scores = _evaluate(lm, name, loaded.pop(name), limit)
            result = {**result, "tasks": {**result["tasks"], **scores}}
            if save is not None:
                save(result)
    if failed:
        raise TaskDataError(failed, result)
    return result


def _check(model: Any, tokenizer: Any, batch_size: int, limit: int | None, max_length: int | None) -> None:
    for name, value in (("batch_size", batch_size), ("limit", limit), ("max_length", max_length)):
        optional = value is None and name != "batch_size"
        if not optional and not is_int(value, 1):
            raise ValueError(f"{name} is {value!r}; it may be an integer >= 1")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("tokenizer has neither a start nor an end token; it may be one with either")
    largest = max(token for token in tokenizer.get_vocab().values() if token != tokenizer.pad_token_id)
    known = model.get_input_embeddings().weight.shape[0]
    if largest >= known:
        raise ValueError(f"tokenizer has tokens up to {largest}; with this model it may have 0 to {known - 1}")


@contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval and datasets without their bars for reading data, and without the warnings of `NOISY`."""
    import datasets
    from lm_eval.api import task

    levels = {logger: logger.level for logger in map(logging.getLogger, NOISY)}
    bar, hidden = task.tqdm, datasets.are_progress_bars_disabled()
    for logger in levels:
        logger.setLevel(logging.ERROR)
    task.tqdm = functools.partial(bar, disable=True)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        task.tqdm = bar
        if not hidden:
            datasets.enable_progress_bars()


def _find(tasks: Sequence[str], include_path: str | Path | None) -> tuple[Any, list[_Found]]:
    """lm-eval's manager, and the tasks that `tasks` stands for, each once."""
    from lm_eval.tasks import TaskManager

    if isinstance(tasks, str) or not tasks or not all(isinstance(name, str) and name for name in tasks):
        raise ValueError(f"tasks is {tasks!r}; it may be a list of one or more names of tasks, YAML files or folders")
    names = [each for name in tasks for each in ([c.task for c in PAPER_TASKS] if name == PAPER else [name])]
    folders = [] if include_path is None else [str(include_path)]
    own = {task.name: task for folder in folders for task in _in_folder("include_path", Path(folder))}
    files = {name: _in_path(Path(name)) for name in names if "/" in name or name.endswith((".yaml", ".yml"))}
    called = {name for name in names if name not in files}
    chosen = [*(task for its in files.values() for task in its), *(own[name] for name in called & set(own))]
    called |= {member for task in chosen for member in task.members}
    # An index of lm-eval's 14,000 tasks takes many seconds; it is left out where all tasks are the user's own.
    manager = TaskManager(include_path=folders, include_defaults=not called <= set(own))
    found: dict[str, _Found] = {}
    for name in names:
        for task in files[name] if name in files else _in_index(manager, name):
            if found.setdefault(task.name, task) != task:
                raise ValueError(f"tasks has two of the name {task.name!r}; each name may be there once")
    return manager, list(found.values())


def _in_index(manager: Any, name: str) -> list[_Found]:
    entry = manager.task_index.get(name)
    if entry is None:
        near = ", ".join(difflib.get_close_matches(name, [PAPER, *manager.all_tasks], 5))
        may = f"near names are {near}" if near else "it may be a name that lm-eval lists"
        raise ValueError(f"tasks has {name!r}, which is no task; {may}; files end in .yaml, folders have a slash")
    if entry.kind.name == "TAG":
        return [each for member in sorted(entry.tags) for each in _in_index(manager, member)]
    return [_Found(name, name, (entry.cfg or {}).get("dataset_path"))]


def _in_path(path: Path) -> list[_Found]:
    """The task or group of a YAML file, or all tasks of a folder."""
    in_folder = [task for task in _in_folder("tasks", path) if not task.members] if path.is_dir() else []
    found = in_folder if path.is_dir() else _in_file("tasks", path)
    if not found:
        raise ValueError(f"tasks has {str(path)!r}, which has no task; it may have the key `task` in a .yaml file")
    return found


def _in_folder(argument: str, folder: Path) -> list[_Found]:
    """Tasks and groups below a folder; a file that cannot be read raises, where lm-eval would leave it out."""
    if not folder.is_dir():
        raise ValueError(f"{argument} is {str(folder)!r}, which is no folder; it may be a folder of YAML files")
    return [task for path in sorted(folder.rglob("*.yaml")) for task in _in_file(argument, path)]


def _in_file(argument: str, path: Path) -> list[_Found]:
    """The task or group of a YAML file; none in a file for others to include."""
    from lm_eval.tasks._yaml_loader import load_yaml  # nothing public reads its tags and includes

    try:
        config = load_yaml(path, resolve_func=False)
    except Exception as error:
        raise ValueError(f"{argument} has {str(path)!r}, which cannot be read as a YAML file: {error}") from error
    if "group" in config:
        return [_Found(str(config["group"]), str(path), None, tuple(map(str, config.get("task", ()))))]
    return [_Found(str(config["task"]), str(path), config.get("dataset_path"))] if "task" in config else []


def _language_model(model: Any, tokenizer: Any, batch_size: int, max_length: int | None, progress: bool) -> Any:
    """lm-eval's HFLM around a model, with one bar a task, and a count of the texts whose beginning is cut off."""
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm

    class Counting(HFLM):
        truncated = 0
        bar: Any = None

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            with tqdm(desc="scoring", unit="window", delay=1, disable=not progress) as self.bar:
                found = super().loglikelihood_rolling(requests, disable_tqdm=True)
            self.bar = None  # what runs outside has a bar of HFLM's own
            return found

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return super().generate_until(requests, disable_tqdm=not progress)

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            lengths = [(len(context), len(text)) for _, context, text in requests]
            if any(text == 0 for _, text in lengths):
                raise ValueError("a text to score has no tokens; it may have one or more")
            longest = max((text for _, text in lengths), default=0)
            if longest > self.max_length:
                raise ValueError(f"max_length is {self.max_length}; a text to score has {longest} tokens")
            self.truncated += sum(sum(length) > self.max_length + 1 for length in lengths)
            if self.bar is not None:
                self.bar.update(len(requests))
            return super()._loglikelihood_tokens(requests, self.bar is not None or not progress, override_bs)

        def tok_batch_encode(self, strings: list[str], *args: Any, **options: Any) -> Any:
            most = options.get("left_truncate_len") or math.inf
            self.truncated += sum(len(self.tok_encode(text)) > most for text in strings)
            return super().tok_batch_encode(strings, *args, **options)

    tokenizer = copy.deepcopy(tokenizer)  # HFLM gives it a padding token where it has none
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= model.get_input_embeddings().weight.shape[0]:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
    return Counting(model, "causal", tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)


def _settings(model: Any, limit: int | None, max_length: int) -> dict[str, Any]:
    from lm_eval import __version__

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    weights = digest.hexdigest()
    return {"lm_eval": __version__, "shots": 0, "limit": limit, "max_length": max_length, "weights": weights}


def _take_up(done: Result | None, settings: dict[str, Any]) -> Result:
    """What `done` has, or nothing yet; raises where its scores are of something else."""
    if done is None:
        return {"settings": settings, "tasks": {}}
    check_same_settings(settings, done["settings"])
    return {"settings": settings, "tasks": dict(done["tasks"])}


def _load(manager: Any, tasks: Sequence[_Found]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tasks with their data, by name, and the reasons for those whose data cannot be had, which are warned of.

    All are loaded before the first is run, so that what is wrong is known at once and not after hours.
    """
    loaded, failed = {}, {}
    for task in tasks:
        try:
            loaded[task.name] = manager.load([task.spec])
        except Exception as error:
            reason = "; ".join(f"{type(each).__name__}: {each}" for each in (error, error.__cause__) if each)
            own = task.data in LOCAL or Path(task.data).exists() if task.data else not isinstance(error, OSError)
            if own and not isinstance(error, ConnectionError):
                raise ValueError(f"task {task.name} cannot be loaded: {reason}") from error
            data = f"its data, {task.data}," if task.data else "its data"
            failed[task.name] = f"task {task.name} cannot be loaded; {data} comes from a hub: {reason}"
    for reason in failed.values() if loaded else ():  # else the error comes at once
        warnings.warn(reason, stacklevel=3)
    return loaded, failed


def _evaluate(lm: Any, name: str, loaded: Any, limit: int | None) -> dict[str, Any]:
    """Scores of a task, or of a group and all its tasks, by name."""
    import numpy as np
    from lm_eval import evaluate  # simple_evaluate looks at the machine anew each time, for seconds
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    lm.truncated = 0
    try:
        found = evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"task {name} cannot be run: {error}") from error
    result: dict[str, Any] = {}
    for each, scores in found["results"].items():
        samples, version = int(scores.get("sample_len", 0)), str(found["versions"].get(each))
        result[str(each)] = {"metrics": _metrics(scores), "samples": samples, "version": version}
    result[name]["truncated"] = lm.truncated
    return result


def _metrics(scores: Mapping[str, Any]) -> dict[str, float]:
    """lm-eval writes `acc,none`: the metric, and the filter that answers went through."""
    found = {}
    for key, value in scores.items():
        metric, _, kind = key.partition(",")
        if kind and not metric.endswith("_stderr"):
            found[metric if kind == "none" else key] = float(value)
    return found
