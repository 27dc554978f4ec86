"""ADE20K's layout: shifted labels, crops, padding, and errors that name the file."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from muonssm.lab.vision.ade20k import Ade20k, CropView, pad, scale, shift_labels
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


def test_unlabeled_pixels_are_ignored_and_other_labels_are_one_less():
    assert shift_labels(torch.tensor([0, 1, 2, 150, 255])).tolist() == [255, 0, 1, 149, 255]


def test_pairs_are_sorted_by_name(root):
    data = Ade20k(root, "training", classes=3)
    assert [path.name for path, _ in data.pairs] == ["a.jpg", "b.jpg"]
    image, labels = data[0]
    assert image.shape == (3, 20, 30)
    assert 0 <= image.min() <= image.max() <= 1
    assert labels.dtype == torch.int64
    assert labels[0, :6].tolist() == [255, 0, 1, 2, 255, 0]


def test_a_crop_transforms_image_and_labels_alike(tmp_path):
    """Labels that are a function of the image still are after scale, crop and flip."""
    values = np.zeros((40, 60), dtype=np.uint8)
    values[:, 30:], values[20:, :30] = 1, 2
    pair(tmp_path, labels=values + 1)
    image = Image.fromarray(np.repeat((values * 100)[..., None], 3, axis=2))
    pictures.save(tmp_path / "images" / "training" / "a.png", image)
    (tmp_path / "images" / "training" / "a.jpg").unlink()
    data = Ade20k(tmp_path, "training", classes=3, view=CropView(32, max_class_share=1.0))
    torch.manual_seed(0)
    for _ in range(20):
        image, labels = data[0]
        assert image.shape == (3, 32, 32)
        assert labels.shape == (32, 32)
        known = labels != 255
        expected = (image[0] * 255 / 100).round().long()
        assert (expected[known] == labels[known]).float().mean() > 0.9  # all but the pixels along edges
        assert (image[:, ~known] == 0).all()


def test_a_view_uses_torchs_generator(root):
    data = Ade20k(root, "training", classes=3, view=CropView(16))
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append([data[0] for _ in range(5)])
    assert all(one[0].equal(other[0]) and one[1].equal(other[1]) for one, other in zip(*draws, strict=True))
    assert len({float(image.sum()) for image, _ in draws[0]}) == 5


def test_crops_of_one_class_are_avoided_if_possible(tmp_path):
    values = np.ones((16, 160), dtype=np.uint8)
    values[:8, 140:] = 2
    pair(tmp_path, height=16, width=160, labels=values)
    torch.manual_seed(0)
    shares = {}
    for share in (0.75, 1.0):
        data = Ade20k(tmp_path, "training", classes=2, view=CropView(16, scales=(1, 1), max_class_share=share))
        shares[share] = np.mean([len(data[0][1].unique()) == 2 for _ in range(40)])
    assert shares[0.75] > 1.5 * shares[1.0]
    data = Ade20k(tmp_path, "training", classes=2, view=CropView(16, scales=(0.1, 0.1), max_class_share=0.01))
    assert data[0][1].shape == (16, 16)  # otherwise the last crop is used


def test_small_images_are_padded():
    image, labels = pad(torch.ones(3, 2, 5), torch.zeros(2, 5, dtype=torch.int64), 4, 4)
    assert image.shape == (3, 4, 5)
    assert labels.tolist() == [[0] * 5] * 2 + [[255] * 5] * 2
    assert image[:, 2:].sum() == 0
    image, labels = scale(torch.ones(3, 2, 5), torch.tensor([[0, 0, 9, 9, 255]] * 2), 2.0)
    assert labels.tolist() == [[0] * 4 + [9] * 4 + [255] * 2] * 4


def test_files_without_a_partner_are_named(root):
    pictures.save(root / "images" / "training" / "c.jpg")
    with pytest.raises(FileNotFoundError, match=r"training/c.jpg must have a partner in .*annotations/training"):
        Ade20k(root, "training")
    (root / "images" / "training" / "c.jpg").rename(root / "annotations" / "training" / "d.png")
    (root / "images" / "training" / ".DS_Store").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"annotations/training/d.png must have a partner in .*images"):
        Ade20k(root, "training")


def test_folders_that_are_empty_or_missing(root):
    with pytest.raises(FileNotFoundError, match="images/validation must be a folder"):
        Ade20k(root, "validation")
    for inside in ("images", "annotations"):
        (root / inside / "validation").mkdir()
    with pytest.raises(ValueError, match="images/validation must have one or more images"):
        Ade20k(root, "validation")
    pictures.save(root / "images" / "training" / "a.png")
    with pytest.raises(ValueError, match=r"one file per name, got a.jpg and a.png"):
        Ade20k(root, "training")


def test_damaged_files_are_named(root):
    annotations = root / "annotations" / "training"
    data = Ade20k(root, "training", classes=2)
    with pytest.raises(DamagedImageError, match=r"a.png must have labels 0 to 2 .* got 3"):
        data[0]
    pictures.save(annotations / "a.png", Image.fromarray(np.ones((20, 31), np.uint8)))
    with pytest.raises(DamagedImageError, match=r"a.png must have the size of .*a.jpg, got \(20, 31\) and \(20, 30\)"):
        data[0]
    pictures.save(annotations / "a.png", pictures.picture(20, 30))
    with pytest.raises(DamagedImageError, match=r"a.png must have one byte per pixel .* got mode 'RGB'"):
        data[0]
    (annotations / "a.png").write_bytes(b"?")
    with pytest.raises(DamagedImageError, match=r"a.png cannot be read as an image"):
        data[0]


def test_labels_that_are_not_stored_as_they_are_are_refused(root):
    """PIL scales gray of 2 and 4 bits and PPM's to 0...255, and JPEG changes them."""
    path = root / "annotations" / "training" / "a.png"
    data = Ade20k(root, "training", classes=150)
    rows = zlib.compress(b"".join(b"\0" + b"\x12" * 15 for _ in range(20)))  # labels 1 and 2 in 4 bits
    header = struct.pack(">IIBBBBB", 30, 20, 4, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(struct.pack(">I", len(x)) + name + x + struct.pack(">I", zlib.crc32(name + x)) for name, x in chunks)
    )
    with pytest.raises(DamagedImageError, match=r"a\.png must be a PNG.* got PNG with samples 'L;4'"):
        data[0]
    labels = Image.fromarray(np.ones((20, 30), np.uint8))
    for file_format in ("JPEG", "PPM"):
        labels.save(path, file_format)
        with pytest.raises(DamagedImageError, match=rf"a\.png must be a PNG.* got {file_format}"):
            data[0]
    labels.putpalette([0, 0, 0, 255, 0, 0])
    for file_format in ("PNG", "BMP", "TIFF"):
        labels.save(path, file_format)
        assert (data.labels(0) == 0).all()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("size", 0, ValueError),
        ("size", 1.5, TypeError),
        ("scales", (2, 1), ValueError),
        ("scales", 2, TypeError),
        ("flip", -1, ValueError),
        ("max_class_share", 0, ValueError),
    ],
)
def test_invalid_views_raise(name, value, error):
    with pytest.raises(error, match=rf"^{name} must be"):
        CropView(**{name: value})


@pytest.mark.parametrize("classes", [0, 255])
def test_an_invalid_number_of_classes_raises(root, classes):
    with pytest.raises(ValueError, match=rf"^classes must be .* got {classes}"):
        Ade20k(root, "training", classes=classes)


def test_class_shares_count_labeled_pixels_only(tmp_path):
    labels = np.zeros((10, 10), dtype=np.uint8)  # 0 is unlabeled: not counted
    labels[:5] = 1
    labels[5, :10] = 3
    pair(tmp_path, "a", 10, 10, labels)
    assert Ade20k(tmp_path, "training", 4).class_shares(5) == pytest.approx([50 / 60, 0, 10 / 60, 0])
