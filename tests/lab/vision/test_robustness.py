"""mCE worked out by hand, folders with something missing, and logits restricted to 200 classes."""

from __future__ import annotations

import importlib.util
import shutil

import pytest
import torch
from PIL import Image

from muonssm.lab.vision import imagenet
from muonssm.lab.vision.corruptions import CORRUPTIONS, SEVERITIES
from muonssm.lab.vision.imagenet import find_imagenet_c, subset, synsets
from muonssm.lab.vision.robustness import (
    ALEXNET,
    corruption_errors,
    evaluate_imagenet_c,
    evaluate_subset,
    mean_corruption_error,
)

TIMM = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="the lists of classes ship with timm")
CLASSES = ("cat", "dog")


def predict(images):
    """The class is in the brightness: dark is cat, bright is dog."""
    bright = images.mean((1, 2, 3))
    return torch.stack([0.5 - bright, bright - 0.5], dim=1)


def solid(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), (value,) * 3).save(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All corruptions and severities of two cats and two dogs; `predict` takes severity - 1 of the four for another."""
    root = tmp_path_factory.mktemp("imagenet-c")
    for corruption in CORRUPTIONS:
        for severity in SEVERITIES:
            for number in range(4):
                wrong = number < severity - 1
                value = 255 if (number >= 2) != wrong else 0
                solid(root / corruption / str(severity) / CLASSES[number // 2] / f"{number}.png", value)
    return root


@pytest.fixture
def part(whole, tmp_path):
    """A copy to take something from."""
    shutil.copytree(whole, tmp_path / "c", copy_function=shutil.copyfile)
    return tmp_path / "c"


def evaluate(root, **changes):
    return evaluate_imagenet_c(predict, root, **{"classes": CLASSES, "progress": False, "batch_size": 3, **changes})


# mCE


def test_mce_worked_out_by_hand():
    """Errors of 0.2 to 1.0 times AlexNet's are 0.6 of it on average: CE 60. Twice that on one: (14 x 60 + 120) / 15."""
    errors = {c: {s: 0.2 * s * ALEXNET[c] for s in SEVERITIES} for c in CORRUPTIONS}
    assert mean_corruption_error(errors) == pytest.approx(60.0)
    errors["fog"] = {s: 2 * error for s, error in errors["fog"].items()}
    assert mean_corruption_error(errors) == pytest.approx(64.0)
    assert corruption_errors({"fog": errors["fog"]}, ALEXNET) == {"fog": pytest.approx(120.0)}
    half = {c: dict.fromkeys(SEVERITIES, 0.5) for c in CORRUPTIONS}
    assert corruption_errors(half, ALEXNET)["brightness"] == pytest.approx(50 / 0.564592)
    assert mean_corruption_error(half) == pytest.approx(64.6726, abs=1e-3)


def test_alexnet_is_that_of_the_authors():
    assert tuple(ALEXNET) == CORRUPTIONS
    assert sum(ALEXNET.values()) / 15 == pytest.approx(0.788993, abs=1e-6)


def test_mce_of_less_than_all_is_refused():
    errors = {c: dict.fromkeys(SEVERITIES, 0.5) for c in CORRUPTIONS}
    del errors["snow"], errors["fog"]
    with pytest.raises(ValueError, match="errors has no snow, fog; it may have all of"):
        mean_corruption_error(errors)
    with pytest.raises(ValueError, match="errors has no severity 4 of 'frost'"):
        corruption_errors({"frost": {1: 0.1, 2: 0.1, 3: 0.1, 5: 0.1}}, ALEXNET)
    with pytest.raises(ValueError, match="reference has no error > 0 for 'frost'"):
        corruption_errors({"frost": dict.fromkeys(SEVERITIES, 0.1)}, {"frost": 0.0})


def test_a_whole_folder_has_an_mce(whole):
    scores = evaluate(whole)
    assert scores.missing == ()
    assert scores.errors["fog"] == {1: 0.0, 2: 25.0, 3: 50.0, 4: 75.0, 5: 100.0}
    assert scores.ce["fog"] == pytest.approx(50 / 0.819324)
    assert scores.mce == pytest.approx(64.6726, abs=1e-3)
    assert evaluate(whole, reference=dict.fromkeys(CORRUPTIONS, 0.25)).mce == pytest.approx(200.0)
    lines = list(scores.lines())
    assert lines[-1] == "mCE 64.67"
    assert len(lines) == 16


def test_what_is_missing_is_named_and_there_is_no_mce(part):
    shutil.rmtree(part / "snow")
    shutil.rmtree(part / "frost" / "3")
    shutil.rmtree(part / "fog" / "2" / "dog")
    (part / "contrast" / "5" / "cat" / "1.png").unlink()
    for path in (part / "pixelate" / "1" / "cat").iterdir():
        path.rename(path.with_suffix(".txt"))
    scores = evaluate(part)
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
    assert "mCE: none, as 5 parts of the data are missing" in text
    assert "  frost/3 is missing" in text
    assert "fog  " not in text


def test_a_class_that_is_nowhere_is_missing_everywhere(whole):
    found = find_imagenet_c(whole, ("cat", "bird", "dog"))
    assert found.complete == ()
    assert len(found.missing) == 75
    assert found.missing[0] == "gaussian_noise/1/bird is missing or empty"
    with pytest.raises(ValueError, match="gaussian_noise/1/dog is no class of this model; it may be one of its 1"):
        find_imagenet_c(whole, ("cat",))


def test_folders_and_predictions_that_do_not_fit(whole, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"predict gave \(3, 5\); it may give \(3, 2\)"):
        evaluate_imagenet_c(lambda x: torch.zeros(len(x), 5), whole, classes=CLASSES, batch_size=3, progress=False)
    with pytest.raises(ValueError, match="predict gave logits that are not a number"):
        evaluate_imagenet_c(lambda x: torch.full((len(x), 2), float("nan")), whole, classes=CLASSES, progress=False)
    solid(tmp_path / "c" / "fog" / "1" / "cat" / "a.png", 0)
    Image.new("RGB", (5, 4)).save(tmp_path / "c" / "fog" / "1" / "cat" / "b.png")
    with pytest.raises(ValueError, match=r"cat/b.png is \(3, 4, 5\), and a.png is \(3, 4, 4\); transform may bring"):
        evaluate(tmp_path / "c")
    assert evaluate(tmp_path / "c", transform=lambda image: image[:, :4, :4].float()).mce is None


# ImageNet-R and -A


@pytest.fixture
def lists(monkeypatch):
    """ImageNet of four classes, of which the subset has the last and the second."""
    content = {"imagenet_synsets.txt": ["n1", "n2", "n3", "n4"], "imagenet_r_indices.txt": ["1", "3"]}
    monkeypatch.setattr(imagenet, "_timm_list", content.__getitem__)


def test_logits_are_restricted_to_the_classes_of_the_set(lists, tmp_path):
    solid(tmp_path / "n2" / "a.png", 0)
    solid(tmp_path / "n4" / "a.png", 255)
    solid(tmp_path / "n4" / "b.png", 0)

    def model(images):
        """Says n1 first of all, which the set does not have; then n2 of dark and n4 of bright images."""
        dark, bright = (torch.relu(side * (images.mean((1, 2, 3)) - 0.5)) for side in (-1, 1))
        return torch.stack([torch.full_like(dark, 9.0), dark, torch.full_like(dark, 8.0), bright], dim=1)

    scores = evaluate_subset(model, tmp_path, "imagenet-r", progress=False)
    assert scores.accuracy == pytest.approx(200 / 3)
    assert (scores.images, scores.missing) == (3, ())
    assert evaluate_subset(model, tmp_path, "imagenet-r", batch_size=2, workers=1, progress=False) == scores
    shutil.rmtree(tmp_path / "n2")
    scores = evaluate_subset(model, tmp_path, "imagenet-r", progress=False)
    assert (scores.accuracy, scores.of_present) == (None, 50.0)
    assert scores.missing == ("n2 is missing or empty",)
    assert next(scores.lines()) == "accuracy: none, as 1 classes are missing"
    with pytest.raises(ValueError, match=r"predict gave \(2, 2\); it may give \(2, 4\)"):
        evaluate_subset(predict, tmp_path, "imagenet-r", progress=False)
    solid(tmp_path / "n3" / "a.png", 0)
    with pytest.raises(ValueError, match="n3 is no class of this model"):
        evaluate_subset(model, tmp_path, "imagenet-r", progress=False)


def test_a_folder_without_any_of_the_classes(lists, tmp_path):
    with pytest.raises(
        ValueError, match="has none of the classes of imagenet-r; it may have a folder for each, such as n2/"
    ):
        evaluate_subset(predict, tmp_path, "imagenet-r")
    with pytest.raises(ValueError, match=r"name is 'imagenet-v2'; it may be one of \('imagenet-r', 'imagenet-a'\)"):
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


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"the list of ImageNet's classes needs timm: pip install 'muonssm\[vision\]'"
    ):
        synsets()
