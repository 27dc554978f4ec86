"""Image files of others: every bit depth keeps its range, and what is no image is refused by name."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from muonssm.lab.vision import image_files
from muonssm.lab.vision.image_files import DamagedImageError, find_class, read_image
from muonssm.lab.vision.images import ImageConfig, load_images

from . import pictures

RAMP = np.arange(0, 65536, dtype=np.uint16).reshape(256, 256)


def pgm(path, values):
    """Write a gray image of 16 bits that PIL opens in mode I."""
    height, width = values.shape
    path.write_bytes(f"P5 {width} {height} 65535\n".encode() + values.astype(">u2").tobytes())
    return path


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm.ppm"])
@pytest.mark.parametrize("channels", [1, 3])
def test_gray_of_16_bits_keeps_its_range(tmp_path, suffix, channels):
    path = tmp_path / f"a.{suffix}"
    pgm(path, RAMP) if "ppm" in suffix else Image.fromarray(RAMP).save(path)
    with Image.open(path) as opened:
        assert opened.mode == ("I" if "ppm" in suffix else "I;16")
    image = read_image(path, channels)
    assert image.shape == (channels, 256, 256)
    assert image.dtype == torch.uint8
    expected = np.round(RAMP / 257).astype(np.uint8)
    assert np.array_equal(image[0].numpy(), expected)
    assert image.float().mean() == pytest.approx(127.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([[-1, 5]], np.int32), r"0 to 65535 \(mode I\), got -1 to 5"),
        (np.array([[0, 65536]], np.int32), r"0 to 65535 \(mode I\), got 0 to 65536"),
        (np.array([[0, 255]], np.int32), "8 or 16 bits per pixel, got 32 bits and values up to 255"),
        (np.array([[0, 255]], np.float32), r"in \[0, 1\] \(mode F\), got 0 to 255"),
        (np.array([[-0.5, 1]], np.float32), r"in \[0, 1\] \(mode F\), got -0.5 to 1"),
        (np.array([[0, np.nan]], np.float32), r"in \[0, 1\] \(mode F\), got nan to nan"),
    ],
)
def test_numbers_of_an_unknown_range_are_refused(tmp_path, values, message):
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(DamagedImageError, match=rf"a\.tif must have .*{message}"):
        read_image(tmp_path / "a.tif")


def test_floats_from_0_to_1_and_wide_integers(tmp_path):
    Image.fromarray(np.array([[0, 0.5, 1]], np.float32)).save(tmp_path / "a.tif")
    assert read_image(tmp_path / "a.tif", 1).tolist() == [[[0, 128, 255]]]
    Image.fromarray(np.array([[0, 257, 65535]], np.int32)).save(tmp_path / "b.tif")
    assert read_image(tmp_path / "b.tif", 1).tolist() == [[[0, 1, 255]]]


def tiff(path, data, bits, photometric=1, sample_format=1):
    """Write a gray TIFF of one strip, 16 x 16."""
    tags = {256: 16, 257: 16, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 16, 279: len(data)}
    tags[339] = sample_format
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + directory)
    return path


def test_gray_of_12_bits_keeps_its_range(tmp_path):
    values = np.linspace(0, 4095, 256).astype(int)
    bits = "".join(f"{value:012b}" for value in values)
    path = tiff(tmp_path / "a.tif", int(bits, 2).to_bytes(384, "big"), 12)
    image = read_image(path, 1)
    assert image.flatten().tolist() == np.round(values * 255 / 4095).astype(int).tolist()


@pytest.mark.parametrize(
    ("dtype", "bits", "photometric", "sample_format", "message"),
    [
        ("<u2", 16, 0, 1, "0 as black in gray of 16 bits, got 0 as white"),
        ("<f4", 32, 0, 3, "0 as black in gray of 32 bits, got 0 as white"),
        ("<i2", 16, 1, 2, "unsigned samples, got signed ones of 16 bits"),
        ("i1", 8, 1, 2, "unsigned samples, got signed ones of 8 bits"),
    ],
)
def test_samples_that_pil_reads_incorrectly_are_refused(tmp_path, dtype, bits, photometric, sample_format, message):
    data = np.linspace(0, 1 if bits == 32 else 127, 256).astype(dtype).tobytes()
    path = tiff(tmp_path / "a.tif", data, bits, photometric, sample_format)
    with pytest.raises(DamagedImageError, match=rf"a\.tif must have {message}"):
        read_image(path)
    tiff(path, data[:256], 8, 0)  # PIL inverts 8 bits by itself
    assert read_image(path, 1)[0, 0, 0] == 255 - data[0]


def test_other_formats_are_refused_whatever_their_suffix(tmp_path):
    pictures.picture().save(tmp_path / "a.png", "GIF")
    with pytest.raises(DamagedImageError, match=r"a\.png cannot be read as an image: cannot identify"):
        read_image(tmp_path / "a.png")
    pictures.picture().save(tmp_path / "b.jpg", "PNG")  # ImageNet has one
    assert read_image(tmp_path / "b.jpg").shape == (3, 8, 8)


def test_the_number_of_pixels_is_limited(tmp_path, monkeypatch):
    path = pictures.save(tmp_path / "a.png")
    monkeypatch.setattr(image_files, "MAX_PIXELS", 63)
    with pytest.raises(DamagedImageError, match=r"a\.png must have 1 to 63 pixels \(.*MAX_PIXELS\), got 8 x 8"):
        read_image(path)


def irregular(folder):
    os.mkfifo(folder / "pipe.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "device.png").symlink_to("/dev/zero")
    (folder / "dangling.png").symlink_to(folder / "nowhere.png")
    return {
        "dangling.png": "is missing: a link to nothing",
        "device.png": "must be a regular file, got a device",
        "loop.png": "must be a regular file, got an error: Too many levels of symbolic links",
        "pipe.png": "must be a regular file, got a pipe",
    }


def test_pipes_devices_and_loops_are_listed_and_never_opened(tmp_path):
    good = pictures.save(tmp_path / "good.png")
    reasons = irregular(tmp_path)
    images, skipped = find_class(tmp_path)
    assert images == [good]
    assert {os.path.basename(file): reason for file, reason in skipped} == reasons
    for name in reasons:
        with pytest.raises(DamagedImageError, match=rf"{name} (is missing|must be a regular file)"):
            read_image(tmp_path / name)


def test_one_class_is_refused(tmp_path):
    pictures.classes(tmp_path / "train", names=("cat",))
    with pytest.raises(ValueError, match="training data must have 2 or more classes, got 1: cat"):
        load_images(ImageConfig("folder", tmp_path))
