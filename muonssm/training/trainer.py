"""One run on transformers' Trainer, the engine of all tasks: it brings accelerate's DDP and FSDP2, exact resuming and
callbacks. What is set here: the paper's optimiser, early stopping on validation data, one look at the test part.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from ..layers import Mixer
from ..tasks.activity import METRICS, Prepared
from .config import TrainingConfig
from .folder import RunFolder
from .recipe import Recipe


def train(recipe: Recipe, output: str | Path, resume: bool = False, prepared: Prepared | None = None) -> dict[str, Any]:
    """Trains by `recipe` into the folder `output`, and returns its metrics.

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
    data = recipe.task.prepare() if prepared is None else prepared
    set_seed(recipe.training.seed)
    model = recipe.task.build_model(data.facts)
    folder.begin("recipe.json", recipe.to_dict())
    folder.write("facts.json", data.facts)
    trainer = _run(recipe, model, data, folder)
    folder.save_weights("last.safetensors", trainer.last_weights or model.state_dict())
    folder.save_weights("model.safetensors", model.state_dict())
    folder.write("history.json", history(trainer.state.log_history))
    metrics = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "epochs": trainer.state.epoch,
        "validation": trainer.scored(data.validation),
        "test": trainer.scored(data.test),
    }
    folder.write("metrics.json", metrics)
    return folder.read("metrics.json")


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


def _trainer(recipe: Recipe, model: nn.Module, data: Prepared, folder: RunFolder, epochs: int) -> TaskTrainer:
    config = recipe.training
    steps = -(-len(data.train) // config.batch_size) * config.epochs  # type: ignore[arg-type]
    arguments = TrainingArguments(
        output_dir=str(folder.checkpoints.resolve()),
        num_train_epochs=epochs,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=4 * config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=round(config.warmup * steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        seed=config.seed,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        greater_is_better=True,
        restore_callback_states_from_checkpoint=True,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = TaskTrainer(recipe, model, arguments, data)
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.add_callback(ProgressBar(f"{folder.path.name}"))
    trainer.add_callback(_tensorboard(folder.path / "tensorboard"))
    if config.patience:
        trainer.add_callback(EarlyStoppingCallback(config.patience))
    return trainer


def _tensorboard(path: Path) -> TensorBoardCallback:
    from torch.utils.tensorboard import SummaryWriter

    return TensorBoardCallback(SummaryWriter(str(path)))


class TaskTrainer(Trainer):
    """transformers' Trainer for a task of ours."""

    model: nn.Module

    def __init__(self, recipe: Recipe, model: nn.Module, arguments: TrainingArguments, data: Prepared) -> None:
        self.recipe = recipe
        self.last_weights: dict[str, torch.Tensor] = {}
        super().__init__(
            model,
            arguments,
            data_collator=functools.partial(recipe.task.collate, training=False),
            train_dataset=data.train,
            eval_dataset=data.validation,
            compute_metrics=self._compute,
        )

    def _compute(self, prediction: Any) -> dict[str, float]:
        scores = self.recipe.task.score(prediction.predictions, prediction.label_ids)
        return {name: scores[name] for name in METRICS}

    def scored(self, dataset: Any) -> dict[str, Any]:
        """All scores of the model on one part."""
        prediction: Any = self.predict(dataset)
        return self.recipe.task.score(prediction.predictions, prediction.label_ids)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss; while it trains, with smoothed labels if asked for."""
        outputs = model(**inputs)
        loss, smoothing = outputs["loss"], self.recipe.training.label_smoothing
        if smoothing and model.training:
            loss = F.cross_entropy(outputs["logits"], inputs["labels"], label_smoothing=smoothing)
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> Any:
        """Batches as in evaluation, but augmented."""
        evaluating, self.data_collator = (
            self.data_collator,
            functools.partial(self.recipe.task.collate, training=True),
        )
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = evaluating

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Adam as the paper has it, or AdamW; what is marked so is spared weight decay."""
        if self.optimizer is None:
            config: TrainingConfig = self.recipe.training
            groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
            network = self.model if model is None else model
            mixers = [(prefix, module) for prefix, module in network.named_modules() if isinstance(module, Mixer)]
            spared = {f"{prefix}.{name}" for prefix, mixer in mixers for name in mixer.no_weight_decay()}
            for name, parameter in network.named_parameters():
                groups[name in spared].append(parameter)
            decays = [config.weight_decay, 0.0]
            listed = [{"params": g, "weight_decay": d} for g, d in zip(groups.values(), decays, strict=True) if g]
            kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
            self.optimizer = kind(listed, lr=config.learning_rate)
        return self.optimizer

    def _load_best_model(self) -> None:
        self.last_weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        super()._load_best_model()


class ProgressBar(TrainerCallback):
    """A bar of steps with the loss and the validation accuracy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bar: Any = None
        self.shown: dict[str, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Opens the bar, where a resumed run goes on."""
        from tqdm import tqdm

        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.name, unit="step", leave=False)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """One more."""
        self.bar.update()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict | None = None, **others: Any) -> None:
        """The newest of what is worth a look."""
        names = {"loss": "loss", "eval_accuracy": "validation accuracy"}
        self.shown |= {names[key]: f"{value:.4g}" for key, value in (logs or {}).items() if key in names}
        if self.bar is not None:
            self.bar.set_postfix(self.shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Closes the bar."""
        self.bar.close()


def history(log: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One row an epoch: training loss, validation loss and scores, learning rate."""
    rows: dict[float, dict[str, float]] = {}
    for entry in log:
        if "epoch" not in entry or "train_runtime" in entry:
            continue
        row = rows.setdefault(entry["epoch"], {"epoch": entry["epoch"]})
        row |= {
            key.replace("eval_", "validation_"): value
            for key, value in entry.items()
            if key in ("loss", "learning_rate", "grad_norm") or key in {f"eval_{name}" for name in (*METRICS, "loss")}
        }
    return list(rows.values())
