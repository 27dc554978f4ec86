"""Digits on canvases: exact boxes and masks, disjoint splits, atomic folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from muonssm.lab.vision import canvases as composing
from muonssm.lab.vision.ade20k import Ade20k
from muonssm.lab.vision.canvases import (
    Canvas,
    CanvasConfig,
    canvas_config,
    canvases,
    check_canvases,
    compose,
    pixel_labels,
)
from muonssm.lab.vision.coco import CocoImages

SMALL = CanvasConfig(size=64, min_height=14, max_height=28, training=6, validation=2, test=3)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUONSSM_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def folder(cache):
    return canvases(SMALL, progress=False)


def squares(count=4):
    """Filled squares with a margin as digits: all their ink is known."""
    images = np.zeros((count, 28, 28), dtype=np.uint8)
    images[:, 4:24, 4:24] = 255
    return images, np.arange(count)


def test_masks_are_where_the_ink_is():
    config = CanvasConfig(size=64, max_digits=1, min_height=20, max_height=20, noise=0)
    canvas = compose(np.random.default_rng(0), *squares(), config)
    assert canvas.masks.shape == (1, 64, 64)
    assert canvas.masks.sum() == 400
    rows, columns = np.nonzero(canvas.masks[0])
    assert (rows.max() - rows.min(), columns.max() - columns.min()) == (19, 19)
    inside, outside = canvas.image[canvas.masks[0]].astype(float), canvas.image[~canvas.masks[0]]
    assert (inside == inside[0]).all()  # one color
    assert abs(inside.mean() - outside.mean()) > 30


def test_digits_overlap_little_and_the_later_is_on_top():
    config = CanvasConfig(size=64, max_digits=5, min_height=16, max_height=30, max_overlap=0.2, noise=0)
    random, counts, touching = np.random.default_rng(1), [], 0
    for _ in range(60):
        canvas = compose(random, *squares(), config)
        counts.append(len(canvas.digits))
        assert canvas.masks.sum(axis=0).max() == 1
        for mask in canvas.masks:
            rows, columns = np.nonzero(mask)
            area = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
            assert mask.sum() >= 0.5 * area
            touching += mask.sum() < area
        colors = [np.unique(canvas.image[mask], axis=0) for mask in canvas.masks]
        assert all(len(color) == 1 for color in colors)  # no pixel of another digit in a mask
    assert set(counts) >= {1, 2, 3}
    assert touching > 5


def test_pixel_labels():
    masks = np.zeros((2, 3, 3), dtype=bool)
    masks[0, 0, 0] = masks[1, 2, 1] = True
    canvas = Canvas(np.zeros((3, 3, 3), np.uint8), masks, np.array([0, 9]))
    assert pixel_labels(canvas).tolist() == [[1, 0, 0], [0, 0, 0], [0, 10, 0]]
    assert pixel_labels(canvas, background=True).tolist() == [[1, 11, 11], [11, 11, 11], [11, 10, 11]]


def test_both_layouts_agree(folder):
    for split, count in (("training", 6), ("validation", 2), ("test", 3)):
        objects = CocoImages(folder / f"instances_{split}.json", folder / "images" / split)
        scenes = Ade20k(folder, split, classes=10)
        assert len(objects) == len(scenes) == count
        assert objects.classes == tuple("0123456789")
        for number in range(count):
            image, target = objects[number]
            seen, labels = scenes[number]
            assert image.equal(seen)
            assert image.shape == (3, 64, 64)
            for mask, label, box in zip(target["masks"], target["labels"], target["boxes"], strict=True):
                assert (labels[mask.bool()] == label - 1).all()
                rows, columns = mask.nonzero().unbind(1)
                assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert target["area"].tolist() == target["masks"].sum((1, 2)).tolist()
            assert ((labels != 255) == target["masks"].sum(0).bool()).all()


def test_splits_have_different_digits(folder):
    manifest = check_canvases(folder)
    splits = [set(manifest["mnist"][split]) for split in composing.SPLITS]
    assert [len(split) for split in splits] == [3500, 500, 1000]
    assert len(set.union(*splits)) == 5000


def test_the_same_settings_give_the_same_files(folder, tmp_path):
    composing.make_canvases(SMALL, tmp_path / "again", progress=False)
    assert check_canvases(tmp_path / "again") == check_canvases(folder)


def test_a_folder_is_made_once(folder, monkeypatch):
    monkeypatch.setattr(composing, "make_canvases", None)
    assert canvases(SMALL) == folder


def test_an_interruption_leaves_no_folder(cache, monkeypatch):
    config = CanvasConfig(size=64, max_height=28, training=3, validation=1, test=1, seed=5)
    before = set(cache.iterdir())

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(composing, "pixel_labels", stop)
        with pytest.raises(KeyboardInterrupt):
            canvases(config, progress=False)
    assert set(cache.iterdir()) == before
    assert (canvases(config, progress=False) / "canvases.json").is_file()


def test_damaged_files_are_found(tmp_path):
    folder = tmp_path / "canvases"
    composing.make_canvases(SMALL, folder, progress=False)
    image = folder / "images" / "test" / "000001.png"
    content = image.read_bytes()
    image.write_bytes(content[:-1] + b"?")
    check_canvases(folder, checksums=False)
    with pytest.raises(ValueError, match=r"test/000001.png is damaged; remove the folder"):
        check_canvases(folder)
    image.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"000001.png is damaged"):
        check_canvases(folder, checksums=False)
    image.unlink()
    with pytest.raises(ValueError, match=r"000001.png is missing"):
        check_canvases(folder, checksums=False)
    for content in ("{}", "[]", '{"files": []}', '{"files": {"a": 3}}', "[" * 100_000):
        (folder / "canvases.json").write_text(content)
        with pytest.raises(ValueError, match=r"canvases.json is missing or damaged"):
            check_canvases(folder)


def test_the_background_can_be_a_class(cache):
    config = CanvasConfig(size=64, max_height=28, training=1, validation=1, test=1, background=True)
    folder = canvases(config, progress=False)
    labels = Ade20k(folder, "test", classes=len(config.classes)).labels(0)
    assert (labels == 10).any()
    assert not (labels == 255).any()
    assert config.classes[10] == "background"


def test_the_annotations_say_that_they_are_not_photographs(folder):
    info = json.loads((folder / "instances_test.json").read_text())["info"]
    assert info["description"] == "MNIST digits composed on canvases; not photographs"
    assert Image.open(folder / "annotations" / "test" / "000000.png").mode == "L"


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("size", 16, ValueError),
        ("max_digits", 0, ValueError),
        ("max_height", 65, ValueError),
        ("max_height", 10, ValueError),
        ("max_height", 30.5, TypeError),
        ("max_overlap", 0.9, ValueError),
        ("noise", -1, ValueError),
        ("background", 1, TypeError),
        ("test", 0, ValueError),
    ],
)
def test_invalid_settings_raise(name, value, error):
    with pytest.raises(error, match=rf"^{name} must be"):
        CanvasConfig(**{name: value})


def test_invalid_settings_of_a_recipe_are_named():
    assert canvas_config({"size": 64, "max_height": 28}) == CanvasConfig(size=64, max_height=28)
    with pytest.raises(ValueError, match=r"^canvases must have settings of CanvasConfig, got 'sides'"):
        canvas_config({"sides": 3})
    with pytest.raises(TypeError, match=r"^canvases.size must be an integer"):
        canvas_config({"size": "x"})
