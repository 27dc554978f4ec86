"""Image files: one of them as a tensor, and folders with one folder for each class.

image   uint8 `[C, H, W]`; C is 1 (grey) or 3 (RGB), whatever the file has
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from muonssm.lab.activity.recordings import LostFile as Lost

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
MODES = {1: "L", 3: "RGB"}


class DamagedImageError(ValueError):
    """A file that should be an image and cannot be read as one; the message names it."""


class ImageFile(NamedTuple):
    """A file and the number of its class."""

    path: Path
    label: int


def need(package: str, what: str) -> ImportError:
    """The error to raise when a package of the vision extra is missing."""
    return ImportError(f"{what} needs {package}: pip install 'muonssm[vision]'")


def open_image(path: Path) -> Image:
    """A decoded PIL image; errors name the file."""
    try:
        from PIL import Image
    except ImportError as error:
        raise need("pillow", "reading images") from error
    try:
        with Image.open(path) as image:
            image.load()
            return image
    except FileNotFoundError:
        raise DamagedImageError(f"{path} is missing") from None
    # A damaged file may fail in many ways, depending on its format; SyntaxError is what PIL raises for a broken PNG.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DamagedImageError(f"{path} cannot be read as an image: {error}") from error


def to_tensor(image: Image, channels: int = 3) -> Tensor:
    """A PIL image as uint8 `[C, H, W]`, converted to grey or RGB."""
    array = np.array(image.convert(MODES[channels]))
    return torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1).contiguous()


def to_pil(image: Tensor) -> Image:
    """uint8 `[C, H, W]` as a PIL image, grey or RGB."""
    from PIL import Image

    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if image.shape[0] == 1 else array)


def read_image(path: Path, channels: int = 3) -> Tensor:
    """The image in a file, uint8 `[C, H, W]`."""
    return to_tensor(open_image(path), channels)


def is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".")


def class_names(root: Path) -> tuple[str, ...]:
    """The names of the folders in `root`, in order; hidden ones are no classes."""
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is no folder; it may be one with a folder of images for each class")
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise ValueError(f"{root} has no folders; it may have one of images for each class")
    return tuple(names)


def find_class(folder: Path) -> tuple[list[Path], list[Lost]]:
    """The image files below the folder of a class, in order, and the files that are none."""
    files = sorted(path for path in folder.rglob("*") if not path.is_dir())
    lost = [(str(path), "is no image file") for path in files if not is_image(path)]
    return [path for path in files if is_image(path)], lost


def find_images(root: Path, classes: Sequence[str]) -> tuple[list[ImageFile], list[Lost]]:
    """All images below `root/class/` for each class, with its number, and the files that are none.

    Files are found by their suffix and not opened: there may be millions. Each class must have a folder with an image.
    """
    there = class_names(root)
    unknown = [name for name in there if name not in set(classes)]
    if unknown:
        raise ValueError(
            f"{root / unknown[0]} is a class that training has not; it may be one of {len(classes)} others"
        )
    found: list[ImageFile] = []
    lost = [(str(path), "is in no class") for path in sorted(root.iterdir()) if not path.is_dir()]
    for label, name in enumerate(classes):
        files, others = find_class(root / name)
        if not files:
            what = "has no images" if (root / name).is_dir() else "is missing"
            raise ValueError(f"{root / name} {what}; each class may have a folder with one or more images")
        found += [ImageFile(path, label) for path in files]
        lost += others
    return found, lost
