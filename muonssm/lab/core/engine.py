"""`TaskTrainer`: transformers' Trainer with this library's optimizer, loss and scores, for any task.

Why this engine: it brings accelerate's DDP and FSDP2, exact resuming, gradient accumulation and callbacks, and many
users know it.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from .batch_norms import batch_norms, draw_batches, isolated_random_state, recompute_statistics
from .checkpoints import damage, remove_checkpoint, rotate, seal
from .context import ContextShare
from .evaluate import score_split
from .files import naming
from .optimizer import WeightAverage, build_optimizer, cosine_with_cooldown
from .processes import processes
from .progress import Clock
from .recipe import Recipe
from .run_folder import RunFolder
from .shared_batch_norm import share_batch_norms
from .task import DataSplits

KEPT_CHECKPOINTS = 2  # the newest and the best


def training_arguments(
    recipe: Recipe, model: nn.Module, items: int, folder: RunFolder, epochs: float, precision: str
) -> TrainingArguments:
    """Translate the recipe's training section for transformers, with the precision that was chosen."""
    config = recipe.training
    share = config.share(processes().total)
    steps = config.steps or -(-items // config.batch_size) * config.epochs
    headline = recipe.task.metrics[0]
    interval = "steps" if config.evaluate_every else "epoch"
    cosine = {"lr_scheduler_type": "cosine"}
    if config.final_rate:
        cosine = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": config.final_rate}}  # type: ignore[dict-item]
    return TrainingArguments(
        output_dir=str(folder.checkpoints.resolve()),
        num_train_epochs=epochs,
        max_steps=config.steps or -1,
        per_device_train_batch_size=share,
        per_device_eval_batch_size=share * recipe.task.eval_batch_factor,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup * steps),
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip,
        seed=config.seed,
        bf16=precision == "bfloat16",
        gradient_checkpointing=config.checkpointing,
        eval_strategy=interval,
        eval_steps=config.evaluate_every or None,
        save_strategy=interval,
        save_steps=config.evaluate_every or 500,
        logging_strategy=interval,
        logging_steps=max(1, config.evaluate_every // 10) if config.evaluate_every else 500,
        save_total_limit=None,  # `_save_checkpoint` removes old ones
        logging_nan_inf_filter=False,  # a loss that is not a number must be seen
        load_best_model_at_end=config.keep == "best",
        metric_for_best_model=headline.name,
        greater_is_better=headline.higher_is_better,
        restore_callback_states_from_checkpoint=True,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_backend="gloo" if processes().total > 1 and not torch.cuda.is_available() else None,
        ddp_find_unused_parameters=False,
        dataloader_num_workers=config.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        fsdp=config.distributed == "fsdp2" and processes().total > 1,  # type: ignore[arg-type]
        fsdp_config=_fsdp_settings(model),
        **cosine,  # type: ignore[arg-type]
    )


def _fsdp_settings(model: nn.Module) -> dict[str, Any]:
    """Shard block by block; the model names the classes of its blocks as transformers' models do.

    Only those that it has: accelerate raises an error for others.
    """
    present = {type(module).__name__ for module in model.modules()}
    blocks = [name for name in getattr(model, "_no_split_modules", None) or [] if name in present]
    return {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": blocks}


class Averaging(TrainerCallback):
    """Updates the moving average of the weights."""

    def __init__(self, average: WeightAverage) -> None:
        self.average = average

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """After the optimizer step."""
        self.average.update(model, state.global_step)


class Snapshots(TrainerCallback):
    """Saves the weights at the start and at every validation."""

    def __init__(self, trainer: TaskTrainer, folder: RunFolder) -> None:
        self.trainer, self.folder = trainer, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the initial weights."""
        self.folder.save_snapshot(state.global_step, self.trainer.weights())

    def on_evaluate(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Save the weights that were just validated."""
        self.folder.save_snapshot(state.global_step, self.trainer.weights())


class BestCheckpoint(TrainerCallback):
    """Finds the best checkpoint of a resumed run again: its state has a path, and the folder can have been moved."""

    def __init__(self, best: str) -> None:
        self.name = Path(best).name

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take it from the run's own folder."""
        state.best_model_checkpoint = str(Path(args.output_dir) / self.name)


class TaskTrainer(Trainer):
    """transformers' Trainer for a task."""

    model: nn.Module

    def __init__(self, recipe: Recipe, model: nn.Module, arguments: TrainingArguments, data: DataSplits) -> None:
        self.recipe, self.task = recipe, recipe.task
        self.last_weights: dict[str, Tensor] = {}
        if processes().total > 1:
            share_batch_norms(model)
        tokens = data.metadata.get("tokens_per_item")
        self.average = WeightAverage(model, recipe.training.ema) if recipe.training.ema else None
        if recipe.training.statistics and not batch_norms(model):
            raise ValueError(
                f"training.statistics must be 0 for a model without batch norms, got {recipe.training.statistics}"
            )
        self.share = ContextShare.of(processes(), recipe.training.context)
        if self.share.size > 1 and not self.task.can_split(model):
            raise ValueError(
                f"training.context must be 1 for this task and model, whose sequences cannot be split over processes, "
                f"got {self.share.size}"
            )
        self.clock = Clock(None if tokens is None else tokens * recipe.training.batch_size)
        super().__init__(
            model,
            arguments,
            data_collator=functools.partial(self._collate, training=False),
            train_dataset=data.train,
            eval_dataset=data.validation,
            callbacks=[self.clock, *([Averaging(self.average)] if self.average else [])],
        )
        self.shared_sequences = self.share.group()

    def _collate(self, items: list[Any], training: bool) -> dict[str, Tensor]:
        """Make a batch, or this process's piece of it."""
        return self._piece(self.task.collate(items, training=training))

    def _piece(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return batch if self.share.size == 1 else self.task.piece(batch, self.share.piece, self.share.size)

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        """Run forward and backward with the processes that share the batch."""
        with self.shared_sequences():
            return super().training_step(*arguments, **options)

    def create_accelerator_and_postprocess(self) -> None:
        """Let CPUs shard too: accelerate does FSDP2 on GPUs only, though it works over gloo."""
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        if self.args.fsdp_plugin_args and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Validate, with recomputed batch norm statistics if the recipe asks for them."""
        self._recompute_statistics()
        return super().evaluate(*arguments, **options)

    def _recompute_statistics(self) -> None:
        """From the same training items each time, in every process; of the averaged weights if there are any."""
        training, data = self.recipe.training, self.train_dataset
        if not training.statistics:
            return
        with isolated_random_state(training.seed), self.accelerator.autocast():
            size = self.args.per_device_eval_batch_size
            batches = draw_batches(len(data), training.statistics, size)  # type: ignore[arg-type]
            items = ([data[i] for i in batch] for batch in batches)  # type: ignore[index]
            inputs = (self._prepare_inputs(self.task.collate(batch, training=True)) for batch in items)
            recompute_statistics(self.average.average.module if self.average else self.model, inputs)

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **options: Any) -> Any:
        """Score a split for the Trainer."""
        scores = self.score(dataloader.dataset)
        prefix = options.get("metric_key_prefix", "eval")
        names = dict.fromkeys([*(metric.name for metric in self.task.metrics), "loss"])
        metrics = {f"{prefix}_{name}": scores[name] for name in names if name in scores}
        return EvalLoopOutput(None, None, metrics, len(dataloader.dataset))  # type: ignore[arg-type]

    def score(self, split: Any) -> dict[str, Any]:
        """All scores of the model on a split, with the averaged weights if there are any."""
        averaged = self.average.applied_to(self.model) if self.average else nullcontext()
        with averaged, self.accelerator.autocast(), self.shared_sequences():
            return score_split(
                self.task,
                self.model,
                split,
                self.args.per_device_eval_batch_size,
                lambda batch: self._prepare_inputs(self._piece(batch)),
                self.share.batch,
                self.share.batches,
                self.share.size,
            )

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """Add the training time."""
        self.clock.add(logs, self.state.global_step)
        super().log(logs, *arguments, **options)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The model's own loss; during training with label smoothing if the recipe asks for it."""
        smoothing = self.recipe.training.label_smoothing
        if not (smoothing and model.training):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        asked = {"return_logits": True} if "return_logits" in signature(type(self.model).forward).parameters else {}
        outputs = model(**inputs, **asked)
        if "logits" not in outputs:
            raise ValueError(f"training.label_smoothing must be 0 for a model without logits, got {smoothing}")
        logits, labels = outputs["logits"].flatten(0, -2), inputs["labels"].flatten()
        accumulated = num_items_in_batch is not None  # number of labels over all micro-batches and processes
        loss = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum" if accumulated else "mean")
        loss = loss / num_items_in_batch * self.accelerator.num_processes if accumulated else loss
        return (loss, outputs) if return_outputs else loss

    def get_train_dataloader(self) -> Any:
        """Collate training batches with augmentation."""
        evaluating = self.data_collator
        self.data_collator = functools.partial(self._collate, training=True)
        try:
            return self.share.shard(super().get_train_dataloader())
        finally:
            self.data_collator = evaluating

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Build the optimizer; skip weight decay for `no_weight_decay` parameters."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.model if model is None else model, self.recipe.training)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Use transformers' cosine schedule, or ours with a cooldown."""
        if self.recipe.training.cooldown and self.lr_scheduler is None:
            chosen: Any = optimizer or self.optimizer
            self.lr_scheduler = cosine_with_cooldown(chosen, self.recipe.training, num_training_steps)
        return super().create_scheduler(num_training_steps, optimizer)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save the EMA too; seal the checkpoint when all processes have written, and only then remove old ones."""
        folder = Path(str(self.args.output_dir))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        writes = self.args.should_save
        try:
            with naming(checkpoint):
                if writes:
                    # Before sharded weights are written, transformers asks on every process whether the best
                    # checkpoint exists, which can be this one; each has to get the same answer.
                    checkpoint.mkdir(parents=True, exist_ok=True)
                if self.average is not None and writes:
                    self.average.save(checkpoint)
                super()._save_checkpoint(model, trial)
                self.accelerator.wait_for_everyone()
                if writes:
                    seal(checkpoint)
        except BaseException:
            if writes:
                remove_checkpoint(checkpoint)
            raise
        if writes:
            rotate(folder, self.state.best_model_checkpoint, KEPT_CHECKPOINTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average is not None:
            self.average.load(Path(resume_from_checkpoint))

    def weights(self) -> dict[str, Tensor]:
        """The model's weights, or their average; shards are gathered from all processes."""
        weights = self.model.state_dict() if self.average is None else self.average.weights()
        return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}

    def _load_best_model(self) -> None:
        self.last_weights = {name: tensor.clone() for name, tensor in self.weights().items()}
        best = Path(str(self.state.best_model_checkpoint))
        problem = damage(best)
        if problem:
            raise ValueError(f"{best} has the weights to keep and is damaged: {problem}; --resume trains again")
        super()._load_best_model()
        if self.average is not None:
            self.average.load(best)
