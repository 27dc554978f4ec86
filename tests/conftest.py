"""A small folder of recordings that models can learn from, for tests of training and what comes after it."""

from __future__ import annotations

import csv
import os

import numpy as np
import pytest

from muonssm.lab.core.openmp import let_waiting_threads_sleep

let_waiting_threads_sleep()  # before torch is imported: tests share their cores with what else runs

import torch  # noqa: E402

from muonssm.lab.core.amx import disable_broken_amx  # noqa: E402
from muonssm.lab.core.torchvision_cpu import prepare_torchvision  # noqa: E402

prepare_torchvision()  # before a test imports transformers, which imports torchvision if that is installed
disable_broken_amx()  # before a test runs a bfloat16 matmul

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if workers > 1:  # processes of pytest-xdist share the cores, and so do the commands that their tests start
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)

CHANNELS = ("acc_x", "acc_y", "acc_z")
CLASSES = ("slow", "fast", "still")


def write_recordings(root, subjects=5, length=150):
    """`subjects` people who do each of three things twice; 50 Hz, three channels, noise of their own."""
    root.mkdir()
    random = np.random.default_rng(0)
    with open(root / "index.csv", "w", newline="") as file:
        index = csv.writer(file)
        index.writerow(["path", "label", "subject"])
        for subject in range(subjects):
            for label, rate in zip(CLASSES, (0.05, 0.2, 0.0), strict=True):
                for take in range(2):
                    name = f"{subject}-{label}-{take}.csv"
                    phase = random.uniform(0, 6) + rate * np.arange(length)[:, None] + np.arange(3)
                    samples = np.sin(phase) * (rate > 0) + 0.3 * random.standard_normal((length, 3))
                    np.savetxt(root / name, samples, delimiter=",", header=",".join(CHANNELS), comments="", fmt="%.5f")
                    index.writerow([name, label, subject])
    return root


@pytest.fixture(scope="session")
def recordings(tmp_path_factory):
    """The folder, written once."""
    return write_recordings(tmp_path_factory.mktemp("data") / "recordings")


@pytest.fixture(scope="session")
def changes(recordings):
    """What makes the recipe `folder` small enough for a test."""
    return [
        f"data.root={recordings}", "data.split=subject", "data.length=48", "model.d_model=16", "model.d_state=8",
        "training.epochs=4", "training.batch_size=8", "training.learning_rate=0.01",
    ]  # fmt: skip
