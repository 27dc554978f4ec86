"""ImageNet's classes, and the folders of its robustness sets: ImageNet-C, -R and -A.

ImageNet-C      root/corruption/severity/class/*.JPEG, the 15 corruptions of `corruptions.py` in 5 severities
ImageNet-R, -A  root/class/*.jpg, 200 of the 1,000 classes

A class is a WordNet id such as n01440764. What should be there and is not is named.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .corruptions import CORRUPTIONS, SEVERITIES
from .image_files import ImageFile, class_names, find_class, need

SUBSETS = {"imagenet-r": "imagenet_r_indices.txt", "imagenet-a": "imagenet_a_indices.txt"}


def _timm_list(name: str) -> list[str]:
    """A list that ships with timm. timm itself is not imported: that needs torchvision, its lists do not."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise need("timm", "the list of ImageNet's classes")
    path = Path(spec.submodule_search_locations[0]) / "data" / "_info" / name
    return path.read_text(encoding="utf-8").split()


def synsets() -> tuple[str, ...]:
    """The 1,000 classes, in the order of a classifier's outputs."""
    return tuple(_timm_list("imagenet_synsets.txt"))


def subset(name: str) -> tuple[int, ...]:
    """The outputs of an ImageNet classifier that `"imagenet-r"` or `"imagenet-a"` is about: 200 of them, in order."""
    if name not in SUBSETS:
        raise ValueError(f"name is {name!r}; it may be one of {tuple(SUBSETS)}")
    return tuple(int(number) for number in _timm_list(SUBSETS[name]))


class Found(NamedTuple):
    """The images of a set, by what they belong to, and what is missing, by its place in the folder.

    Attributes:
        images: for ImageNet-C by corruption and severity.
        missing: a line for each: what it is, relative to the root, and what is wrong.
        complete: the corruptions of which nothing is missing.
    """

    images: dict[tuple[str, int], list[ImageFile]]
    missing: list[str]
    complete: tuple[str, ...]


def find_imagenet_c(root: Path, classes: Sequence[str]) -> Found:
    """The images of all corruptions, and what is missing of corruptions, severities, classes and images.

    How many images a class has is known only from the folder itself: it is the most that any corruption and severity
    has of that class.
    """
    class_names(root)  # that there is a folder with folders
    images: dict[tuple[str, int], list[ImageFile]] = {}
    missing: dict[str, list[str]] = {corruption: [] for corruption in CORRUPTIONS}
    for corruption in CORRUPTIONS:
        severities = [severity for severity in SEVERITIES if (root / corruption / str(severity)).is_dir()]
        if not severities:
            missing[corruption].append(f"{corruption} is missing")
            continue
        missing[corruption] += [f"{corruption}/{s} is missing" for s in SEVERITIES if s not in severities]
        for severity in severities:
            files, empty = _in_classes(root / corruption / str(severity), classes)
            images[corruption, severity] = files
            missing[corruption] += [f"{corruption}/{severity}/{name} is missing or empty" for name in empty]
    _compare_counts(images, classes, missing)
    complete = tuple(corruption for corruption, lines in missing.items() if not lines)
    return Found(images, [line for lines in missing.values() for line in lines], complete)


def _in_classes(folder: Path, classes: Sequence[str]) -> tuple[list[ImageFile], list[str]]:
    """The images of all classes, and the classes that have none."""
    unknown = sorted({path.name for path in folder.iterdir() if path.is_dir()} - set(classes))
    if unknown:
        raise ValueError(f"{folder / unknown[0]} is no class of this model; it may be one of its {len(classes)}")
    files, empty = [], []
    for label, name in enumerate(classes):
        found, _ = find_class(folder / name)
        files += [ImageFile(path, label) for path in found]
        if not found:
            empty.append(name)
    return files, empty


def _compare_counts(
    images: Mapping[tuple[str, int], Sequence[ImageFile]], classes: Sequence[str], missing: Mapping[str, list[str]]
) -> None:
    """Adds the classes to `missing` that have fewer images in one place than in another."""
    counts = {place: [0] * len(classes) for place in images}
    for place, files in images.items():
        for file in files:
            counts[place][file.label] += 1
    most = [max(column) for column in zip(*counts.values(), strict=True)]
    for (corruption, severity), row in counts.items():
        for name, count, expected in zip(classes, row, most, strict=True):
            if 0 < count < expected:
                line = f"{corruption}/{severity}/{name} has {count} of {expected} images"
                missing[corruption].append(line)


def find_subset(root: Path, name: str) -> Found:
    """The images of ImageNet-R or -A; labels count the 200 classes of `subset(name)`."""
    every = synsets()
    files, empty = _in_classes(root, [every[number] for number in subset(name)])
    if not files:
        raise ValueError(
            f"{root} has none of the classes of {name}; it may have a folder for each, such as {empty[0]}/"
        )
    return Found({(name, 0): files}, [f"{line} is missing or empty" for line in empty], () if empty else (name,))
