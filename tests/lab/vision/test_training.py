"""Vision runs: classification, detection and segmentation learn, resume, are scored again, and draw pictures."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from muonssm.cli import main
from muonssm.lab.core.evaluate import evaluate
from muonssm.lab.core.optimizer import _rate
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.trainer import train
from muonssm.lab.vision.explain import explain

COLORS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 60, 230)}
SMALL = ["training.epochs=2", "training.batch_size=8"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Three classes of colored noise, 40 x 40."""
    root, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 6), ("test", 6)):
        for name, color in COLORS.items():
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                noise = random.normal(0, 25, (40, 40, 3))
                Image.fromarray((np.array(color) + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def changes(pictures):
    """Changes that make `vision-demo` a small job on these images."""
    return [f"data.root={pictures}", "data.source=folder", "data.channels=3", "training.learning_rate=1e-3", *SMALL]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, changes):
    output = tmp_path_factory.mktemp("runs") / "run"
    return output, train(Recipe.load("vision-demo", changes), output)


def same(one, other):
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_a_classifier_learns_and_is_scored_again(finished):
    output, metrics = finished
    assert metrics["test"]["accuracy"] > 60  # of three classes
    assert np.array(metrics["test"]["confusion"]).sum() == 18
    assert evaluate(output)["test"]["confusion"] == metrics["test"]["confusion"]


@pytest.mark.slow
def test_a_stopped_run_resumes_bit_by_bit(finished, changes, tmp_path):
    """With averaged weights, recomputed statistics, LAMB, cooldown, mixup and timm's pipeline."""
    settings = [
        *changes, "training.ema=0.9", "training.optimizer=lamb", "training.cooldown=0.25", "augment.mixup=0.5",
        "augment.smoothing=0.1", "augment.size=32", "augment.flip=0.5", "augment.rotation=0", "augment.shift=0",
        "augment.zoom=0", "augment.randaugment=rand-m5-mstd0.5-inc1", "augment.erasing=0.2", "training.keep=last",
        "training.statistics=30",
    ]  # fmt: skip
    recipe = Recipe.load("vision-demo", settings)
    whole = train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    for name in ("metrics.json", "model.safetensors", "history.json"):
        (tmp_path / "half" / name).unlink()
    last = max((tmp_path / "half" / "checkpoints").iterdir(), key=lambda path: int(path.name.rpartition("-")[2]))
    shutil.rmtree(last)
    assert train(recipe, tmp_path / "half", resume=True) == whole
    assert same(tmp_path / "whole", tmp_path / "half")
    assert not same(tmp_path / "whole", finished[0])


def test_the_learning_rate_warms_up_decays_and_cools_down():
    rates = [_rate(10, 20, 100, 0.1, step) for step in range(101)]
    assert rates[0] == 0
    assert rates[10] == 1
    assert rates[45] == pytest.approx(0.55)
    assert rates[80:] == pytest.approx([0.1] * 21)


@pytest.mark.slow
def test_grad_cam_and_robustness_of_a_run(finished, pictures, tmp_path, capsys):
    output, _ = finished
    image = pictures / "test" / "red" / "0.png"
    (written,) = explain(output, [image], output=tmp_path)
    with Image.open(written) as picture:
        assert picture.width > 2 * 256
    assert len(explain(output, [], count=3)) == 3
    for name in COLORS:  # one image per class: 75 corrupted images of each
        (tmp_path / "own" / name).mkdir(parents=True)
        shutil.copy(pictures / "test" / name / "0.png", tmp_path / "own" / name)
    assert main(["corrupt", str(tmp_path / "own"), str(tmp_path / "c")]) == 0
    assert "225 new images" in capsys.readouterr().out
    assert main(["eval", str(output), "--robustness", "imagenet-c", "--data", str(tmp_path / "c")]) == 0
    assert "mCE " in capsys.readouterr().out
    assert json.loads((output / "imagenet-c.json").read_text())["mce"] > 0
    other, scores = tmp_path / "other", json.loads((output / "imagenet-c.json").read_text())
    other.mkdir()
    half = {corruption: dict.fromkeys(by, 50.0) for corruption, by in scores["errors"].items()}
    (other / "imagenet-c.json").write_text(json.dumps({**scores, "errors": half}))
    command = ["eval", str(output), "--robustness", "imagenet-c", "--data", str(tmp_path / "c")]
    assert main([*command, "--reference", str(other)]) == 0
    assert f"CE is relative to the errors of {other}" in capsys.readouterr().out
    errors = [sum(by.values()) / 5 for by in scores["errors"].values()]
    assert json.loads((output / "imagenet-c.json").read_text())["mce"] == pytest.approx(2 * sum(errors) / 15)
    shutil.rmtree(tmp_path / "c" / "fog")
    assert main(["eval", str(output), "--robustness", "imagenet-c", "--data", str(tmp_path / "c")]) == 0
    text = capsys.readouterr().out
    assert "no mCE" in text
    assert "fog is missing" in text
    assert main(["eval", str(output), "--robustness", "imagenet-r", "--data", str(tmp_path / "c")]) == 2
    assert "RUN must be a run on ImageNet-1k" in capsys.readouterr().err
    assert main(["eval", str(output), "--robustness", "imagenet-a"]) == 2
    assert "--data must be the folder of imagenet-a" in capsys.readouterr().err


CANVASES = "data.canvases={size = 64, min_height = 12, max_height = 24, training = 16, validation = 4, test = 4%s}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "score"),
    [
        ("detection-demo", [CANVASES % "", "data.short=[64]", "data.longest=64", "heads.proposals=50"], "box_ap50"),
        ("segmentation-demo", [CANVASES % ", background = true", "data.size=64", "decoder.hidden=16"], "miou"),
    ],
)
def test_detection_and_segmentation_run_and_draw_pictures(name, more, score, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MUONSSM_CACHE", str(tmp_path / "cache"))
    recipe = Recipe.load(name, [*SMALL, *more])
    metrics = train(recipe, tmp_path / "run")
    assert 0 <= metrics["test"][score] <= 100
    history = json.loads((tmp_path / "run" / "history.json").read_text())
    assert history[-1]["loss"] < history[0]["loss"]
    assert evaluate(tmp_path / "run")["test"][score] == pytest.approx(metrics["test"][score])
    written = explain(tmp_path / "run", [], count=2)
    assert len(written) == 2
    with Image.open(written[0]) as picture:
        assert picture.width > 3 * 256  # image, truth, run
    changed = [f"--set={change}" for change in (*SMALL, *more)]
    assert main(["compare", name, *changed, "--output", str(tmp_path / "both")]) == 0
    assert "muon minus plain" in capsys.readouterr().out
    assert (tmp_path / "both" / "report.html").is_file()
    assert len(explain(tmp_path / "both", [], count=1)) == 1
