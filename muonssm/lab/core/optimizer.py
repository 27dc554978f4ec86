"""The optimizer, its learning rate schedule, and a moving average of the weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from .config import TrainingConfig

AVERAGE = "average.safetensors"


def no_weight_decay(network: nn.Module) -> set[str]:
    """Names of the parameters without weight decay; modules name theirs in `no_weight_decay()`."""
    names = set()
    for prefix, module in network.named_modules():
        own = getattr(module, "no_weight_decay", None)
        names |= {f"{prefix}.{name}" if prefix else name for name in (own() if callable(own) else ())}
    return names


def build_optimizer(network: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Adam, AdamW or timm's LAMB, as the recipe says."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    without_decay = no_weight_decay(network)
    for name, parameter in network.named_parameters():
        groups[name in without_decay].append(parameter)
    decays = [config.weight_decay, 0.0]
    listed = [{"params": g, "weight_decay": d} for g, d in zip(groups.values(), decays, strict=True) if g]
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
    if config.optimizer == "lamb":
        from timm.optim import Lamb

        return Lamb(listed, max_grad_norm=None, **settings)  # the trainer clips
    return (torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW)(listed, **settings)


def cosine_with_cooldown(optimizer: torch.optim.Optimizer, config: TrainingConfig, steps: int) -> LambdaLR:
    """Linear warm-up, cosine decay to the final rate, then constant for the cooldown."""
    rate = functools.partial(_rate, round(config.warmup * steps), round(config.cooldown * steps), steps)
    return LambdaLR(optimizer, functools.partial(rate, config.final_rate))


def _rate(warmup: int, cooldown: int, steps: int, final: float, step: int) -> float:
    if step < warmup:
        return step / max(1, warmup)
    progress = min(1.0, (step - warmup) / max(1, steps - cooldown - warmup))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


class WeightAverage:
    """Exponential moving average of a model's weights and buffers, by timm.

    The decay warms up from 0 to `decay`, so that the first steps do not dominate.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        from timm.utils import ModelEmaV3

        self.average = ModelEmaV3(model, decay=decay, use_warmup=True)

    def update(self, model: nn.Module, step: int) -> None:
        """Update after an optimizer step."""
        self.average.update(model, step=step)

    def weights(self) -> dict[str, Tensor]:
        """The averaged weights."""
        return self.average.module.state_dict()

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Put the averaged weights into the model inside the block, and its own back afterwards."""
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(self.weights())
        try:
            yield
        finally:
            model.load_state_dict(own)

    def save(self, folder: Path) -> None:
        """Save the average into a checkpoint folder."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.weights().items()}, folder / AVERAGE)

    def load(self, folder: Path) -> None:
        """Load the average from a checkpoint folder."""
        from safetensors.torch import load_file

        self.average.module.load_state_dict(load_file(folder / AVERAGE))
