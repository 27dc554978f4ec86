"""Image files: read one as a tensor, and list folders with one folder per class.

image   uint8 `[C, H, W]`; C is 1 (gray) or 3 (RGB), whatever the file has

Gray of 16 bits (PIL's modes I;16 and I) is scaled from 0...65535 to 0...255, that of 12 bits from 0...4095, and floats
(mode F) from [0, 1]. Other numbers in these modes are refused, as their range is not known, and so are what PIL would
read incorrectly: signed samples, and TIFFs of these modes whose 0 is white.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from muonssm.lab.core.untrusted import UntrustedFileError, check_regular_file, open_file

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP", "TIFF")  # what PIL may open: those of SUFFIXES, whatever the suffix
MAX_PIXELS = 100_000_000  # of an image file
PIL_MODES = {1: "L", 3: "RGB"}  # by number of channels
BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # tags of TIFF
SIGNED = 2  # of SAMPLE_FORMAT

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
        with open_file(path) as file:
            return decode(file, str(path))
    except FileNotFoundError:
        raise DamagedImageError(f"{path} is missing") from None
    except UntrustedFileError as error:
        raise DamagedImageError(str(error)) from error


def decode(file: BinaryIO, name: str) -> Image:
    """Decode an image of one of `FORMATS` and at most `MAX_PIXELS`; errors call it `name`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_package("pillow", "reading images") from error
    try:
        with Image.open(file, formats=FORMATS) as image:
            pixels = image.width * image.height
            if 0 < pixels <= MAX_PIXELS:
                image.info["rawmode"] = _raw_mode(image)
                image.load()
                return image
    # Damaged files fail in many ways, depending on their format: PIL raises SyntaxError for a broken PNG, and
    # struct.error, KeyError and others for a broken TIFF.
    except Exception as error:
        raise DamagedImageError(f"{name} cannot be read as an image: {error or type(error).__name__}") from error
    wanted = f"1 to {MAX_PIXELS} pixels ({__name__}.MAX_PIXELS)"
    raise DamagedImageError(f"{name} must have {wanted}, got {image.width} x {image.height}")


def _raw_mode(image: Image) -> str:
    """Return PIL's name for how samples are stored, of an image that is not loaded yet: "L;4" is gray of 4 bits."""
    tiles = getattr(image, "tile", ())
    args = tiles[0].args if tiles else ""
    return str(args[0] if isinstance(args, tuple) and args else args)


def to_tensor(image: Image, channels: int = 3) -> Tensor:
    """Convert a PIL image to gray or RGB, as uint8 `[C, H, W]`."""
    _check_samples(image)
    if image.mode == "F" or image.mode.split(";")[0] == "I":
        gray = _floats_to_bytes(image) if image.mode == "F" else _integers_to_bytes(image)
        return torch.from_numpy(gray).expand(channels, -1, -1).contiguous()
    array = np.array(image.convert(PIL_MODES[channels]))
    return torch.from_numpy(array.reshape(*array.shape[:2], channels)).permute(2, 0, 1).contiguous()


def _check_samples(image: Image) -> None:
    """Refuse TIFFs whose samples PIL takes for what they are not."""
    tags = getattr(image, "tag_v2", None)
    if tags is None:
        return
    bits = max(tags.get(BITS_PER_SAMPLE, (1,)))
    if SIGNED in tags.get(SAMPLE_FORMAT, ()) and bits <= 16:
        raise ValueError(f"must have unsigned samples, got signed ones of {bits} bits")
    if image.mode[0] in "IF" and tags.get(PHOTOMETRIC, 0) == 0:
        raise ValueError(f"must have 0 as black in gray of {bits} bits, got 0 as white (PhotometricInterpretation 0)")


def _integers_to_bytes(image: Image) -> np.ndarray:
    """Scale gray of 16 bits to bytes; PIL's own conversion would make everything above 255 white."""
    values = np.array(image).astype(np.int64)
    low, high = values.min(), values.max()
    if low < 0 or high > 65535:
        raise ValueError(f"must have gray values of 0 to 65535 (mode {image.mode}), got {low} to {high}")
    if image.mode == "I" and image.format != "PPM" and 0 < high <= 255:  # PIL scales PPM to 16 bits itself
        raise ValueError(f"must have 8 or 16 bits per pixel, got 32 bits and values up to {high}: 8 bits or 16?")
    largest = 4095 if image.info.get("rawmode") == "I;12" else 65535
    return ((values * 255 + largest // 2) // largest).astype(np.uint8)


def _floats_to_bytes(image: Image) -> np.ndarray:
    """Scale gray in [0, 1] to bytes; PIL's own conversion would make it black."""
    values = np.array(image)
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
        got = f"{values.min():g} to {values.max():g}"
        raise ValueError(f"must have gray values in [0, 1] (mode F), got {got}")
    return np.round(values * 255).astype(np.uint8)


def to_pil(image: Tensor) -> Image:
    """Convert uint8 `[C, H, W]` to a PIL image, gray or RGB."""
    from PIL import Image

    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[:, :, 0] if image.shape[0] == 1 else array)


def read_image(path: Path, channels: int = 3) -> Tensor:
    """Read an image file, as uint8 `[C, H, W]`."""
    return named_tensor(open_image(path), channels, str(path))


def named_tensor(image: Image, channels: int, name: str) -> Tensor:
    """`to_tensor`, with errors that call the image `name`."""
    try:
        return to_tensor(image, channels)
    except ValueError as error:
        reason = str(error) if str(error).startswith("must") else f"cannot be read as an image: {error}"
        raise DamagedImageError(f"{name} {reason}") from error


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
    images: list[Path] = []
    skipped: list[SkippedFile] = []
    for path in sorted(path for path in folder.rglob("*") if not path.is_dir()):
        reason = _why_not_an_image(path)
        if reason is None:
            images.append(path)
        else:
            skipped.append((str(path), reason))
    return images, skipped


def _why_not_an_image(path: Path) -> str | None:
    """The reason why a file is not an image, as far as can be seen without opening it; None if it is one."""
    if not is_image(path):
        return "is not an image file"
    try:
        check_regular_file(path)
    except UntrustedFileError as error:
        return error.reason
    except FileNotFoundError:
        return "is missing: a link to nothing"
    return None


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
