"""`muonssm bench --vision`: training steps of MambaVision-T at 224 pixels, plain and with Muon; the scans' share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from muonssm.models.vision import MambaVision, mambavision_tiny
from muonssm.ops import Muon

from .measure import best_seconds, threads
from .operators import Row, table, write_record

BATCH, CHANNELS, PIXELS, CLASSES = 8, 3, 224, 1000
SCANS = ("muonssm::selective_native", "muonssm::selective_native_backward")  # as the profiler knows them


def networks() -> dict[str, MambaVision]:
    """With one set of weights."""
    models = {}
    for name, muon in (("plain", Muon.off()), ("muon", Muon())):
        torch.manual_seed(0)
        models[name] = mambavision_tiny(muon=muon, num_classes=CLASSES)
    return models


def step_of(model: MambaVision, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward, backward and an update."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, weight_decay=0.05, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def share_of_scans(step: Callable[[], None]) -> float:
    """What part of a step's time is spent in the scans, forward and backward."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    scans = sum(event.cpu_time_total for event in events if event.key in SCANS)
    total = sum(event.self_cpu_time_total for event in events)
    if scans == 0:
        raise RuntimeError(f"the profiler saw none of {SCANS}: no share is reported")
    return scans / total


def run(output: Path, rounds: int, thread_count: int) -> int:
    """Prints the table and writes vision.json into `output`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, CHANNELS, PIXELS, PIXELS, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    with threads(thread_count):
        steps = {name: step_of(model, x, labels) for name, model in networks().items()}
        seconds = best_seconds(steps, rounds, budget=120.0)
        shares = {name: share_of_scans(step) for name, step in steps.items()}
    rows = [Row("MambaVision-T, training step", n, 1e3 * s, s / seconds["plain"]) for n, s in seconds.items()]
    metadata = {f"share of the scans, {name}": share for name, share in shares.items()}
    metadata["muon over plain"] = seconds["muon"] / seconds["plain"]
    print(f"\n{BATCH} images of {PIXELS} x {PIXELS}, float32, {thread_count} threads")
    print(table(rows, metadata))
    write_record(output / "vision.json", thread_count, rows, metadata)
    return 0
