"""Zero-shot scores of a language model through lm-eval.

    result = run_harness(model, tokenizer, ["paper"])                    # the nine tasks of the paper's table
    result = run_harness(model, tokenizer, ["paper"], data="zero-shot")  # the same, with their data in local files
    result = run_harness(model, tokenizer, ["./mine.yaml", "piqa"])      # your own task, in lm-eval's YAML
    print(zero_shot.table(result, zero_shot.paper_zero_shot("mamba")))

Tasks run one after the other, and an interrupted run can be resumed. lm-eval downloads the data of its tasks from a
hub; tasks with data in local files need no network. A result is a dict that can be saved as JSON:

    settings    what the scores depend on: lm-eval's version, shots, limit, max_length, a digest of the weights, and
                the files of local data
    tasks       by name: metrics as lm-eval computes them (accuracies in [0, 1]), samples, version, and truncated: the
                number of texts that were cut at the beginning
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

from muonssm.checks import check_int
from muonssm.lab.core.resume import check_same_settings

from .generate import evaluation_mode
from .zero_shot import PAPER_TASKS, Result
from .zero_shot_data import LocalTasks, local_tasks

PAPER = "paper"  # in a list of tasks: all tasks of the paper's table
LOCAL_READERS = ("arrow", "csv", "json", "parquet", "text", "xml")  # any other dataset_path is on a hub
NOISY_LOGGERS = ("lm_eval.models.huggingface", "lm_eval.api.task")  # warn about every truncated text and every default


class TaskDataError(OSError):
    """The data of some tasks is unavailable: `failed` has the reasons by task, `result` the scores of the others."""

    def __init__(self, failed: dict[str, str], result: Result) -> None:
        super().__init__("\n".join(failed.values()))
        self.failed, self.result = failed, result


class _TaskSpec(NamedTuple):
    """A task to run: its name, what lm-eval loads it by, its `dataset_path` if any, and the members of a group."""

    name: str
    spec: str
    dataset_path: str | None
    members: tuple[str, ...] = ()


def check_trusted(tasks: Sequence[str], include_path: str | Path | None, trusted: bool) -> None:
    """Raise for tasks in files of the user unless they are trusted: lm-eval runs the Python functions they name."""
    files = [name for name in tasks if _is_path(name)] + ([] if include_path is None else [str(include_path)])
    if files and not trusted:
        raise ValueError(
            f"--trust-tasks must be set for tasks in files, which can run any code (!function), got {files[0]!r} "
            f"without it; read the files first"
        )


def _is_path(task: str) -> bool:
    return "/" in task or task.endswith((".yaml", ".yml"))


def run_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    include_path: str | Path | None = None,
    batch_size: int = 8,
    limit: int | None = None,
    max_length: int | None = None,
    save: Callable[[Result], None] | None = None,
    earlier_result: Result | None = None,
    progress: bool = True,
    data: str | Path | None = None,
) -> Result:
    """Score a model on tasks without examples in the prompt; every task starts from lm-eval's seeds.

    Args:
        model: a transformers model for causal language modeling.
        tokenizer: its transformers tokenizer; a copy is used.
        tasks: names of lm-eval's tasks, tags and groups; `"paper"` for those of the paper's table; YAML files of
            tasks (`mine.yaml`), and folders of them, written with a slash (`./mine`). A YAML file can run any code
            (`!function`): pass only files that you trust.
        include_path: a folder of YAML files whose tasks can be named in `tasks`; they take precedence over lm-eval's.
        batch_size: texts per forward pass. The logits of a batch are batch_size x max_length x vocabulary numbers.
        limit: score only the first samples of each task, for a quick look.
        max_length: the most tokens that the model is given. None: by its config, or else its tokenizer, or 2048.
        save: called with the result so far after each task.
        earlier_result: a result of the same model and settings; its tasks are not run again.
        progress: show a progress bar per task.
        data: a folder with the data of the tasks of the paper's table, for lm-eval's own tasks; see `zero_shot_data`.
            None: lm-eval gets the data of its tasks from the hub.

    Raises:
        TaskDataError: if the data of some tasks is unavailable, after all others have run.
    """
    _check_arguments(model, tokenizer, batch_size, limit, max_length)
    with _hide_library_output(), evaluation_mode(model), _local_data(data, tasks, include_path) as local:
        manager, specs = _find_local(local) if local else _find_tasks(tasks, include_path)
        lm = _language_model(model, tokenizer, batch_size, max_length, progress)
        result = _resume(earlier_result, _settings(model, limit, lm.max_length, local))
        loaded, failed = _load_tasks(manager, [spec for spec in specs if spec.name not in result["tasks"]])
        for name in list(loaded):
            scores = _evaluate(lm, name, loaded.pop(name), limit)
            result = {**result, "tasks": {**result["tasks"], **scores}}
            if save is not None:
                save(result)
    if failed:
        raise TaskDataError(failed, result)
    return result


def _check_arguments(model: Any, tokenizer: Any, batch_size: int, limit: int | None, max_length: int | None) -> None:
    check_int("batch_size", batch_size, 1)
    for name, value in (("limit", limit), ("max_length", max_length)):
        if value is not None:
            check_int(name, value, 1)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise ValueError("tokenizer must have a BOS or an EOS token, got one without")
    largest = max(token for token in tokenizer.get_vocab().values() if token != tokenizer.pad_token_id)
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if largest >= vocab_size:
        raise ValueError(f"tokenizer must have ids in 0 to {vocab_size - 1} for this model, got ids up to {largest}")


@contextmanager
def _hide_library_output() -> Iterator[None]:
    """Hide the progress bars of lm-eval and datasets for reading data, and the warnings of `NOISY_LOGGERS`."""
    import datasets
    from lm_eval.api import task

    levels = {logger: logger.level for logger in map(logging.getLogger, NOISY_LOGGERS)}
    bar, was_disabled = task.tqdm, datasets.are_progress_bars_disabled()
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
        if not was_disabled:
            datasets.enable_progress_bars()


# ---- finding tasks


@contextmanager
def _local_data(
    data: str | Path | None, tasks: Sequence[str], include_path: str | Path | None
) -> Iterator[LocalTasks | None]:
    """The tasks on the data in the folder `data`; None without one."""
    if data is None:
        yield None
        return
    if include_path is not None:
        raise ValueError(f"--include must be left out with --data, got {str(include_path)!r}")
    with local_tasks(data, _expand(tasks), original_yaml) as local:
        yield local


def original_yaml(name: str) -> Path:
    """Where lm-eval has the YAML file of a task."""
    return Path(_default_index()[name].yaml_path)


@functools.cache
def _default_index() -> dict[str, Any]:
    """lm-eval's tasks by name; indexing takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager().task_index


def _find_local(local: LocalTasks) -> tuple[Any, list[_TaskSpec]]:
    """A task manager without lm-eval's index, and the tasks on local data."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    return manager, [_TaskSpec(name, str(path), "json") for name, path in local.files.items()]


def _find_tasks(tasks: Sequence[str], include_path: str | Path | None) -> tuple[Any, list[_TaskSpec]]:
    """lm-eval's task manager, and the tasks that `tasks` stands for, each once."""
    from lm_eval.tasks import TaskManager

    names = _expand(tasks)
    folders = [] if include_path is None else [str(include_path)]
    included = {spec.name: spec for folder in folders for spec in _in_folder("include_path", Path(folder))}
    files = {name: _in_path(Path(name)) for name in names if _is_path(name)}
    by_name = {name for name in names if name not in files}
    own = [*(spec for specs in files.values() for spec in specs), *(included[name] for name in by_name & set(included))]
    by_name |= {member for spec in own for member in spec.members}
    # Indexing lm-eval's 14,000 tasks takes many seconds; skip it if all tasks are the user's own.
    manager = TaskManager(include_path=folders, include_defaults=not by_name <= set(included))
    specs: dict[str, _TaskSpec] = {}
    for name in names:
        for spec in files[name] if name in files else _in_index(manager, name):
            if specs.setdefault(spec.name, spec) != spec:
                raise ValueError(f"tasks must have distinct names, got two tasks named {spec.name!r}")
    return manager, list(specs.values())


def _expand(tasks: Sequence[str]) -> list[str]:
    """The names in `tasks`, with `"paper"` replaced by the tasks of the paper's table."""
    wanted = f"tasks must be a list of task names, YAML files or folders, got {tasks!r}"
    if isinstance(tasks, str) or not all(isinstance(name, str) for name in tasks):
        raise TypeError(wanted)
    if not tasks or not all(tasks):
        raise ValueError(wanted)
    return [each for name in tasks for each in ([c.task for c in PAPER_TASKS] if name == PAPER else [name])]


def _in_index(manager: Any, name: str) -> list[_TaskSpec]:
    entry = manager.task_index.get(name)
    if entry is None:
        near = ", ".join(difflib.get_close_matches(name, [PAPER, *manager.all_tasks], 5))
        hint = f"; similar names: {near}" if near else ""
        wanted = "names of lm-eval tasks, files that end in .yaml, or folders with a slash"
        raise ValueError(f"tasks must be {wanted}, got {name!r}{hint}")
    if entry.kind.name == "TAG":
        return [each for member in sorted(entry.tags) for each in _in_index(manager, member)]
    return [_TaskSpec(name, name, (entry.cfg or {}).get("dataset_path"))]


def _in_path(path: Path) -> list[_TaskSpec]:
    """The task or group of a YAML file, or all tasks of a folder."""
    in_folder = [spec for spec in _in_folder("tasks", path) if not spec.members] if path.is_dir() else []
    specs = in_folder if path.is_dir() else _in_file("tasks", path)
    if not specs:
        raise ValueError(f"tasks must be YAML files with the key `task`, got {str(path)!r}, which has none")
    return specs


def _in_folder(argument: str, folder: Path) -> list[_TaskSpec]:
    """Tasks and groups below a folder; raise for an unreadable file, which lm-eval would skip."""
    if not folder.is_dir():
        raise ValueError(f"{argument} must be a folder of YAML files, got {str(folder)!r}")
    return [spec for path in sorted(folder.rglob("*.yaml")) for spec in _in_file(argument, path)]


def _in_file(argument: str, path: Path) -> list[_TaskSpec]:
    """The task or group of a YAML file; none if the file is only included by others."""
    from lm_eval.tasks._yaml_loader import load_yaml  # no public function reads lm-eval's YAML tags and includes

    try:
        config = load_yaml(path, resolve_func=False)
    except Exception as error:
        raise ValueError(f"{argument} must have readable YAML files, got {str(path)!r}: {error}") from error
    if "group" in config:
        return [_TaskSpec(str(config["group"]), str(path), None, tuple(map(str, config.get("task", ()))))]
    return [_TaskSpec(str(config["task"]), str(path), config.get("dataset_path"))] if "task" in config else []


# ---- running tasks


def _language_model(model: Any, tokenizer: Any, batch_size: int, max_length: int | None, progress: bool) -> Any:
    """Wrap a model as lm-eval's HFLM, with one progress bar per task and a count of truncated texts."""
    from lm_eval.models.huggingface import HFLM
    from tqdm import tqdm

    class CountingHFLM(HFLM):
        truncated = 0
        bar: Any = None

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            with tqdm(desc="scoring", unit="window", delay=1, disable=not progress) as self.bar:
                scores = super().loglikelihood_rolling(requests, disable_tqdm=True)
            self.bar = None  # other methods show HFLM's own bar
            return scores

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return super().generate_until(requests, disable_tqdm=not progress)

        def _loglikelihood_tokens(
            self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
        ) -> list[tuple[float, bool]]:
            lengths = [(len(context), len(text)) for _, context, text in requests]
            if any(text == 0 for _, text in lengths):
                raise ValueError("a text to score must have tokens, got one without")
            longest = max((text for _, text in lengths), default=0)
            if longest > self.max_length:
                raise ValueError(f"max_length must be >= {longest}, the longest text to score, got {self.max_length}")
            self.truncated += sum(sum(length) > self.max_length + 1 for length in lengths)
            if self.bar is not None:
                self.bar.update(len(requests))
            return super()._loglikelihood_tokens(requests, self.bar is not None or not progress, override_bs)

        def tok_batch_encode(self, strings: list[str], *args: Any, **options: Any) -> Any:
            longest = options.get("left_truncate_len") or math.inf
            self.truncated += sum(len(self.tok_encode(text)) > longest for text in strings)
            return super().tok_batch_encode(strings, *args, **options)

    tokenizer = copy.deepcopy(tokenizer)  # HFLM adds a padding token if there is none
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id >= model.get_input_embeddings().weight.shape[0]:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.bos_token
    return CountingHFLM(model, "causal", tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)


def _settings(model: Any, limit: int | None, max_length: int, local: LocalTasks | None) -> dict[str, Any]:
    from lm_eval import __version__

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    weights, data = digest.hexdigest(), None if local is None else local.settings
    own = {"limit": limit, "max_length": max_length, "weights": weights, "data": data}
    return {"lm_eval": __version__, "shots": 0, **own}


def _resume(earlier_result: Result | None, settings: dict[str, Any]) -> Result:
    """The tasks of the earlier result, if its settings are the same; or an empty result."""
    if earlier_result is None:
        return {"settings": settings, "tasks": {}}
    check_same_settings(settings, earlier_result["settings"])
    return {"settings": settings, "tasks": dict(earlier_result["tasks"])}


def _load_tasks(manager: Any, specs: Sequence[_TaskSpec]) -> tuple[dict[str, Any], dict[str, str]]:
    """Load tasks with their data, by name; return the reasons for those whose data is unavailable, and warn.

    All are loaded before the first one runs, so that errors show at once and not after hours.
    """
    loaded, failed = {}, {}
    for spec in specs:
        try:
            loaded[spec.name] = manager.load([spec.spec])
        except Exception as error:
            reason = "; ".join(f"{type(each).__name__}: {each}" for each in (error, error.__cause__) if each)
            if _is_local(spec, error):
                raise ValueError(f"task {spec.name} cannot be loaded: {reason}") from error
            data = f"its data, {spec.dataset_path}," if spec.dataset_path else "its data"
            failed[spec.name] = f"task {spec.name} cannot be loaded; {data} comes from a hub: {reason}"
    for reason in failed.values() if loaded else ():  # if nothing is left to run, the error follows at once
        warnings.warn(reason, stacklevel=3)
    return loaded, failed


def _is_local(spec: _TaskSpec, error: Exception) -> bool:
    """Whether a task failed because of local files, not because a hub is out of reach."""
    path = spec.dataset_path
    local = path in LOCAL_READERS or Path(path).exists() if path else not isinstance(error, OSError)
    return local and not isinstance(error, ConnectionError)


def _evaluate(lm: Any, name: str, loaded: Any, limit: int | None) -> dict[str, Any]:
    """Scores of a task, or of a group and all its tasks, by name."""
    import numpy as np
    from lm_eval import evaluate  # simple_evaluate inspects the machine for seconds on every call
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    lm.truncated = 0
    try:
        output = evaluate(lm=lm, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    except (AssertionError, ValueError) as error:
        raise ValueError(f"task {name} cannot be run: {error}") from error
    result: dict[str, Any] = {}
    for each, scores in output["results"].items():
        samples, version = int(scores.get("sample_len", 0)), str(output["versions"].get(each))
        result[str(each)] = {"metrics": _metrics(scores), "samples": samples, "version": version}
    result[name]["truncated"] = lm.truncated
    return result


def _metrics(scores: Mapping[str, Any]) -> dict[str, float]:
    """Scores by metric. lm-eval's keys are like `acc,none`: the metric, and the filter applied to the answers."""
    metrics = {}
    for key, value in scores.items():
        metric, _, answer_filter = key.partition(",")
        if answer_filter and not metric.endswith("_stderr"):
            metrics[metric if answer_filter == "none" else key] = float(value)
    return metrics
