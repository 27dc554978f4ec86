"""Digits on canvases: exact boxes and masks, disjoint parts, a folder that is whole or not there."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from muonssm.lab.vision import canvases as composing
from muonssm.lab.vision.ade20k import Ade20k
from muonssm.lab.vision.canvases import Canvas, CanvasConfig, canvases, check_canvases, compose, pixel_labels
from muonssm.lab.vision.coco import CocoImages

SMALL = CanvasConfig(size=64, smallest=14, largest=28, training=6, validation=2, test=3)


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
    """Digits of which all ink is known: full squares with a margin."""
    images = np.zeros((count, 28, 28), dtype=np.uint8)
    images[:, 4:24, 4:24] = 255
    return images, np.arange(count)


def test_masks_are_where_the_ink_is():
    config = CanvasConfig(size=64, most=1, smallest=20, largest=20, noise=0)
    canvas = compose(np.random.default_rng(0), *squares(), config)
    assert canvas.masks.shape == (1, 64, 64)
    assert canvas.masks.sum() == 400
    rows, columns = np.nonzero(canvas.masks[0])
    assert (rows.max() - rows.min(), columns.max() - columns.min()) == (19, 19)
    inside, outside = canvas.image[canvas.masks[0]].astype(float), canvas.image[~canvas.masks[0]]
    assert (inside == inside[0]).all()  # one colour
    assert abs(inside.mean() - outside.mean()) > 30


def test_digits_overlap_little_and_the_later_is_on_top():
    config = CanvasConfig(size=64, most=5, smallest=16, largest=30, overlap=0.2, noise=0)
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
        colours = [np.unique(canvas.image[mask], axis=0) for mask in canvas.masks]
        assert all(len(colour) == 1 for colour in colours)  # no pixel of another digit in a mask
    assert set(counts) >= {1, 2, 3}
    assert touching > 5


def test_pixel_labels():
    masks = np.zeros((2, 3, 3), dtype=bool)
    masks[0, 0, 0] = masks[1, 2, 1] = True
    canvas = Canvas(np.zeros((3, 3, 3), np.uint8), masks, np.array([0, 9]))
    assert pixel_labels(canvas).tolist() == [[1, 0, 0], [0, 0, 0], [0, 10, 0]]
    assert pixel_labels(canvas, background=True).tolist() == [[1, 11, 11], [11, 11, 11], [11, 10, 11]]


def test_both_layouts_say_the_same(folder):
    for part, count in (("training", 6), ("validation", 2), ("test", 3)):
        found = CocoImages(folder / f"instances_{part}.json", folder / "images" / part)
        scenes = Ade20k(folder, part, classes=10)
        assert len(found) == len(scenes) == count
        assert found.classes == tuple("0123456789")
        for number in range(count):
            image, target = found[number]
            seen, labels = scenes[number]
            assert image.equal(seen)
            assert image.shape == (3, 64, 64)
            for mask, label, box in zip(target["masks"], target["labels"], target["boxes"], strict=True):
                assert (labels[mask.bool()] == label - 1).all()
                rows, columns = mask.nonzero().unbind(1)
                assert box.tolist() == [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert target["area"].tolist() == target["masks"].sum((1, 2)).tolist()
            assert ((labels != 255) == target["masks"].sum(0).bool()).all()


def test_parts_have_digits_of_their_own(folder):
    manifest = check_canvases(folder)
    parts = [set(manifest["mnist"][part]) for part in composing.PARTS]
    assert [len(part) for part in parts] == [3500, 500, 1000]
    assert len(set.union(*parts)) == 5000


def test_the_same_settings_give_the_same_files(folder, tmp_path):
    composing.make_canvases(SMALL, tmp_path / "again", progress=False)
    assert check_canvases(tmp_path / "again") == check_canvases(folder)


def test_a_folder_is_made_once(folder, monkeypatch):
    monkeypatch.setattr(composing, "make_canvases", None)
    assert canvases(SMALL) == folder


def test_what_does_not_finish_leaves_nothing(cache, monkeypatch):
    config = CanvasConfig(size=64, largest=28, training=3, validation=1, test=1, seed=5)
    before = set(cache.iterdir())

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(composing, "pixel_labels", stop)
        with pytest.raises(KeyboardInterrupt):
            canvases(config, progress=False)
    assert set(cache.iterdir()) == before
    assert (canvases(config, progress=False) / "canvases.json").is_file()


def test_damage_is_noticed(tmp_path):
    folder = tmp_path / "canvases"
    composing.make_canvases(SMALL, folder, progress=False)
    image = folder / "images" / "test" / "000001.png"
    content = image.read_bytes()
    image.write_bytes(content[:-1] + b"?")
    check_canvases(folder, check=False)
    with pytest.raises(ValueError, match=r"test/000001.png is damaged; remove the folder"):
        check_canvases(folder)
    image.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"000001.png is damaged"):
        check_canvases(folder, check=False)
    image.unlink()
    with pytest.raises(ValueError, match=r"000001.png is missing"):
        check_canvases(folder, check=False)
    (folder / "canvases.json").write_text("{}")
    with pytest.raises(ValueError, match=r"canvases.json is missing or damaged"):
        check_canvases(folder)


def test_the_background_can_be_a_class(cache):
    config = CanvasConfig(size=64, largest=28, training=1, validation=1, test=1, background=True)
    folder = canvases(config, progress=False)
    labels = Ade20k(folder, "test", classes=len(config.classes)).labels(0)
    assert (labels == 10).any()
    assert not (labels == 255).any()
    assert config.classes[10] == "background"


def test_it_says_what_it_is(folder):
    info = json.loads((folder / "instances_test.json").read_text())["info"]
    assert info["description"] == "MNIST digits composed on canvases; not photographs"
    assert Image.open(folder / "annotations" / "test" / "000000.png").mode == "L"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 16}, "size is 16; it may be an integer >= 32"),
        ({"most": 0}, "most is 0; it may be an integer >= 1"),
        ({"largest": 65}, "largest is 65 with smallest 20 and size 128; it may be an integer from 20 to 64"),
        ({"largest": 10}, "largest is 10 with smallest 20"),
        ({"overlap": 0.9}, r"overlap is 0.9; it may be in \[0, 0.5\]"),
        ({"noise": -1}, r"noise is -1; it may be in \[0, 128\]"),
        ({"background": 1}, "background is 1; it may be True or False"),
        ({"test": 0}, "test is 0; it may be an integer >= 1"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CanvasConfig(**settings)
