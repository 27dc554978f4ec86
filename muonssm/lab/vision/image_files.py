"""Image files: read one as a tensor, and list folders with one folder per class.

image   uint8 `[C, H, W]`; C is 1 (gray) or 3 (RGB), whatever the file has
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
PIL_MODES = {1: "L", 3: "RGB"}  # by number of channels

SkippedFile = tuple[str, str]  # a file, and why it was skipped


class DamagedImageError(ValueError):
    """An image file is missing or cannot be read; the message names it."""


class ImageFile(NamedTuple):
    """An image file and its label."""

    path: Path
    label: int


def missing_package(package: str, purpose: str) -> ImportError:
    """Create the error for a missing package of the vision extra."""
    return ImportError(f"{purpose} needs {package}: pip install 'muonssm[vision]'")


def open_image(path: Path) -> Image:
    """Open and decode a file as a PIL image; errors name the file."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("pillow", "reading images") from error
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except FileNotFoundError:
        raise DamagedImageError(f"{path} is missing") from None
    # Damaged files fail in many ways, depending on their format; PIL raises SyntaxError for a broken PNG.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DamagedImageError(f"{path} cannot be read as an image: {error}") from error


def to_tensor(image: Image, channels: int = 3) -> Tensor:
    """Convert a PIL image to gray or RGB, as uint8 `[C, H, W]`."""
    array = np.array(image.convert(PIL_MODES[channels]))
    return torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1).contiguous()


def to_pil(image: Tensor) -> Image:
    """Convert uint8 `[C, H, W]` to a PIL image, gray or RGB."""
    from PIL import Image

    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if image.shape[0] == 1 else array)


def read_image(path: Path, channels: int = 3) -> Tensor:
    """Read an image file, as uint8 `[C, H, W]`."""
    return to_tensor(open_image(path), channels)


def is_image(path: Path) -> bool:
    """Whether a file has an image's suffix and is not hidden."""
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def class_names(root: Path) -> tuple[str, ...]:
    """The names of the folders in `root`, sorted; hidden folders are not classes."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root} must be a folder with one folder of images per class, got no folder")
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise ValueError(f"{root} must have one folder of images per class, got none")
    return tuple(names)


def find_class(folder: Path) -> tuple[list[Path], list[SkippedFile]]:
    """The image files below the folder of a class, sorted, and the files that are not images."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    skipped = [(str(path), "is not an image file") for path in files if not is_image(path)]
    return [path for path in files if is_image(path)], skipped


def find_images(root: Path, classes: Sequence[str]) -> tuple[list[ImageFile], list[SkippedFile]]:
    """All images below `root/class/` with their labels, and the files that are not images.

    Files are found by their suffix and not opened: there can be millions. Every class must have an image.
    """
    unknown = [name for name in class_names(root) if name not in set(classes)]
    if unknown:
        raise ValueError(f"{root} must have the {len(classes)} classes of the training set, got {unknown[0]!r} as well")
    images: list[ImageFile] = []
    skipped = [(str(path), "is not in a class folder") for path in sorted(root.iterdir()) if not path.is_dir()]
    for label, name in enumerate(classes):
        files, others = find_class(root / name)
        if not files:
            got = "a folder without images" if (root / name).is_dir() else "no folder"
            raise ValueError(f"{root / name} must be a folder with one or more images, got {got}")
        images += [ImageFile(path, label) for path in files]
        skipped += others
    return images, skipped
