"""ADE20K's layout: labels one less and 0 ignored, crops, and files without a partner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from muonssm.lab.vision.ade20k import Ade20k, CropView, fill, scale, shift_labels
from muonssm.lab.vision.image_files import DamagedImageError

from . import pictures


def pair(root, name="a", height=20, width=30, labels=None):
    pictures.save(root / "images" / "training" / f"{name}.jpg", pictures.picture(height, width))
    values = np.arange(height * width).reshape(height, width) % 4 if labels is None else labels
    pictures.save(root / "annotations" / "training" / f"{name}.png", Image.fromarray(values.astype(np.uint8)))


@pytest.fixture
def root(tmp_path):
    for name in ("b", "a"):
        pair(tmp_path, name)
    return tmp_path


def test_nothing_is_ignored_and_the_rest_is_one_less():
    assert shift_labels(torch.tensor([0, 1, 2, 150, 255])).tolist() == [255, 0, 1, 149, 255]


def test_pairs_are_read_in_order(root):
    data = Ade20k(root, "training", classes=3)
    assert [path.name for path, _ in data.pairs] == ["a.jpg", "b.jpg"]
    image, labels = data[0]
    assert image.shape == (3, 20, 30)
    assert 0 <= image.min() <= image.max() <= 1
    assert labels.dtype == torch.int64
    assert labels[0, :6].tolist() == [255, 0, 1, 2, 255, 0]


def test_a_crop_shows_image_and_labels_alike(tmp_path):
    """Labels that follow from the image still do after scale, crop and mirror."""
    values = np.zeros((40, 60), dtype=np.uint8)
    values[:, 30:], values[20:, :30] = 1, 2
    pair(tmp_path, labels=values + 1)
    image = Image.fromarray(np.repeat((values * 100)[..., None], 3, axis=2))
    pictures.save(tmp_path / "images" / "training" / "a.png", image)
    (tmp_path / "images" / "training" / "a.jpg").unlink()
    data = Ade20k(tmp_path, "training", classes=3, view=CropView(32, most=1.0))
    torch.manual_seed(0)
    for _ in range(20):
        image, labels = data[0]
        assert image.shape == (3, 32, 32)
        assert labels.shape == (32, 32)
        known = labels != 255
        expected = (image[0] * 255 / 100).round().long()
        assert (expected[known] == labels[known]).float().mean() > 0.9  # all but the pixels along the edges
        assert (image[:, ~known] == 0).all()


def test_a_view_draws_from_torch(root):
    data = Ade20k(root, "training", classes=3, view=CropView(16))
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append([data[0] for _ in range(5)])
    assert all(one[0].equal(other[0]) and one[1].equal(other[1]) for one, other in zip(*draws, strict=True))
    assert len({float(image.sum()) for image, _ in draws[0]}) == 5


def test_crops_of_one_class_are_avoided_where_that_can_be(tmp_path):
    values = np.ones((16, 160), dtype=np.uint8)
    values[:8, 140:] = 2
    pair(tmp_path, height=16, width=160, labels=values)
    torch.manual_seed(0)
    shares = {}
    for most in (0.75, 1.0):
        data = Ade20k(tmp_path, "training", classes=2, view=CropView(16, scales=(1, 1), most=most))
        shares[most] = np.mean([len(data[0][1].unique()) == 2 for _ in range(40)])
    assert shares[0.75] > 1.5 * shares[1.0]
    data = Ade20k(tmp_path, "training", classes=2, view=CropView(16, scales=(0.1, 0.1), most=0.01))
    assert data[0][1].shape == (16, 16)  # and where it cannot be, there is a crop all the same


def test_small_images_are_filled():
    image, labels = fill(torch.ones(3, 2, 5), torch.zeros(2, 5, dtype=torch.int64), 4)
    assert image.shape == (3, 4, 5)
    assert labels.tolist() == [[0] * 5] * 2 + [[255] * 5] * 2
    assert image[:, 2:].sum() == 0
    image, labels = scale(torch.ones(3, 2, 5), torch.tensor([[0, 0, 9, 9, 255]] * 2), 2.0)
    assert labels.tolist() == [[0] * 4 + [9] * 4 + [255] * 2] * 4


def test_files_without_a_partner_are_named(root):
    pictures.save(root / "images" / "training" / "c.jpg")
    with pytest.raises(FileNotFoundError, match=r"training/c.jpg has no partner of its name in .*annotations/training"):
        Ade20k(root, "training")
    (root / "images" / "training" / "c.jpg").rename(root / "annotations" / "training" / "d.png")
    (root / "images" / "training" / ".DS_Store").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"annotations/training/d.png has no partner of its name in .*images"):
        Ade20k(root, "training")


def test_folders_that_are_empty_or_missing(root):
    with pytest.raises(FileNotFoundError, match="images/validation is no folder"):
        Ade20k(root, "validation")
    for inside in ("images", "annotations"):
        (root / inside / "validation").mkdir()
    with pytest.raises(ValueError, match="images/validation has no images; it may have one or more"):
        Ade20k(root, "validation")
    pictures.save(root / "images" / "training" / "a.png")
    with pytest.raises(ValueError, match=r"a.png and a.jpg have one name"):
        Ade20k(root, "training")


def test_files_that_do_not_fit_are_named(root):
    annotations = root / "annotations" / "training"
    data = Ade20k(root, "training", classes=2)
    with pytest.raises(DamagedImageError, match=r"a.png has label 3; it may be 0 to 2 \(classes\), or 255"):
        data[0]
    pictures.save(annotations / "a.png", Image.fromarray(np.ones((20, 31), np.uint8)))
    with pytest.raises(DamagedImageError, match=r"a.png is \(20, 31\) and .*a.jpg \(20, 30\) \(height, width\)"):
        data[0]
    pictures.save(annotations / "a.png", pictures.picture(20, 30))
    with pytest.raises(DamagedImageError, match=r"a.png is an image of mode 'RGB'; labels may be one byte"):
        data[0]
    (annotations / "a.png").write_bytes(b"?")
    with pytest.raises(DamagedImageError, match=r"a.png cannot be read as an image"):
        data[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size is 0; it may be an integer >= 1"),
        ({"scales": (2, 1)}, r"scales is \(2, 1\); it may be the least and the most factor, > 0"),
        ({"flip": -1}, r"flip is -1; it may be in \[0, 1\]"),
        ({"most": 0}, r"most is 0; it may be in \(0, 1\]"),
    ],
)
def test_what_cannot_be_is_refused(root, settings, message):
    with pytest.raises(ValueError, match=message):
        CropView(**settings)
    with pytest.raises(ValueError, match="classes is 255; it may be an integer from 1 to 254"):
        Ade20k(root, "training", classes=255)


def test_shares_of_classes_count_labelled_pixels_alone(tmp_path):
    labels = np.zeros((10, 10), dtype=np.uint8)  # 0 is nothing: not counted
    labels[:5] = 1
    labels[5, :10] = 3
    pair(tmp_path, "a", 10, 10, labels)
    assert Ade20k(tmp_path, "training", 4).shares(5) == pytest.approx([50 / 60, 0, 10 / 60, 0])
