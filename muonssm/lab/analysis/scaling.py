"""The analysis `scaling` of an experiment: time of a training step against the length of the sequences."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.lab.core.experiment import Experiment
from muonssm.lab.core.timing import best_seconds, fit_exponent
from muonssm.lab.core.variants import DEFAULT_VARIANTS, PLAIN, display_name, variant_task
from muonssm.lab.report import figures

from .result import Result

LENGTHS = (128, 256, 512, 1024, 2048)
MAX_SEQUENCES = 16
ROUNDS, SECONDS_PER_MODEL = 5, 6.0
PAPER = (
    "The time per epoch grows with the length in the same way, plain and with Muon, up to a constant factor (a figure "
    "without numbers)."
)


def analyze_scaling(experiment: Experiment) -> Result:
    """Seconds per training step at several lengths, measured in turns: a comparison's variants, else plain and Muon."""
    result = Result("scaling", "Time against sequence length", PAPER)
    recipe, metadata = experiment.recipe, experiment.metadata()
    sequences = min(MAX_SEQUENCES, recipe.training.batch_size)
    names = experiment.trained_variants if experiment.compared_variants else DEFAULT_VARIANTS
    tasks = {name: variant_task(recipe.task, name) for name in names}
    models = {variant: task.build_model(metadata) for variant, task in tasks.items()}
    seconds: dict[str, list[float]] = {variant: [] for variant in models}
    for length in LENGTHS:
        batch = random_batch(metadata, sequences, length)
        steps = {variant: _training_step(model, batch) for variant, model in models.items()}
        for variant, best in best_seconds(steps, ROUNDS, SECONDS_PER_MODEL).items():
            seconds[variant].append(best)
    _add_times(result, seconds, sequences)
    metrics = experiment.folder(experiment.trained_runs[0]).read("metrics.json")
    steps, epochs = metrics.get("steps"), metrics.get("epochs")
    per_epoch = steps / epochs if steps and epochs else None
    threads = torch.get_num_threads()
    result.settings = {"threads": threads, "sequences": sequences, "training steps per epoch": per_epoch}
    return result


def random_batch(metadata: Mapping[str, Any], sequences: int, length: int) -> dict[str, Tensor]:
    """A random batch of any length: sensor channels with a class each, or tokens, as the metadata of the data says."""
    generator = torch.Generator().manual_seed(0)
    if "channels" in metadata and "mean" in metadata:
        x = torch.randn(sequences, length, len(metadata["channels"]), generator=generator)
        return {"x": x, "labels": torch.randint(len(metadata["classes"]), (sequences,), generator=generator)}
    tokens = torch.randint(metadata["vocab_size"], (sequences, length), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _training_step(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    """A function that runs forward and backward."""
    parameters = [p for p in model.train().parameters() if p.requires_grad]

    def step() -> None:
        torch.autograd.grad(model(**batch)["loss"], parameters, allow_unused=True)

    return step


def _add_times(result: Result, seconds: Mapping[str, list[float]], sequences: int) -> None:
    """Add the figure, the table, and the growth of time with length."""
    curves = {variant: [list(zip(map(float, LENGTHS), times, strict=True))] for variant, times in seconds.items()}
    figure = figures.lines(curves, "sequence length", "seconds", log_x=True, log_y=True)
    result.add_figure(f"Seconds per training step, {sequences} sequences", figure)
    exponents = {variant: fit_exponent(list(LENGTHS), times) for variant, times in seconds.items()}
    result.data = {"lengths": LENGTHS, "seconds": seconds, "powers": exponents}
    rows = [[variant, *(f"{time:.3f}" for time in times)] for variant, times in seconds.items()]
    for variant in (name for name in seconds if name != PLAIN):
        ratios = [time / plain for time, plain in zip(seconds[variant], seconds[PLAIN], strict=True)]
        rows.append([f"{variant} over plain", *(f"{ratio:.2f}" for ratio in ratios)])
        result.data[f"{variant} over plain"] = ratios
        name = display_name(variant)
        result.found.append(
            f"Time grows as length to the power {exponents[PLAIN]:.2f} (plain) and {exponents[variant]:.2f} ({name}). "
            f"A training step with {name} takes {statistics.fmean(ratios):.2f} times as long as a plain one "
            f"({min(ratios):.2f} to {max(ratios):.2f})."
        )
    head = ["", *(f"L = {length}" for length in LENGTHS)]
    result.add_table(f"Seconds per training step, best of {ROUNDS}", head, rows)
