"""`TrainingConfig`: how long, how fast, with what optimiser."""

from __future__ import annotations

import math
from dataclasses import dataclass

OPTIMIZERS = ("adam", "adamw")


@dataclass(frozen=True)
class TrainingConfig:
    """The defaults are the paper's for activity recognition (appendix B.4).

    Attributes:
        epochs: at most so many passes over the training windows.
        batch_size: windows a step.
        learning_rate: at the start; a cosine takes it to zero over all epochs.
        warmup: part of all steps over which the learning rate rises first.
        weight_decay: of the optimiser; `"adam"` adds it to the gradient, `"adamw"` takes it from the weights.
        optimizer: `"adam"` or `"adamw"`.
        clip: largest norm of the gradient.
        patience: epochs without a better validation accuracy before it ends; 0 never ends early.
        label_smoothing: part of the target that goes to all classes alike.
        seed: of weights, batches, dropout and augmentation.
    """

    epochs: int = 50
    batch_size: int = 16
    learning_rate: float = 1e-3
    warmup: float = 0.0
    weight_decay: float = 1e-4
    optimizer: str = "adam"
    clip: float = 1.0
    patience: int = 10
    label_smoothing: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("patience", 0), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")
        for name, high in (("warmup", 1.0), ("weight_decay", math.inf), ("label_smoothing", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
                raise ValueError(f"{name} is {value!r}; it may be in [0, {high:g}]")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}; it may be a number > 0")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}; it may be one of {OPTIMIZERS}")
