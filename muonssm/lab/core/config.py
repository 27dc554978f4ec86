"""`TrainingConfig`: budget, optimizer, schedule and parallelism of a run."""

from __future__ import annotations

from dataclasses import dataclass

from muonssm.checks import check_choice, check_int, check_number

CHOICES = {
    "optimizer": ("adam", "adamw", "lamb"),
    "precision": ("float32", "bfloat16", "auto"),
    "distributed": ("ddp", "fsdp2"),
    "keep": ("best", "last"),
    "checkpointing": (True, False),
    "snapshots": (True, False),
}


INTEGERS = {  # with their least values
    "epochs": 1, "batch_size": 1, "accumulation": 1, "context": 1, "steps": 0, "evaluate_every": 0, "statistics": 0,
    "patience": 0, "seed": 0, "workers": 0,
}  # fmt: skip
LARGEST_SEED = 2**32 - 1  # of numpy's generator
LARGEST_RATE = 1e6  # far beyond what trains; the optimizers' products with it stay within float32
FRACTIONS = ("warmup", "cooldown", "label_smoothing", "final_rate", "beta1", "beta2", "ema")


@dataclass(frozen=True)
class TrainingConfig:
    """Training settings. The defaults are the paper's for sensor windows (appendix B.4).

    Attributes:
        epochs: passes over the training data, at most.
        steps: optimizer steps instead of epochs; 0 counts epochs.
        evaluate_every: steps between validations and checkpoints; 0 validates once per epoch.
        batch_size: items per step, over all processes.
        accumulation: micro-batches per step and process, to fit memory.
        learning_rate: peak learning rate; a cosine decays it to `final_rate` times that.
        final_rate: final learning rate, as a fraction of the peak.
        warmup: fraction of all steps with a rising learning rate.
        weight_decay: `"adam"` adds it to the gradient, `"adamw"` decouples it.
        cooldown: fraction of all steps, at the end, with the final learning rate.
        optimizer: `"adam"`, `"adamw"` or `"lamb"` (timm's).
        beta1, beta2: of the optimizer.
        clip: largest gradient norm.
        patience: validations without improvement before training stops; 0 never stops early.
        keep: weights of the `"best"` validation, or the `"last"`.
        ema: decay of a moving average of the weights, which is then validated and kept; 0 keeps none.
        statistics: number of training items from which batch norm statistics are recomputed before every validation;
            0 keeps the running statistics.
        label_smoothing: fraction of the target spread over all classes.
        precision: `"float32"`, or `"bfloat16"` for autocast (weights and states stay float32), or `"auto"`: bfloat16
            where the machine multiplies it faster; the run says which, and a resumed run keeps it.
        checkpointing: recompute activations in the backward pass, to save memory.
        distributed: with several torchrun processes, `"ddp"` replicates the weights and `"fsdp2"` shards them.
        context: number of torchrun processes that share each sequence, in pieces along time; other groups of processes
            train on other sequences.
        workers: data loading processes.
        snapshots: keep the weights of every validation in snapshots/, for analyses along training.
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
    context: int = 1
    workers: int = 0
    snapshots: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in INTEGERS.items():
            check_int(name, getattr(self, name), least)
        if self.seed > LARGEST_SEED:
            raise ValueError(f"seed must be an integer in 0 to {LARGEST_SEED}, got {self.seed}")
        for name in FRACTIONS:
            check_number(name, getattr(self, name), 0, 1)
        check_number("weight_decay", self.weight_decay, 0, LARGEST_RATE)
        check_number("learning_rate", self.learning_rate, 0, LARGEST_RATE, open_low=True)
        check_number("clip", self.clip, 0, open_low=True)
        for name, choices in CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        if self.patience and self.keep == "last" and not self.evaluate_every and self.steps:
            raise ValueError(f"patience must be 0 without evaluate_every, got {self.patience}")

    def share(self, processes: int) -> int:
        """Items per process and micro-batch; raise if a batch cannot be divided evenly."""
        if processes % self.context:
            raise ValueError(f"context must divide the number of processes, {processes}, got {self.context}")
        count = processes // self.context * self.accumulation
        if self.batch_size % count:
            shared = f", context = {self.context}" if self.context > 1 else ""
            reason = f"{processes} processes with accumulation = {self.accumulation}{shared}"
            raise ValueError(f"batch_size must be a multiple of {count} for {reason}, got {self.batch_size}")
        return self.batch_size // count
