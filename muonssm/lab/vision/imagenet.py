"""ImageNet's classes, and the folders of its robustness sets: ImageNet-C, ImageNet-R and ImageNet-A.

ImageNet-C           root/corruption/severity/class/*.JPEG, the 15 corruptions of `corruptions.py` in 5 severities
ImageNet-R and -A    root/class/*.jpg, 200 of the 1,000 classes

A class is a WordNet id such as n01440764. Missing folders and images are listed by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from muonssm.checks import check_choice
from muonssm.lab.core.untrusted import read_text

from .corruptions import CORRUPTIONS, SEVERITIES
from .image_files import ImageFile, class_names, find_class, missing_package

SUBSETS = {"imagenet-r": "imagenet_r_indices.txt", "imagenet-a": "imagenet_a_indices.txt"}


def _timm_list(name: str) -> list[str]:
    """Read a list that ships with timm, without importing timm, which would need torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        raise missing_package("timm", "the list of ImageNet's classes")
    path = Path(spec.submodule_search_locations[0]) / "data" / "_info" / name
    return read_text(path).split()


def synsets() -> tuple[str, ...]:
    """The 1,000 classes, in the order of a classifier's outputs."""
    return tuple(_timm_list("imagenet_synsets.txt"))


def is_imagenet(classes: Sequence[str]) -> bool:
    """Whether these are ImageNet-1k's classes, in the usual order."""
    return len(classes) == 1000 and tuple(classes) == synsets()  # other data does not need timm


def subset(name: str) -> tuple[int, ...]:
    """The outputs of an ImageNet classifier for the 200 classes of `"imagenet-r"` or `"imagenet-a"`, sorted."""
    check_choice("name", name, tuple(SUBSETS))
    return tuple(int(number) for number in _timm_list(SUBSETS[name]))


class RobustnessImages(NamedTuple):
    """The images of a robustness set.

    Attributes:
        images: by corruption and severity; for ImageNet-R and -A by name and 0.
        missing: a line for each missing folder or image, relative to the root.
        complete: the corruptions of which nothing is missing.
    """

    images: dict[tuple[str, int], list[ImageFile]]
    missing: list[str]
    complete: tuple[str, ...]


def find_imagenet_c(root: Path, classes: Sequence[str]) -> RobustnessImages:
    """Find the images of all corruptions, and list missing corruptions, severities, classes and images.

    The expected number of images of a class is the largest that any corruption and severity has.
    """
    class_names(root)  # raises if there are no folders
    images: dict[tuple[str, int], list[ImageFile]] = {}
    missing: dict[str, list[str]] = {corruption: [] for corruption in CORRUPTIONS}
    for corruption in CORRUPTIONS:
        severities = [severity for severity in SEVERITIES if (root / corruption / str(severity)).is_dir()]
        if not severities:
            missing[corruption].append(f"{corruption} is missing")
            continue
        missing[corruption] += [f"{corruption}/{s} is missing" for s in SEVERITIES if s not in severities]
        for severity in severities:
            files, empty = _find_by_class(root / corruption / str(severity), classes)
            images[corruption, severity] = files
            missing[corruption] += [f"{corruption}/{severity}/{name} is missing or empty" for name in empty]
    _list_incomplete_classes(images, classes, missing)
    complete = tuple(corruption for corruption, lines in missing.items() if not lines)
    return RobustnessImages(images, [line for lines in missing.values() for line in lines], complete)


def _find_by_class(folder: Path, classes: Sequence[str]) -> tuple[list[ImageFile], list[str]]:
    """The images of all classes, and the classes without images."""
    unknown = sorted({path.name for path in folder.iterdir() if path.is_dir()} - set(classes))
    if unknown:
        raise ValueError(f"{folder} must have folders of the model's {len(classes)} classes only, got {unknown[0]!r}")
    images, empty = [], []
    for label, name in enumerate(classes):
        files, _ = find_class(folder / name)
        images += [ImageFile(path, label) for path in files]
        if not files:
            empty.append(name)
    return images, empty


def _list_incomplete_classes(
    images: Mapping[tuple[str, int], Sequence[ImageFile]], classes: Sequence[str], missing: Mapping[str, list[str]]
) -> None:
    """Add the classes to `missing` that have fewer images in one corruption and severity than in another."""
    counts = {key: [0] * len(classes) for key in images}
    for key, files in images.items():
        for file in files:
            counts[key][file.label] += 1
    expected = [max(of_class) for of_class in zip(*counts.values(), strict=True)]
    for (corruption, severity), by_class in counts.items():
        for name, count, wanted in zip(classes, by_class, expected, strict=True):
            if 0 < count < wanted:
                missing[corruption].append(f"{corruption}/{severity}/{name} has {count} of {wanted} images")


def find_subset(root: Path, name: str) -> RobustnessImages:
    """Find the images of ImageNet-R or ImageNet-A; labels count the 200 classes of `subset(name)`."""
    classes = synsets()
    files, empty = _find_by_class(root, [classes[number] for number in subset(name)])
    if not files:
        raise ValueError(f"{root} must have a folder per class of {name}, such as {empty[0]}/, got none")
    missing = [f"{class_name} is missing or empty" for class_name in empty]
    return RobustnessImages({(name, 0): files}, missing, () if empty else (name,))
