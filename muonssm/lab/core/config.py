"""`TrainingConfig`: how long, how fast, with what optimiser, on how many processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from muonssm.checks import is_int, is_number

CHOICES = {
    "optimizer": ("adam", "adamw", "lamb"),
    "precision": ("float32", "bfloat16"),
    "distributed": ("ddp", "fsdp2"),
    "keep": ("best", "last"),
    "checkpointing": (True, False),
    "snapshots": (True, False),
}


@dataclass(frozen=True)
class TrainingConfig:
    """The defaults are the paper's for activity recognition (appendix B.4).

    Attributes:
        epochs: at most so many passes over the training data.
        steps: so many optimiser steps in place of epochs; 0 goes by epochs.
        evaluate_every: steps between validations and checkpoints; 0 is once an epoch.
        batch_size: items a step, over all processes.
        accumulation: in how many parts a process takes its share of a batch, to fit memory.
        learning_rate: at the start; a cosine takes it to `final_rate` times that.
        final_rate: where the cosine ends, as a part of the learning rate.
        warmup: part of all steps over which the learning rate rises first.
        weight_decay: of the optimiser; `"adam"` adds it to the gradient, `"adamw"` takes it from the weights.
        cooldown: part of all steps, at the end, that stay at the final rate.
        optimizer: `"adam"`, `"adamw"` or `"lamb"` (timm's).
        beta1, beta2: of the optimiser.
        clip: largest norm of the gradient.
        patience: validations without a better score before it ends; 0 never ends early.
        keep: the weights of the `"best"` validation, or the `"last"`.
        ema: of a moving average of the weights, what stays of it at each step; the average is what is kept. 0: none.
        statistics: of batch norms, from how many training items they are computed anew for the weights that are
            validated and kept; 0 keeps the running ones of training.
        label_smoothing: part of the target that goes to all classes alike.
        precision: `"float32"`, or `"bfloat16"` for autocast (weights and states stay float32).
        checkpointing: whether activations are computed again in the backward pass, to save memory.
        distributed: among processes of torchrun, `"ddp"` gives each a copy of the weights, `"fsdp2"` a share of them.
        workers: processes that load and augment data.
        snapshots: whether the weights of every validation stay, in snapshots/, for what is to be seen along training.
        seed: of weights, batches, dropout and augmentation.
    """

    epochs: int = 50
    steps: int = 0
    evaluate_every: int = 0
    batch_size: int = 16
    accumulation: int = 1
    learning_rate: float = 1e-3
    final_rate: float = 0.0
    warmup: float = 0.0
    cooldown: float = 0.0
    weight_decay: float = 1e-4
    optimizer: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 1.0
    patience: int = 10
    keep: str = "best"
    ema: float = 0.0
    statistics: int = 0
    label_smoothing: float = 0.0
    precision: str = "float32"
    checkpointing: bool = False
    distributed: str = "ddp"
    workers: int = 0
    snapshots: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"epochs": 1, "batch_size": 1, "accumulation": 1}
        whole = ("steps", "evaluate_every", "statistics", "patience", "seed", "workers")
        for name in (*least, *whole):
            value, low = getattr(self, name), least.get(name, 0)
            if not is_int(value, low):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= {low}")
        high = {"weight_decay": math.inf}
        for name in ("warmup", "cooldown", "weight_decay", "label_smoothing", "final_rate", "beta1", "beta2", "ema"):
            value, top = getattr(self, name), high.get(name, 1.0)
            if not is_number(value) or not 0 <= value <= top:
                raise ValueError(f"{name} is {value!r}; it may be in [0, {top:g}]")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; it may be a number > 0")
        for name, may in CHOICES.items():
            if getattr(self, name) not in may:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be one of {may}")
        if self.patience and self.keep == "last" and not self.evaluate_every and self.steps:
            raise ValueError(f"patience is {self.patience}; without evaluate_every it may be 0")

    def share(self, processes: int) -> int:
        """Items that a process takes at once; raises if a batch cannot be shared out evenly."""
        parts = processes * self.accumulation
        if self.batch_size % parts:
            told = f"{processes} processes and accumulation = {self.accumulation}"
            raise ValueError(f"batch_size is {self.batch_size}; with {told} it may be a multiple of {parts}")
        return self.batch_size // parts
