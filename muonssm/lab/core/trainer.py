"""One run, from a recipe to a folder: training, the kept weights, one look at the test part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import EarlyStoppingCallback, set_seed
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from .allocator import keep_freed_memory
from .engine import Snapshots, TaskTrainer, arguments_of, processes
from .library_output import without_bars
from .progress import ProgressBar, history, tensorboard, timing
from .recipe import Recipe
from .run_folder import RunFolder, as_json
from .task import Prepared


def train(recipe: Recipe, output: str | Path, resume: bool = False, prepared: Prepared | None = None) -> dict[str, Any]:
    """Trains by `recipe` into the folder `output`, and returns its metrics.

    From then on the process keeps the memory that it frees; see `allocator`.

    Args:
        recipe: what to do.
        output: the run's folder; see `folder`.
        resume: takes up what is there, from its last whole checkpoint. A run that is over is not done again.
        prepared: the recipe's data, where the caller has it already.
    """
    folder = RunFolder(output)
    folder.check("recipe.json", recipe.to_dict(), resume)
    if folder.is_over:
        return folder.read("metrics.json")
    recipe.training.share(processes())
    keep_freed_memory()
    data = recipe.task.prepare() if prepared is None else prepared
    set_seed(recipe.training.seed)
    model = recipe.task.build_model(data.facts)
    folder.begin("recipe.json", recipe.to_dict())
    folder.write("facts.json", data.facts)
    folder.keep(recipe.task.companions(data.facts))
    with without_bars():
        trainer = _run(recipe, model, data, folder)
    if trainer.last_weights:
        folder.save_weights("last.safetensors", trainer.last_weights)
    folder.save_model(model, trainer.weights())
    folder.write("history.json", history(trainer.state.log_history, recipe.task.metrics))
    folder.write("timing.json", timing(trainer.state.log_history))
    metrics = as_json(_metrics(trainer, data))
    folder.write("metrics.json", metrics)
    return metrics


def _metrics(trainer: TaskTrainer, data: Prepared) -> dict[str, Any]:
    metrics = {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "validation": trainer.scored(data.validation),
    }
    metrics["test"] = metrics["validation"] if data.test is None else trainer.scored(data.test)
    if data.more:
        metrics["more"] = {name: trainer.scored(part) for name, part in data.more.items()}
    return metrics


def _run(recipe: Recipe, model: nn.Module, data: Prepared, folder: RunFolder) -> TaskTrainer:
    """Trains from the last whole checkpoint, if there is one, to the end."""
    found = folder.last_checkpoint()
    if found is None:
        trainer = _trainer(recipe, model, data, folder, recipe.training.epochs)
        trainer.train()
        return trainer
    path, state = found
    stopping = state["stateful_callbacks"].get("EarlyStoppingCallback", {}).get("attributes", {})
    over = stopping.get("early_stopping_patience_counter", 0) >= max(1, recipe.training.patience)
    if state["best_model_checkpoint"]:  # the folder may have been moved
        best = folder.checkpoints.resolve() / Path(state["best_model_checkpoint"]).name
        RunFolder(path).write("trainer_state.json", {**state, "best_model_checkpoint": str(best)})
    trainer = _trainer(recipe, model, data, folder, round(state["epoch"]) if over else recipe.training.epochs)
    trainer.train(resume_from_checkpoint=str(path))
    return trainer


def _trainer(recipe: Recipe, model: nn.Module, data: Prepared, folder: RunFolder, epochs: float) -> TaskTrainer:
    arguments = arguments_of(recipe, len(data.train), folder, epochs)  # type: ignore[arg-type]
    trainer = TaskTrainer(recipe, model, arguments, data)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(ProgressBar(folder.path.name, recipe.task.metrics))
    if folder.writes:
        trainer.add_callback(tensorboard(folder.path / "tensorboard"))
    if recipe.training.snapshots:
        trainer.add_callback(Snapshots(trainer, folder))
    if recipe.training.patience:
        trainer.add_callback(EarlyStoppingCallback(recipe.training.patience))
    return trainer
