"""Corruptions of your own images: all fifteen, deterministic by seed, in a folder that can be resumed."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from muonssm.cli import main
from muonssm.lab.vision import corruptions
from muonssm.lab.vision.corruptions import CORRUPTIONS, SEVERITIES, corrupt, corrupt_folder, crop_center
from muonssm.lab.vision.image_files import read_image
from muonssm.lab.vision.imagenet import find_imagenet_c

from . import pictures


@pytest.fixture(scope="module")
def image():
    """A smooth image that every corruption changes: a gradient with a square, 48 x 64."""
    y, x = torch.meshgrid(torch.linspace(0, 200, 48), torch.linspace(0, 200, 64), indexing="ij")
    picture = torch.stack([y, x, (x + y) / 2])
    picture[:, 10:30, 20:40] += 50
    return picture.byte()


# glass_blur takes seconds, most of them to compile
@pytest.mark.parametrize(
    "corruption", [pytest.param(name, marks=pytest.mark.full if name == "glass_blur" else ()) for name in CORRUPTIONS]
)
def test_every_corruption_is_deterministic_by_seed(image, corruption, capsys):
    before = np.random.get_state()[1].tolist()
    for severity in (1, 5):
        changed = corrupt(image, corruption, severity, seed=3)
        assert changed.shape == image.shape
        assert changed.dtype == torch.uint8
        assert not changed.equal(image)
        assert changed.equal(corrupt(image, corruption, severity, seed=3))
    assert np.random.get_state()[1].tolist() == before
    assert capsys.readouterr().out == ""


def test_higher_severities_change_more(image):
    for corruption in ("gaussian_noise", "shot_noise", "impulse_noise", "brightness", "contrast"):
        changes = [float((corrupt(image, corruption, s).float() - image).abs().mean()) for s in SEVERITIES]
        assert changes == sorted(changes), corruption


@pytest.mark.parametrize(
    "corruption", ["gaussian_noise", "impulse_noise", pytest.param("glass_blur", marks=pytest.mark.full), "snow"]
)
def test_another_seed_gives_another_image(image, corruption):
    assert not corrupt(image, corruption, 3, seed=1).equal(corrupt(image, corruption, 3, seed=2))


@pytest.fixture
def source(tmp_path):
    return pictures.classes(tmp_path / "own", count=2, side=40)


def write(source, output, **changes):
    settings = {"corruptions": ("gaussian_noise", "fog"), "severities": (1, 5), "progress": False, **changes}
    return corrupt_folder(source, output, **settings).new


def test_a_folder_is_written_in_the_layout_of_imagenet_c(source, tmp_path):
    output = tmp_path / "out"
    assert write(source, output) == 16
    files = sorted(path.relative_to(output).as_posix() for path in output.rglob("*.png"))
    assert len(files) == 16
    assert files[0] == "fog/1/cat/0.png"
    result = find_imagenet_c(output, ("cat", "dog"))
    assert [len(images) for images in result.images.values()] == [4] * 4
    assert "snow is missing" in result.missing
    assert "fog/3 is missing" in result.missing


def test_the_first_images_of_each_class(source, tmp_path):
    assert write(source, tmp_path / "out", count=1) == 8
    assert {path.name for path in (tmp_path / "out").rglob("*.png")} == {"0.png"}
    assert write(source, tmp_path / "out", count=5) == 8  # there are two of each class
    with pytest.raises(ValueError, match="count must be an integer >= 1, got 0"):
        write(source, tmp_path / "out", count=0)


def test_a_stopped_job_continues_to_the_same_files(source, tmp_path, monkeypatch):
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


def test_a_partly_written_file_is_written_again(source, tmp_path, monkeypatch):
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


def test_small_images_raise_or_are_enlarged(tmp_path):
    source = pictures.classes(tmp_path / "own", count=1, side=28, suffix=".jpg")
    with pytest.raises(ValueError, match=r"cat/0.jpg must have sides of 32 or more, got 28 x 28"):
        write(source, tmp_path / "out")
    write(source, tmp_path / "out", size=32)
    path = tmp_path / "out" / "fog" / "5" / "dog" / "0.jpg"
    assert read_image(path).shape == (3, 32, 32)
    assert Image.open(path).format == "JPEG"


def test_center_crop():
    image = torch.zeros(3, 256, 300, dtype=torch.uint8)
    image[:, 16:240, 38:262] = 7
    assert crop_center(image, 224).shape == (3, 224, 224)
    assert (crop_center(image, 224) == 7).all()
    assert crop_center(image[:, :50], 224).shape == (3, 224, 224)


def test_unusable_files_are_listed_and_the_others_written(source, tmp_path, monkeypatch, capsys):
    (source / "dog" / "1.png").write_bytes(b"?")
    (source / "dog" / "notes\n.txt").write_text("?")
    settings = {"corruptions": ("fog",), "severities": (1,), "progress": False}
    result = corrupt_folder(source, tmp_path / "out", **settings)
    assert result.new == 3
    assert [path.removeprefix(f"{source}/") for path, _ in result.skipped] == ["dog/notes\n.txt", "dog/1.png"]
    assert result.skipped[1][1].startswith("cannot be read as an image")
    monkeypatch.setattr(corruptions, "corrupt_folder", lambda *arguments, **options: result)
    assert main(["corrupt", str(source), str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "skipped 2 files" in out
    assert r"dog/notes\n.txt: is not an image file" in out


def test_invalid_arguments_raise(image, source, tmp_path):
    with pytest.raises(ValueError, match=r"corruption must be one of .* got 'rain'"):
        write(source, tmp_path / "out", corruptions=("rain",))
    with pytest.raises(ValueError, match=r"severity must be one of .* got 6"):
        write(source, tmp_path / "out", severities=(6,))
    with pytest.raises(ValueError, match="size must be an integer >= 32, got 16"):
        write(source, tmp_path / "out", size=16)
    with pytest.raises(ValueError, match="output must be outside of source"):
        write(source, source / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(TypeError, match=r"image must be torch.uint8, got torch.float32"):
        corrupt(image.float(), "fog", 1)
    with pytest.raises(ValueError, match=r"image must have the shape .* got \(3, 31, 64\)"):
        corrupt(image[:, :31], "fog", 1)


def test_a_missing_library_names_the_extra(image, monkeypatch):
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(ImportError, match=r"making corruptions needs imagecorruptions-imaug: pip install 'muonssm\[vi"):
        corrupt(image, "fog", 1)
