"""`muonssm bench --training`: a training step of the activity recipe, ours and on transformers' Mamba."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.layers import export_weights
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig
from muonssm.ops import Muon

from .measure import best_seconds, threads
from .operators import Row, table, write_record
from .workloads import TOLERANCE

BATCH, LENGTH, CHANNELS, CLASSES = 16, 512, 6, 7
WINDOWS = 409  # of the training part of `watch`, for the time of an epoch


class TransformersMixer(nn.Module):
    """transformers' `MambaMixer` with `use_mambapy=True` and the weights of `mixer`, called as ours are."""

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
    """The recipe's network on our mixers, plain and with Muon, and on transformers': one set of weights for all."""
    models = {}
    for name, muon in (("plain", Muon.off()), ("muon", Muon())):
        torch.manual_seed(0)
        models[name] = ActivityClassifier(ActivityModelConfig("mamba"), muon, CHANNELS, CLASSES)
    theirs = copy.deepcopy(models["plain"])
    theirs.mixers = nn.ModuleList(TransformersMixer(mixer) for mixer in theirs.mixers)
    return {**models, "transformers": theirs}


def check(models: dict[str, ActivityClassifier], x: Tensor) -> None:
    """No speed is reported for a wrong result."""
    with torch.no_grad():
        found, wanted = (models[name].eval()(x)["logits"] for name in ("plain", "transformers"))
    error = ((found - wanted).norm() / wanted.norm()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"plain is off by {error:.2e} (it may be {TOLERANCE:g}): no speed is reported")


def step_of(model: ActivityClassifier, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward, backward, clipping and Adam."""
    optimizer = torch.optim.Adam(model.train().parameters(), lr=1e-3, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x, labels)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def run(output: Path, rounds: int, thread_count: int) -> int:
    """Prints the table and writes training.json into `output`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, LENGTH, CHANNELS, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    with threads(thread_count):
        models = networks()
        check(models, x[:, :64])
        seconds = best_seconds({name: step_of(model, x, labels) for name, model in models.items()}, rounds, budget=60.0)
    rows = [Row("activity recipe, Mamba, training step", n, 1e3 * s, s / seconds["plain"]) for n, s in seconds.items()]
    epoch = -(-WINDOWS // BATCH)
    metadata = {f"seconds an epoch of watch, {name}": epoch * value for name, value in seconds.items()}
    metadata["transformers over plain"] = seconds["transformers"] / seconds["plain"]
    metadata["muon over plain"] = seconds["muon"] / seconds["plain"]
    print(f"\nd_model 128, d_state 64, {BATCH} windows of {LENGTH}, two layers, float32, {thread_count} threads")
    print(table(rows, metadata))
    write_record(output / "training.json", thread_count, rows, metadata)
    return 0
