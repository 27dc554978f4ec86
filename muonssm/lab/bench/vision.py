"""`muonssm bench --vision`: a training step of MambaVision-T at 224 pixels, plain and with Muon; the scans' share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from muonssm.lab.core.timing import best_seconds
from muonssm.models.vision import MambaVision, mambavision_tiny
from muonssm.ops import Muon

from .measure import threads
from .record import rows_of, table, write_record

BATCH, CHANNELS, PIXELS, CLASSES = 8, 3, 224, 1000
SCANS = ("muonssm::selective_native", "muonssm::selective_native_backward")  # their names in the profiler


def networks() -> dict[str, MambaVision]:
    """The network, plain and with Muon, with equal weights."""
    models = {}
    for name, muon in (("plain", Muon.off()), ("muon", Muon())):
        torch.manual_seed(0)
        models[name] = mambavision_tiny(muon=muon, num_classes=CLASSES)
    return models


def training_step(model: MambaVision, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """A function that runs forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, weight_decay=0.05, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def share_of_scans(step: Callable[[], None]) -> float:
    """The share of a step's time that the selective scans take, forward and backward."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.key_averages()
    scans = sum(event.cpu_time_total for event in events if event.key in SCANS)
    total = sum(event.self_cpu_time_total for event in events)
    if scans == 0:
        raise RuntimeError(f"the profiler recorded none of {', '.join(SCANS)}; no share is reported")
    return scans / total


def run(output: Path, rounds: int, thread_count: int) -> int:
    """Print the table and write vision.json into `output`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, CHANNELS, PIXELS, PIXELS, generator=generator)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    with threads(thread_count):
        steps = {name: training_step(model, x, labels) for name, model in networks().items()}
        seconds = best_seconds(steps, rounds, budget=120.0)
        shares = {name: share_of_scans(step) for name, step in steps.items()}
    rows = rows_of("MambaVision-T, training step", seconds, "plain")
    summary = {f"share of the scans, {name}": share for name, share in shares.items()}
    summary["muon over plain"] = seconds["muon"] / seconds["plain"]
    print(f"\n{BATCH} images of {PIXELS} x {PIXELS} pixels, float32, {thread_count} threads")
    print(table(rows, summary))
    write_record(output / "vision.json", thread_count, rows, summary)
    return 0
