"""Write small folders of image files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def picture(height: int = 8, width: int = 8, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """An image of noise; the seed determines it."""
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    array = np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)
    return Image.fromarray(array)


def save(path: Path, image: Image.Image | None = None, seed: int = 0) -> Path:
    """Save an image, by default noise; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    (image or picture(seed=seed)).save(path)
    return path


def classes(root: Path, names=("cat", "dog"), count: int = 4, side: int = 8, suffix: str = ".png") -> Path:
    """Write a folder per class with `count` images each."""
    for number, name in enumerate(names):
        for i in range(count):
            save(root / name / f"{i}{suffix}", picture(side, side, seed=100 * number + i))
    return root
