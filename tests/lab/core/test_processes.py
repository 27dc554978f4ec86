"""Every task on several processes: batches and batch norms are shared, DDP and FSDP2 give the run of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from muonssm.lab.core import matmul
from muonssm.lab.core.context import ContextShare
from muonssm.lab.core.processes import Processes
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train
from tests.lab.several import ENVIRONMENT, curve, torchrun, train_command

# Without dropout and augmentation, whose random numbers each process draws for its own items.
STEPS = ["training.steps=4", "training.evaluate_every=2", "training.batch_size=8", "training.patience=0"]
SETTINGS = {
    "folder": ["data.split=subject", "data.length=48", "model.d_model=16", "model.d_state=8", "model.dropout=0"],
    "vision-demo": [
        "data.source=folder", "data.channels=3", "model.drop_path=0", "augment.rotation=0", "augment.shift=0",
        "augment.zoom=0", "training.warmup=0",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two classes of noise of different brightness, 32 x 32."""
    root, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 4), ("test", 4)):
        for name, level in (("dark", 60), ("bright", 190)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = random.normal(level, 25, (32, 32, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(noise).save(folder / f"{i}.png")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SETTINGS)
def test_two_processes_equal_one(recipe, recordings, pictures, tmp_path, monkeypatch):
    """With DDP and with FSDP2: losses, scores, weights and batch norm statistics.

    With torch's own matmuls: the rounding of oneDNN's depends on the size of the batch (1.1e-4 after three steps).
    """
    monkeypatch.setenv(matmul.SETTING, "torch")
    monkeypatch.setitem(ENVIRONMENT, matmul.SETTING, "torch")
    root = recordings if recipe == "folder" else pictures
    changes = [*SETTINGS[recipe], *STEPS, f"data.root={root}"]
    wanted = train(Recipe.load(recipe, changes), tmp_path / "alone")
    weights = load_file(tmp_path / "alone" / "model.safetensors")
    assert any("running_var" in name for name in weights)
    for distributed in ("ddp", "fsdp2"):
        run = tmp_path / distributed
        torchrun(train_command(recipe, [*changes, f"training.distributed={distributed}"], run))
        assert curve(run) == pytest.approx(curve(tmp_path / "alone"), abs=1e-4)
        metrics = RunFolder(run).read("metrics.json")
        assert metrics["test"]["confusion"] == wanted["test"]["confusion"]
        found = load_file(run / "model.safetensors")
        assert found.keys() == weights.keys()
        for name, tensor in found.items():
            if name.endswith(("conv.bias", "conv1.bias", "conv2.bias", "fc2.bias", "running_mean")):
                continue  # a batch norm removes these biases: their gradients are rounding, which Adam magnifies
            torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_shares_cover_every_batch_and_piece():
    shares = [ContextShare.of(Processes(rank, 6), 2) for rank in range(6)]
    assert [(share.batch, share.piece) for share in shares] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {share.batches for share in shares} == {3}


def test_a_task_without_pieces_refuses_context(changes, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    from muonssm.lab.core import engine

    monkeypatch.setattr(engine, "share_batch_norms", lambda model: None)
    recipe = Recipe.load("folder", [*changes, "training.context=2"])
    data = recipe.task.load_data()
    with pytest.raises(ValueError, match="context must be 1 for this task"):
        engine.TaskTrainer(recipe, recipe.task.build_model(data.metadata), None, data)
