"""`muonssm bench --training`: a training step of the activity recipe, ours and on transformers' Mamba."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.lab.core.timing import best_seconds
from muonssm.layers import export_weights
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig
from muonssm.ops import Muon

from . import limits
from .measure import check_close, threads
from .record import Row, rows_of, table, write_record

COMPILED_PEER = True  # whether to time transformers' mixers under `torch.compile` too: a minute to compile
BATCH, LENGTH, CHANNELS, CLASSES = 16, 512, 6, 7
WINDOWS = 409  # in the training set of the recipe `watch`, for the time per epoch


class TransformersMixer(nn.Module):
    """transformers' `MambaMixer` with `use_mambapy=True` and the weights of `mixer`, with the signature of ours."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        from transformers import MambaConfig
        from transformers.models.mamba.modeling_mamba import MambaMixer

        config = MambaConfig(
            hidden_size=mixer.d_model, state_size=mixer.d_state, time_step_rank=mixer.dt_rank, num_hidden_layers=1,
            use_mambapy=True,
        )  # fmt: skip
        self.module = MambaMixer(config, layer_idx=0)
        self.module.load_state_dict(export_weights(mixer, "transformers"))

    def forward(self, x: Tensor, state: None = None) -> tuple[Tensor, None]:
        return self.module(x), None


def networks() -> dict[str, ActivityClassifier]:
    """The recipe's network with our mixers, plain and with Muon, and with transformers' mixers; equal weights."""
    models = {}
    for name, muon in (("plain", Muon.off()), ("muon", Muon())):
        torch.manual_seed(0)
        models[name] = ActivityClassifier(ActivityModelConfig("mamba"), muon, CHANNELS, CLASSES)
    peer = copy.deepcopy(models["plain"])
    peer.mixers = nn.ModuleList(TransformersMixer(mixer) for mixer in peer.mixers)
    return {**models, "transformers": peer}


@torch.no_grad()
def check(models: dict[str, ActivityClassifier], x: Tensor) -> None:
    """Check our plain network against the one with transformers' mixers."""
    actual, expected = (models[name].eval()(x)["logits"] for name in ("plain", "transformers"))
    check_close("plain", actual, expected)


def training_step(model: ActivityClassifier, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """A function that runs forward, backward, gradient clipping and Adam."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-3, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x, labels)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def compiled_step(peer: ActivityClassifier, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """`training_step` of the peer under `torch.compile`."""
    compiled = copy.deepcopy(peer)
    compiled.forward = torch.compile(compiled.forward)  # type: ignore[method-assign]
    return training_step(compiled, x, labels)


def against_the_limit(
    models: dict[str, ActivityClassifier], x: Tensor, labels: Tensor, rounds: int
) -> tuple[list[Row], dict[str, float]]:
    """Shares of the matmul limit, plain and Muon in each fast precision, peak memory, and the cost of a busy core."""
    works = {
        f"{name}, {precision}": limits.training_work(copy.deepcopy(models[name]), x.shape[0] * x.shape[1], precision,
                                                     x=x, labels=labels)
        for name in ("plain", "muon") for precision in limits.fast_precisions()
    }  # fmt: skip
    seconds = best_seconds({name: work.step for name, work in works.items()}, rounds, budget=10.0)
    summary = limits.shares(works, seconds, limits.matmul_rates())
    first = works["plain, float32"]
    summary["peak memory, plain, float32, GB"] = limits.memory_bytes(first) / 1e9
    summary["step beside a busy core over a quiet step"] = limits.slowdown_beside_a_busy_core(first.step)
    return rows_of("activity recipe, Mamba, AdamW", seconds, "plain, float32"), summary


def run(output: Path, rounds: int, thread_count: int) -> int:
    """Print the table and write training.json into `output`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, CHANNELS, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    with threads(thread_count):
        models = networks()
        check(models, x[:, :64])
        steps = {name: training_step(model, x, labels) for name, model in models.items()}
        if COMPILED_PEER:
            steps["transformers, compiled"] = compiled_step(models["transformers"], x, labels)
        seconds = best_seconds(steps, rounds, budget=60.0)
        limit_rows, limit_summary = against_the_limit(models, x, labels, rounds)
    rows = rows_of("activity recipe, Mamba, training step", seconds, "plain")
    steps_per_epoch = -(-WINDOWS // BATCH)
    summary = {f"seconds per epoch of watch, {name}": steps_per_epoch * value for name, value in seconds.items()}
    summary["transformers over plain"] = seconds["transformers"] / seconds["plain"]
    summary["muon over plain"] = seconds["muon"] / seconds["plain"]
    if COMPILED_PEER:
        summary["transformers, compiled, over plain"] = seconds["transformers, compiled"] / seconds["plain"]
    rows += limit_rows
    summary |= limit_summary
    print(f"\nd_model 128, d_state 64, {BATCH} windows of {LENGTH} steps, two layers, float32, {thread_count} threads")
    print(table(rows, summary))
    write_record(output / "training.json", thread_count, rows, summary)
    return 0
