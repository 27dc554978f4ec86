"""Corruptions of one's own images: all fifteen, the same from the same seed, in a folder that can be taken up."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from muonssm.lab.vision import corruptions
from muonssm.lab.vision.corruptions import CORRUPTIONS, SEVERITIES, corrupt, corrupt_folder, crop_centre
from muonssm.lab.vision.image_files import DamagedImageError, read_image
from muonssm.lab.vision.imagenet import find_imagenet_c

from . import pictures


@pytest.fixture(scope="module")
def image():
    """Smooth, so that every corruption shows: a gradient with a square, 48 x 64."""
    y, x = torch.meshgrid(torch.linspace(0, 200, 48), torch.linspace(0, 200, 64), indexing="ij")
    picture = torch.stack([y, x, (x + y) / 2])
    picture[:, 10:30, 20:40] += 50
    return picture.byte()


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_every_corruption_changes_an_image_the_same_way_again(image, corruption, capsys):
    before = np.random.get_state()[1].tolist()
    for severity in (1, 5):
        changed = corrupt(image, corruption, severity, seed=3)
        assert changed.shape == image.shape
        assert changed.dtype == torch.uint8
        assert not changed.equal(image)
        assert changed.equal(corrupt(image, corruption, severity, seed=3))
    assert np.random.get_state()[1].tolist() == before
    assert capsys.readouterr().out == ""


def test_more_severe_is_further_away(image):
    for corruption in ("gaussian_noise", "shot_noise", "impulse_noise", "brightness", "contrast"):
        away = [float((corrupt(image, corruption, s).float() - image).abs().mean()) for s in SEVERITIES]
        assert away == sorted(away), corruption


@pytest.mark.parametrize("corruption", ["gaussian_noise", "impulse_noise", "glass_blur", "snow"])
def test_another_seed_is_another_image(image, corruption):
    assert not corrupt(image, corruption, 3, seed=1).equal(corrupt(image, corruption, 3, seed=2))


@pytest.fixture
def source(tmp_path):
    return pictures.classes(tmp_path / "own", count=2, side=40)


def write(source, output, **changes):
    settings = {"corruptions": ("gaussian_noise", "fog"), "severities": (1, 5), "progress": False, **changes}
    return corrupt_folder(source, output, **settings)


def test_a_folder_is_written_in_the_layout_of_imagenet_c(source, tmp_path):
    output = tmp_path / "out"
    assert write(source, output) == 16
    files = sorted(path.relative_to(output).as_posix() for path in output.rglob("*.png"))
    assert len(files) == 16
    assert files[0] == "fog/1/cat/0.png"
    found = find_imagenet_c(output, ("cat", "dog"))
    assert [len(images) for images in found.images.values()] == [4] * 4
    assert "snow is missing" in found.missing
    assert "fog/3 is missing" in found.missing


def test_a_stopped_job_goes_on_to_the_same_files(source, tmp_path, monkeypatch):
    write(source, tmp_path / "whole")
    real, calls = corruptions.corrupt, []

    def stops(*arguments):
        calls.append(arguments)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(corruptions, "corrupt", stops)
        with pytest.raises(KeyboardInterrupt):
            write(source, tmp_path / "out")
    assert len(list((tmp_path / "out").rglob("*.png"))) == 6
    assert write(source, tmp_path / "out") == 10
    assert write(source, tmp_path / "out") == 0
    for path in (tmp_path / "whole").rglob("*.png"):
        assert path.read_bytes() == (tmp_path / "out" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_a_file_that_is_half_written_is_written_again(source, tmp_path, monkeypatch):
    def fails(self, path, *arguments, **settings):
        path.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", fails)
        with pytest.raises(OSError, match="disk full"):
            write(source, tmp_path / "out")
    assert not list((tmp_path / "out").rglob("*.png"))
    assert write(source, tmp_path / "out") == 16
    assert not list((tmp_path / "out").rglob("*.part"))


def test_small_images_are_refused_or_made_larger(tmp_path):
    source = pictures.classes(tmp_path / "own", count=1, side=28, suffix=".jpg")
    with pytest.raises(ValueError, match=r"cat/0.jpg is 28 x 28; its sides may be 32 or more, or size may be given"):
        write(source, tmp_path / "out")
    write(source, tmp_path / "out", size=32)
    path = tmp_path / "out" / "fog" / "5" / "dog" / "0.jpg"
    assert read_image(path).shape == (3, 32, 32)
    assert Image.open(path).format == "JPEG"


def test_the_middle_of_an_image():
    image = torch.zeros(3, 256, 300, dtype=torch.uint8)
    image[:, 16:240, 38:262] = 7
    assert crop_centre(image, 224).shape == (3, 224, 224)
    assert (crop_centre(image, 224) == 7).all()
    assert crop_centre(image[:, :50], 224).shape == (3, 224, 224)


def test_an_image_that_cannot_be_read_is_named(source, tmp_path):
    (source / "dog" / "1.png").write_bytes(b"?")
    with pytest.raises(DamagedImageError, match=r"dog/1.png cannot be read as an image"):
        write(source, tmp_path / "out")


def test_what_cannot_be_is_refused(image, source, tmp_path):
    with pytest.raises(ValueError, match="corruption is 'rain'; it may be one of"):
        write(source, tmp_path / "out", corruptions=("rain",))
    with pytest.raises(ValueError, match="severity is 6; it may be one of"):
        write(source, tmp_path / "out", severities=(6,))
    with pytest.raises(ValueError, match="size is 16; it may be None or an integer >= 32"):
        write(source, tmp_path / "out", size=16)
    with pytest.raises(ValueError, match="which is in source"):
        write(source, source / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=r"image is torch.float32 \(3, 48, 64\); it may be torch.uint8 \(3, H, W\)"):
        corrupt(image.float(), "fog", 1)
    with pytest.raises(ValueError, match="image is 31 x 64; its sides may be 32 or more"):
        corrupt(image[:, :31], "fog", 1)


def test_without_the_library_the_extra_is_named(image, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(ImportError, match=r"making corruptions needs imagecorruptions-imaug: pip install 'muonssm\[vi"):
        corrupt(image, "fog", 1)
