"""mCE computed by hand, incomplete folders, and logits restricted to 200 classes."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import asdict

import pytest
import torch
from PIL import Image

from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.vision import imagenet
from muonssm.lab.vision.corruptions import CORRUPTIONS, SEVERITIES
from muonssm.lab.vision.imagenet import find_imagenet_c, subset, synsets
from muonssm.lab.vision.robustness import (
    ALEXNET,
    corruption_errors,
    evaluate_imagenet_c,
    evaluate_robustness,
    evaluate_subset,
    mean_corruption_error,
    reference_errors,
)

TIMM = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="the lists of classes ship with timm")
CLASSES = ("cat", "dog")


def predict(images):
    """Classify by brightness: dark is cat, bright is dog."""
    bright = images.mean((1, 2, 3))
    return torch.stack([0.5 - bright, bright - 0.5], dim=1)


def solid(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (value,) * 3).save(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All corruptions and severities of two cats and two dogs; `predict` is wrong on severity - 1 of the four."""
    root = tmp_path_factory.mktemp("imagenet-c")
    for corruption in CORRUPTIONS:
        for severity in SEVERITIES:
            for number in range(4):
                wrong = number < severity - 1
                value = 255 if (number >= 2) != wrong else 0
                solid(root / corruption / str(severity) / CLASSES[number // 2] / f"{number}.png", value)
    return root


@pytest.fixture
def copy(whole, tmp_path):
    """A copy to remove files from."""
    shutil.copytree(whole, tmp_path / "c", copy_function=shutil.copyfile)
    return tmp_path / "c"


def evaluate(root, **changes):
    return evaluate_imagenet_c(predict, root, **{"classes": CLASSES, "progress": False, "batch_size": 3, **changes})


# ---- mCE


def test_mce_computed_by_hand():
    """Errors of 0.2 to 1.0 times AlexNet's have a mean of 0.6: CE 60. Twice that on one: (14 x 60 + 120) / 15."""
    errors = {c: {s: 0.2 * s * ALEXNET[c] for s in SEVERITIES} for c in CORRUPTIONS}
    assert mean_corruption_error(errors) == pytest.approx(60.0)
    errors["fog"] = {s: 2 * error for s, error in errors["fog"].items()}
    assert mean_corruption_error(errors) == pytest.approx(64.0)
    assert corruption_errors({"fog": errors["fog"]}, ALEXNET) == {"fog": pytest.approx(120.0)}
    half = {c: dict.fromkeys(SEVERITIES, 0.5) for c in CORRUPTIONS}
    assert corruption_errors(half, ALEXNET)["brightness"] == pytest.approx(50 / 0.564592)
    assert mean_corruption_error(half) == pytest.approx(64.6726, abs=1e-3)


def test_alexnets_errors_are_the_published_ones():
    assert tuple(ALEXNET) == CORRUPTIONS
    assert sum(ALEXNET.values()) / 15 == pytest.approx(0.788993, abs=1e-6)


def test_mce_needs_all_corruptions_and_severities():
    errors = {c: dict.fromkeys(SEVERITIES, 0.5) for c in CORRUPTIONS}
    del errors["snow"], errors["fog"]
    with pytest.raises(ValueError, match="errors must have all fifteen corruptions, got no snow, fog"):
        mean_corruption_error(errors)
    with pytest.raises(ValueError, match=r"errors must have the severities .* of 'frost', got no 4"):
        corruption_errors({"frost": {1: 0.1, 2: 0.1, 3: 0.1, 5: 0.1}}, ALEXNET)
    with pytest.raises(ValueError, match="reference must have an error > 0 for 'frost'"):
        corruption_errors({"frost": dict.fromkeys(SEVERITIES, 0.1)}, {"frost": 0.0})


def test_a_complete_folder_has_an_mce(whole):
    scores = evaluate(whole)
    assert scores.missing == ()
    assert scores.errors["fog"] == {1: 0.0, 2: 25.0, 3: 50.0, 4: 75.0, 5: 100.0}
    assert scores.ce["fog"] == pytest.approx(50 / 0.819324)
    assert scores.mce == pytest.approx(64.6726, abs=1e-3)
    assert evaluate(whole, reference=dict.fromkeys(CORRUPTIONS, 0.25)).mce == pytest.approx(200.0)
    lines = list(scores.lines())
    assert lines[-1] == "mCE 64.67"
    assert lines[-2] == "CE is relative to the errors of AlexNet on ImageNet-C"
    assert len(lines) == 17


def test_an_incomplete_folder_has_no_mce_and_lists_the_gaps(copy):
    shutil.rmtree(copy / "snow")
    shutil.rmtree(copy / "frost" / "3")
    shutil.rmtree(copy / "fog" / "2" / "dog")
    (copy / "contrast" / "5" / "cat" / "1.png").unlink()
    for path in (copy / "pixelate" / "1" / "cat").iterdir():
        path.rename(path.with_suffix(".txt"))
    scores = evaluate(copy)
    assert scores.mce is None
    assert scores.missing == (
        "snow is missing",
        "frost/3 is missing",
        "fog/2/dog is missing or empty",
        "contrast/5/cat has 1 of 2 images",
        "pixelate/1/cat is missing or empty",
    )
    assert set(CORRUPTIONS) - set(scores.ce) == {"snow", "frost", "fog", "contrast", "pixelate"}
    assert scores.ce["brightness"] == pytest.approx(50 / 0.564592)
    assert set(scores.errors["frost"]) == {1, 2, 4, 5}
    text = "\n".join(scores.lines())
    assert "no mCE: 5 folders or images are missing" in text
    assert "  frost/3 is missing" in text
    assert "fog  " not in text


def test_a_class_without_folders_is_missing_in_every_corruption(whole):
    result = find_imagenet_c(whole, ("cat", "bird", "dog"))
    assert result.complete == ()
    assert len(result.missing) == 75
    assert result.missing[0] == "gaussian_noise/1/bird is missing or empty"
    with pytest.raises(ValueError, match="gaussian_noise/1 must have folders of the model's 1 classes only, got 'dog'"):
        find_imagenet_c(whole, ("cat",))


def test_wrong_folders_predictions_and_shapes_raise(whole, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere must be a folder"):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"predict must return logits of shape \(3, 2\), got \(3, 5\)"):
        evaluate_imagenet_c(lambda x: torch.zeros(len(x), 5), whole, classes=CLASSES, batch_size=3, progress=False)
    with pytest.raises(ValueError, match="predict must return numbers, got nan"):
        evaluate_imagenet_c(lambda x: torch.full((len(x), 2), float("nan")), whole, classes=CLASSES, progress=False)
    solid(tmp_path / "c" / "fog" / "1" / "cat" / "a.png", 0)
    Image.new("RGB", (5, 4)).save(tmp_path / "c" / "fog" / "1" / "cat" / "b.png")
    with pytest.raises(ValueError, match=r"transform must give .* \(3, 4, 4\) for .*a.png and \(3, 4, 5\) for"):
        evaluate(tmp_path / "c")
    assert evaluate(tmp_path / "c", transform=lambda image: image[:, :4, :4].float()).mce is None


def test_another_run_can_be_the_reference(whole, tmp_path):
    run = RunFolder(tmp_path / "plain")
    run.path.mkdir()
    with pytest.raises(ValueError, match=r"--reference must be a run .* got .*plain' with no imagenet-c.json"):
        reference_errors(run.path)
    scores = evaluate(whole)
    run.write("imagenet-c.json", asdict(scores))
    reference = reference_errors(run.path)
    assert reference == pytest.approx(dict.fromkeys(CORRUPTIONS, 0.5))
    assert evaluate(whole, reference=reference).mce == pytest.approx(100)
    run.write("imagenet-c.json", {**asdict(scores), "mce": None, "missing": ["snow is missing"]})
    with pytest.raises(ValueError, match=r"--reference must be a run .* with 1 gaps"):
        reference_errors(run.path)
    for wrong in ({}, {**asdict(scores), "errors": {"fog": {"1": "x"}}}, {**asdict(scores), "errors": {}}):
        run.write("imagenet-c.json", wrong)
        with pytest.raises(ValueError, match=r"imagenet-c\.json is damaged: (errors|mce).* must be"):
            reference_errors(run.path)
    with pytest.raises(ValueError, match="--reference must be left out for imagenet-r"):
        evaluate_robustness("run", "imagenet-r", whole, reference=run.path)


# ---- ImageNet-R and ImageNet-A


@pytest.fixture
def lists(monkeypatch):
    """An ImageNet of four classes; the subset has the second and the last."""
    content = {"imagenet_synsets.txt": ["n1", "n2", "n3", "n4"], "imagenet_r_indices.txt": ["1", "3"]}
    monkeypatch.setattr(imagenet, "_timm_list", content.__getitem__)


def test_logits_are_restricted_to_the_classes_of_the_set(lists, tmp_path):
    solid(tmp_path / "n2" / "a.png", 0)
    solid(tmp_path / "n4" / "a.png", 255)
    solid(tmp_path / "n4" / "b.png", 0)

    def model(images):
        """Predict n1, which the set does not have; then n2 for dark and n4 for bright images."""
        dark, bright = (torch.relu(side * (images.mean((1, 2, 3)) - 0.5)) for side in (-1, 1))
        return torch.stack([torch.full_like(dark, 9.0), dark, torch.full_like(dark, 8.0), bright], dim=1)

    scores = evaluate_subset(model, tmp_path, "imagenet-r", progress=False)
    assert scores.accuracy == pytest.approx(200 / 3)
    assert (scores.images, scores.missing) == (3, ())
    assert evaluate_subset(model, tmp_path, "imagenet-r", batch_size=2, workers=1, progress=False) == scores
    shutil.rmtree(tmp_path / "n2")
    scores = evaluate_subset(model, tmp_path, "imagenet-r", progress=False)
    assert (scores.accuracy, scores.accuracy_on_present) == (None, 50.0)
    assert scores.missing == ("n2 is missing or empty",)
    assert next(scores.lines()) == "no accuracy: 1 classes are missing"
    with pytest.raises(ValueError, match=r"predict must return logits of shape \(2, 4\), got \(2, 2\)"):
        evaluate_subset(predict, tmp_path, "imagenet-r", progress=False)
    solid(tmp_path / "n3" / "a.png", 0)
    with pytest.raises(ValueError, match="classes only, got 'n3'"):
        evaluate_subset(model, tmp_path, "imagenet-r", progress=False)


def test_a_folder_without_classes_raises(lists, tmp_path):
    with pytest.raises(ValueError, match="must have a folder per class of imagenet-r, such as n2/"):
        evaluate_subset(predict, tmp_path, "imagenet-r")
    with pytest.raises(ValueError, match="name must be one of 'imagenet-r', 'imagenet-a', got 'imagenet-v2'"):
        evaluate_subset(predict, tmp_path, "imagenet-v2")


@TIMM
def test_the_lists_are_timms():
    names = synsets()
    assert len(set(names)) == 1000
    assert (names[0], names[-1]) == ("n01440764", "n15075141")
    for name in ("imagenet-r", "imagenet-a"):
        assert len(set(subset(name))) == 200
        assert list(subset(name)) == sorted(subset(name))
    # the first classes of the two sets: a goldfish, and a stingray
    assert [names[subset(name)[0]] for name in ("imagenet-r", "imagenet-a")] == ["n01443537", "n01498041"]


def test_a_missing_timm_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"the list of ImageNet's classes needs timm: pip install 'muonssm\[vision\]'"
    ):
        synsets()
