"""One run, from a recipe to a folder: train, keep the selected weights, score the test set once."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from torch import nn
from transformers import EarlyStoppingCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from .allocator import keep_freed_memory
from .amx import disable_broken_amx
from .divergence import why_diverged
from .engine import BestCheckpoint, Snapshots, TaskTrainer, training_arguments
from .files import naming
from .library_output import hide_kept_thread_errors, hide_progress_bars
from .lock import locked
from .matmul import fast_matmuls
from .precision import choose_precision
from .processes import is_first_process, processes
from .progress import ProgressBar, history, tensorboard, timing
from .recipe import Recipe
from .run_folder import RunFolder, as_json
from .task import DataSplits


def train(recipe: Recipe, output: str | Path, resume: bool = False, data: DataSplits | None = None) -> dict[str, Any]:
    """Train by `recipe` into the folder `output`; return the content of its metrics.json.

    float32 matrices are multiplied by the faster library (see `matmul`) until it returns. From this call on the process
    keeps the memory that it frees (see `allocator`).

    Args:
        recipe: task and training settings.
        output: the run's folder; see `run_folder`.
        resume: continue from the last whole checkpoint. A finished run is not trained again.
        data: the recipe's data, if the caller has loaded it already.
    """
    folder = RunFolder(output)
    with locked(output), naming(folder.path), fast_matmuls():
        folder.clean()
        return _train(recipe, folder, resume, data)


def _train(recipe: Recipe, folder: RunFolder, resume: bool, data: DataSplits | None) -> dict[str, Any]:
    folder.check("recipe.json", recipe.to_dict(), resume)
    if folder.is_finished:
        return folder.read_metrics(recipe.task.metrics)
    recipe.training.share(processes().total)
    keep_freed_memory()
    precision = folder.precision() or _announced(recipe)
    if precision == "bfloat16":
        disable_broken_amx()
    data = recipe.task.load_data() if data is None else data
    set_seed(recipe.training.seed)
    model = recipe.task.build_model(data.metadata)
    folder.begin("recipe.json", recipe.to_dict(), precision)
    folder.write("metadata.json", data.metadata)
    folder.copy(recipe.task.files_to_copy(data.metadata))
    shown = ProgressBar(folder.path.name, recipe.task.metrics)
    with hide_progress_bars(), hide_kept_thread_errors(), closing(shown) as bar:
        trainer = _run(recipe, model, data, folder, bar, precision)
    if trainer.last_weights:
        folder.save_weights("last.safetensors", trainer.last_weights)
    folder.save_model(model, trainer.weights())
    folder.write("history.json", history(trainer.state.log_history, recipe.task.metrics))
    folder.write("timing.json", timing(trainer.state.log_history))
    metrics = as_json(_metrics(trainer, data))
    folder.write("metrics.json", metrics)
    return metrics


def _announced(recipe: Recipe) -> str:
    """The precision to train in; say which one `"auto"` has chosen, and why."""
    precision = choose_precision(recipe.training.precision)
    if recipe.training.precision == "auto" and is_first_process():
        print(f"training in {precision.name}: {precision.reason}", file=sys.stderr)
    return precision.name


def _metrics(trainer: TaskTrainer, data: DataSplits) -> dict[str, Any]:
    metrics = {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "validation": trainer.score(data.validation),
    }
    metrics["test"] = metrics["validation"] if data.test is None else trainer.score(data.test)
    if data.extra_tests:
        metrics["extra_tests"] = {name: trainer.score(split) for name, split in data.extra_tests.items()}
    reason = why_diverged(trainer.state.log_history, trainer.weights(), trainer.last_weights)
    return {**metrics, "diverged": reason} if reason else metrics


def _run(
    recipe: Recipe, model: nn.Module, data: DataSplits, folder: RunFolder, bar: ProgressBar, precision: str
) -> TaskTrainer:
    """Train to the end, from the last whole checkpoint if there is one."""
    checkpoint = folder.last_checkpoint()
    if checkpoint is None:
        trainer = _trainer(recipe, model, data, folder, recipe.training.epochs, precision)
        trainer.add_callback(bar)
        trainer.train()
        return trainer
    path, state = checkpoint
    stopping = state["stateful_callbacks"].get("EarlyStoppingCallback", {}).get("attributes", {})
    stopped_early = stopping.get("early_stopping_patience_counter", 0) >= max(1, recipe.training.patience)
    epochs = round(state["epoch"]) if stopped_early else recipe.training.epochs
    trainer = _trainer(recipe, model, data, folder, epochs, precision)
    if state["best_model_checkpoint"]:
        trainer.add_callback(BestCheckpoint(state["best_model_checkpoint"]))
    trainer.add_callback(bar)
    trainer.train(resume_from_checkpoint=str(path))
    return trainer


def _trainer(
    recipe: Recipe, model: nn.Module, data: DataSplits, folder: RunFolder, epochs: float, precision: str
) -> TaskTrainer:
    arguments = training_arguments(recipe, model, len(data.train), folder, epochs, precision)  # type: ignore[arg-type]
    if arguments.world_size != processes().total:
        raise ValueError(f"WORLD_SIZE must be {arguments.world_size}, as transformers sees it, got {processes().total}")
    trainer = TaskTrainer(recipe, model, arguments, data)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    if folder.writes:
        trainer.add_callback(tensorboard(folder.path / "tensorboard"))
    if recipe.training.snapshots:
        trainer.add_callback(Snapshots(trainer, folder))
    if recipe.training.patience:
        trainer.add_callback(EarlyStoppingCallback(recipe.training.patience))
    return trainer
