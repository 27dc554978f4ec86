"""Time of training against the length of sequences: whether Muon stays linear, and what it costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.lab.bench.measure import best_seconds, exponent
from muonssm.lab.core.task import Task
from muonssm.lab.report import figures

from .case import Case
from .result import Result
from .variants import own_muon

LENGTHS = (128, 256, 512, 1024, 2048)
ROUNDS, BUDGET = 5, 6.0
PAPER = (
    "Time per epoch grows alike with the length, plain and with Muon: a constant factor more (a figure, no numbers)."
)


def noise(task: Task, metadata: dict[str, Any], size: int, length: int) -> dict[str, Tensor]:
    """Noise in the form of the task's batches, of one length."""
    generator = torch.Generator().manual_seed(0)
    if "channels" in metadata and "mean" in metadata:
        x = torch.randn(size, length, len(metadata["channels"]), generator=generator)
        return {"x": x, "labels": torch.randint(len(metadata["classes"]), (size,), generator=generator)}
    tokens = torch.randint(metadata["vocab_size"], (size, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def step_of(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    """Forward and backward."""
    parameters = [p for p in model.train().parameters() if p.requires_grad]

    def step() -> None:
        torch.autograd.grad(model(**batch)["loss"], parameters, allow_unused=True)

    return step


def scaling(case: Case) -> Result:
    """Seconds of a training step at several lengths, plain and Muon, taking turns."""
    result = Result("scaling", "Time against length", PAPER)
    metadata, size = case.metadata(), min(16, case.recipe.training.batch_size)
    tasks = {"plain": case.recipe.task.plain(), "muon": case.recipe.task.with_muon(own_muon(case.recipe))}
    models = {kind: task.build_model(metadata) for kind, task in tasks.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in models}
    for length in LENGTHS:
        batch = noise(case.recipe.task, metadata, size, length)
        best = best_seconds({kind: step_of(model, batch) for kind, model in models.items()}, ROUNDS, BUDGET)
        for kind, value in best.items():
            seconds[kind].append(value)
    ratios = [m / p for m, p in zip(seconds["muon"], seconds["plain"], strict=True)]
    points = {kind: [list(zip(map(float, LENGTHS), values, strict=True))] for kind, values in seconds.items()}
    picture = figures.lines(points, "steps of a sequence", "seconds", log_x=True, log_y=True, legend=True)
    result.figure(f"Seconds of a training step, {size} sequences", picture)
    rows = [[kind, *(f"{value:.3f}" for value in values)] for kind, values in seconds.items()]
    rows.append(["muon over plain", *(f"{value:.2f}" for value in ratios)])
    result.table("Seconds of a training step, the best of several", ["", *(f"L = {n}" for n in LENGTHS)], rows)
    powers = {kind: exponent(list(LENGTHS), values) for kind, values in seconds.items()}
    result.found.append(
        f"Time grows as length to the power {powers['plain']:.2f} (plain) and {powers['muon']:.2f} (Muon); a step with "
        f"Muon takes {statistics.fmean(ratios):.2f} times a plain one ({min(ratios):.2f} to {max(ratios):.2f})."
    )
    steps = case.subjects[0].folder.read("metrics.json")
    per_epoch = steps["steps"] / steps["epochs"] if steps.get("epochs") else None
    result.settings = {"threads": torch.get_num_threads(), "sequences": size, "steps of an epoch": per_epoch}
    result.data = {"lengths": LENGTHS, "seconds": seconds, "muon over plain": ratios, "powers": powers}
    return result
