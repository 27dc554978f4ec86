"""How near a training step comes to the machine's matmul limit, its memory, and what a busy core costs it.

The limit: 6 N flops per token (N parameters; forward 2 N, backward 4 N) at the rate of a large square product in the
same run and the same precision. Steps run as `muonssm train` runs them, so float32 products take the faster library of
`muonssm.lab.core.matmul`. Where that is not torch's own choice, the share of the limit of that choice stands beside.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.lab.core.allocator import keep_freed_memory
from muonssm.lab.core.matmul import choose_matmuls, fast_matmuls
from muonssm.lab.core.precision import choose_precision
from muonssm.lab.core.timing import best_seconds

from .measure import peak_bytes

SQUARE = 2048  # rows and columns of the product that gives the rate
OWN_CHOICE = "float32 by torch's own choice"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Work:
    """A training step to compare with the limit.

    Attributes:
        step: runs forward, loss, backward, clipping and the optimizer once.
        parameters, tokens: of the model, and of the step.
        precision: `"float32"` or `"bfloat16"`.
    """

    step: Callable[[], None]
    parameters: int
    tokens: int
    precision: str

    def limit_seconds(self, rates: dict[str, float]) -> float:
        """The time of the step's matmuls at `rates`, in flops per second by precision."""
        return 6 * self.parameters * self.tokens / rates[self.precision]


def fast_precisions() -> tuple[str, ...]:
    """float32, and bfloat16 where this machine multiplies it faster."""
    return tuple(dict.fromkeys(("float32", choose_precision("auto").name)))


def matmul_rates(rounds: int = 8) -> dict[str, float]:
    """Flops per second of a large square product, by precision; of float32 also by torch's own choice of library."""
    products: dict[str, Callable[[], Tensor]] = {}
    for name in fast_precisions():
        a, b = torch.randn(2, SQUARE, SQUARE).to(DTYPES[name])
        product = functools.partial(torch.mm, a, b)
        products[name] = fast_matmuls()(product)
        if name == "float32" and choose_matmuls().onednn:
            products[OWN_CHOICE] = product
    return {name: 2 * SQUARE**3 / seconds for name, seconds in best_seconds(products, rounds).items()}


def training_work(model: nn.Module, tokens: int, precision: str, **batch: Tensor) -> Work:
    """A whole step of training `model` on `batch`: autocast if asked for, clipping, fused AdamW.

    From then on the process keeps the memory that it frees, as in training.
    """
    keep_freed_memory()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    @fast_matmuls()
    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return Work(step, sum(p.numel() for p in model.parameters()), tokens, precision)


def shares(works: dict[str, Work], seconds: dict[str, float], rates: dict[str, float]) -> dict[str, float]:
    """The share of the limit that each step reaches, as entries of a summary."""
    found = {f"share of the matmul limit, {name}": works[name].limit_seconds(rates) / seconds[name] for name in works}
    if OWN_CHOICE in rates:
        own = {"float32": rates[OWN_CHOICE]}
        for name, work in works.items():
            if work.precision == "float32":
                found[f"share of the limit of torch's own choice, {name}"] = work.limit_seconds(own) / seconds[name]
    return found


def memory_bytes(work: Work) -> int:
    """Peak of weights, moments, gradients and activations of a step, in float32 but for the activations of autocast.

    The first step has created the moments; gradients and activations are what a step allocates.
    """
    work.step()
    return 3 * 4 * work.parameters + peak_bytes(work.step)


@contextmanager
def busy_core() -> Iterator[None]:
    """Let another process use one core without a pause inside the block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)  # it has started
        yield
    finally:
        process.kill()
        process.wait()


def slowdown_beside_a_busy_core(step: Callable[[], Any], rounds: int = 5) -> float:
    """The median time of a step while another process uses one core, over its median time before that."""

    def seconds() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    step()
    quiet = median(seconds() for _ in range(rounds))
    with busy_core():
        return median(seconds() for _ in range(rounds)) / quiet
