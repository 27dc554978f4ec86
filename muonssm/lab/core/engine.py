"""`TaskTrainer`: transformers' Trainer for any task: the optimiser, the loss and the scores of this library.

Why this engine: it brings accelerate's DDP and FSDP2, exact resuming, gradient accumulation and callbacks, and whoever
trains with transformers knows it.
"""

from __future__ import annotations

import functools
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from muonssm.lab.language.shards import IGNORED

from .batch_norms import apart, batch_norms, drawn, renew
from .evaluate import count_scores
from .optimizer import WeightAverage, build_optimizer, cosine_with_cooldown
from .progress import Clock
from .recipe import Recipe
from .run_folder import RunFolder
from .task import Prepared, Scorer


def processes() -> int:
    """How many torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def arguments_of(recipe: Recipe, items: int, folder: RunFolder, epochs: float) -> TrainingArguments:
    """The recipe's training section as transformers spells it."""
    config = recipe.training
    share = config.share(processes())
    steps = config.steps or -(-items // config.batch_size) * config.epochs
    best = recipe.task.metrics[0]
    rhythm = "steps" if config.evaluate_every else "epoch"
    cosine = {"lr_scheduler_type": "cosine"}
    if config.final_rate:
        cosine = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": config.final_rate}}  # type: ignore[dict-item]
    return TrainingArguments(
        output_dir=str(folder.checkpoints.resolve()),
        num_train_epochs=epochs,
        max_steps=config.steps or -1,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share * (1 if recipe.task.by_loss else 4),
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup * steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        seed=config.seed,
        bf16=config.precision == "bfloat16",
        gradient_checkpointing=config.checkpointing,
        eval_strategy=rhythm,
        eval_steps=config.evaluate_every or None,
        save_strategy=rhythm,
        save_steps=config.evaluate_every or 500,
        logging_strategy=rhythm,
        logging_steps=max(1, config.evaluate_every // 10) if config.evaluate_every else 500,
        save_total_limit=2,
        load_best_model_at_end=config.keep == "best",
        metric_for_best_model=best.name,
        greater_is_better=best.higher,
        prediction_loss_only=recipe.task.by_loss,
        restore_callback_states_from_checkpoint=True,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo" if processes() > 1 and not torch.cuda.is_available() else None,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=config.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        fsdp=config.distributed == "fsdp2" and processes() > 1,  # type: ignore[arg-type]
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["Block"]},
        **cosine,  # type: ignore[arg-type]
    )


class Averaging(TrainerCallback):
    """Keeps an average of the weights up to date."""

    def __init__(self, average: WeightAverage) -> None:
        self.average = average

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """After the optimiser."""
        self.average.update(model, state.global_step)


class Snapshots(TrainerCallback):
    """Keeps the weights of the start and of every validation."""

    def __init__(self, trainer: TaskTrainer, folder: RunFolder) -> None:
        self.trainer, self.folder = trainer, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """The weights that training starts from."""
        self.folder.save_snapshot(state.global_step, self.trainer.weights())

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Those that were just validated."""
        self.folder.save_snapshot(state.global_step, self.trainer.weights())


class TaskTrainer(Trainer):
    """transformers' Trainer for a task of ours."""

    model: nn.Module

    def __init__(self, recipe: Recipe, model: nn.Module, arguments: TrainingArguments, data: Prepared) -> None:
        self.recipe, self.task = recipe, recipe.task
        self.last_weights: dict[str, Tensor] = {}
        tokens = data.facts.get("tokens_per_item")
        self.average = WeightAverage(model, recipe.training.ema) if recipe.training.ema else None
        if recipe.training.statistics and not batch_norms(model):
            raise ValueError(f"statistics is {recipe.training.statistics}; of a model without batch norms it may be 0")
        self.clock = Clock(None if tokens is None else tokens * recipe.training.batch_size)
        super().__init__(
            model,
            arguments,
            data_collator=functools.partial(recipe.task.collate, training=False),
            train_dataset=data.train,
            eval_dataset=data.validation,
            compute_metrics=None if self.task.by_loss else self._compute,
            callbacks=[self.clock, *([Averaging(self.average)] if self.average else [])],
        )

    def _compute(self, prediction: Any) -> dict[str, float]:
        scores = self.task.score(prediction.predictions, prediction.label_ids)
        return {metric.name: scores[metric.name] for metric in self.task.metrics}

    def create_accelerator_and_postprocess(self) -> None:
        """accelerate shards over GPUs alone, though FSDP2 works over gloo as well: so that CPUs may do it too."""
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.fsdp_plugin_args and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """A validation, with which training also ends; the checkpoint after it has new statistics of norms too."""
        self._renew_statistics()
        return super().evaluate(*arguments, **options)

    def _renew_statistics(self) -> None:
        """Of the averaged weights if there are any: from the same items each time, all of them in every process."""
        training, data = self.recipe.training, self.train_dataset
        if not training.statistics:
            return
        with apart(training.seed), self.accelerator.autocast():
            parts = drawn(len(data), training.statistics, self.args.per_device_eval_batch_size)  # type: ignore[arg-type]
            items = ([data[i] for i in part] for part in parts)  # type: ignore[index]
            batches = (self._prepare_inputs(self.task.collate(part, training=True)) for part in items)
            renew(self.average.average.module if self.average else self.model, batches)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """By the averaged weights if there are any; see `_evaluation` for how tasks differ."""
        if self.average is None:
            return self._evaluation(dataloader, *arguments, **options)
        with self.average.inside(self.model):
            return self._evaluation(dataloader, *arguments, **options)

    def _evaluation(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """For tasks that go by their loss its exact mean over all labels, the same for any number of processes.

        What a task counts itself, every process counts whole.
        """
        scorer = self.task.scorer(dataloader.dataset)
        if scorer is None and not self.task.by_loss:
            return super().evaluation_loop(dataloader, *arguments, **options)
        scores = self._count(scorer, dataloader.dataset) if scorer else self._loss_scores(dataloader.dataset)
        prefix = options.get("metric_key_prefix", "eval")
        metrics = {f"{prefix}_{metric.name}": scores[metric.name] for metric in self.task.metrics}
        return EvalLoopOutput(None, None, metrics, len(dataloader.dataset))  # type: ignore[arg-type]

    def _count(self, scorer: Scorer, dataset: Any) -> dict[str, Any]:
        size = self.args.per_device_eval_batch_size
        with self.accelerator.autocast():
            return count_scores(scorer, self.task, self.model, dataset, size, self._prepare_inputs)

    def _loss_scores(self, dataset: Any) -> dict[str, Any]:
        return self.task.score_loss(self._mean_loss(dataset))

    @torch.no_grad()
    def _mean_loss(self, dataset: Any) -> float:
        """Every process takes its turns, as many as the others (sharded weights need all of them at once)."""
        size, world, rank = self.args.per_device_eval_batch_size, self.args.world_size, self.args.process_index
        turns = math.ceil(len(dataset) / (size * world))
        total = torch.zeros(2, dtype=torch.float64)
        self.model.eval()
        for turn in range(turns):
            first = (turn * world + rank) * size
            items = [dataset[i] for i in range(first, min(first + size, len(dataset)))]
            batch = self._prepare_inputs(self.task.collate(items or [dataset[0]], training=False))
            with self.accelerator.autocast():
                loss = self.model(**batch)["loss"]
            labels = (batch["labels"] != IGNORED).sum() if items else torch.tensor(0)
            total += torch.stack([loss.detach().double().cpu() * labels.cpu(), labels.cpu().double()])
        summed: Any = self.accelerator.reduce(total.to(self.args.device), reduction="sum")
        return (summed[0] / summed[1]).item()

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """With the time it took."""
        self.clock.add(logs, self.state.global_step)
        super().log(logs, *arguments, **options)

    def scored(self, dataset: Any) -> dict[str, Any]:
        """All scores of the model on one part."""
        scorer = self.task.scorer(dataset)
        if scorer is not None:
            with self.average.inside(self.model) if self.average else nullcontext():
                return self._count(scorer, dataset)
        prediction: Any = self.predict(dataset)
        if self.task.by_loss:
            return self.task.score_loss(prediction.metrics["test_loss"])
        return self.task.score(prediction.predictions, prediction.label_ids)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss; while it trains, with smoothed labels if asked for."""
        smoothing = self.recipe.training.label_smoothing
        if not (smoothing and model.training):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs)
        logits, labels = outputs["logits"].flatten(0, -2), inputs["labels"].flatten()
        if not logits.is_floating_point():
            raise ValueError(f"label_smoothing is {smoothing}; of this task, whose model keeps no logits, it may be 0")
        whole = num_items_in_batch is not None  # all labels of a batch that is taken in parts, over all processes
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum" if whole else "mean")
        loss = loss / num_items_in_batch * self.accelerator.num_processes if whole else loss
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> Any:
        """Batches as in evaluation, but made for training."""
        evaluating = self.data_collator
        self.data_collator = functools.partial(self.task.collate, training=True)
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = evaluating

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Ours; what is marked so is spared weight decay."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.recipe.training)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """transformers' cosine, or one that ends in a cooldown."""
        if self.recipe.training.cooldown and self.lr_scheduler is None:
            chosen: Any = optimizer or self.optimizer
            self.lr_scheduler = cosine_with_cooldown(chosen, self.recipe.training, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.average is not None and self.args.should_save:
            self.average.save(Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}")
        super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average is not None:
            self.average.load(Path(resume_from_checkpoint))

    def weights(self) -> dict[str, Tensor]:
        """The model's, or their average; shares are gathered from all processes."""
        weights = self.model.state_dict() if self.average is None else self.average.weights()
        return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}

    def _load_best_model(self) -> None:
        self.last_weights = {name: tensor.clone() for name, tensor in self.weights().items()}
        super()._load_best_model()
        if self.average is not None:
            self.average.load(Path(str(self.state.best_model_checkpoint)))
