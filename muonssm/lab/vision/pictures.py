"""Draw predictions on images: heat maps, boxes and masks, classes of pixels; and join them into one picture.

pixels   uint8 `[H, W, 3]`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .ade20k import IGNORED
from .image_files import to_pil

HEIGHT = 256  # of a panel, in pixels
LEGEND_WIDTH, LEGEND_LINE = 112, 18  # in pixels
MARGIN, TITLE_HEIGHT = 8, 20
COLORS = np.array([
    (230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180),
    (70, 240, 240), (240, 50, 230), (210, 245, 60), (250, 190, 212), (0, 128, 128), (170, 110, 40),
], dtype=np.float32)  # fmt: skip


class Panel(NamedTuple):
    """A column of a picture: its title and its pixels."""

    title: str
    pixels: np.ndarray


def to_rgb(image: Tensor) -> np.ndarray:
    """Convert an image uint8 `[C, H, W]` to pixels."""
    return np.array(to_pil(image).convert("RGB"))


def overlay_heat(pixels: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Draw heat `[H', W']` in [0, 1] over the pixels, from blue (0) to red (1)."""
    map_ = torch.as_tensor(heat)[None, None].float()
    heat = F.interpolate(map_, pixels.shape[:2], mode="bilinear", align_corners=False)[0, 0].numpy()
    ramp = [np.clip(1.5 - np.abs(4 * heat - center), 0, 1) for center in (3, 2, 1)]
    return (0.5 * pixels + 0.5 * 255 * np.stack(ramp, axis=-1)).astype(np.uint8)


def draw_objects(
    pixels: np.ndarray, masks: Tensor, boxes: Tensor, labels: Tensor, classes: Sequence[str]
) -> np.ndarray:
    """Draw masks `[n, H, W]`, boxes `[n, 4]` and the names of labels `[n]`, which count from 1, over the pixels."""
    from PIL import Image, ImageDraw

    painted = pixels.astype(np.float32)
    for mask, label in zip(masks.numpy().astype(bool), labels.tolist(), strict=True):
        painted[mask] = 0.5 * painted[mask] + 0.5 * COLORS[label % len(COLORS)]
    height, width = pixels.shape[:2]
    factor = max(1, -(-HEIGHT // height))  # enlarge first, so that lines and names stay readable
    picture = Image.fromarray(painted.astype(np.uint8)).resize(
        (width * factor, height * factor), Image.Resampling.NEAREST
    )
    pen = ImageDraw.Draw(picture)
    for box, label in zip(boxes.tolist(), labels.tolist(), strict=True):
        left, top, right, bottom = (factor * value for value in box)
        color = _color(label)
        pen.rectangle((left, top, right, bottom), outline=color, width=2)
        pen.text((left + 3, top + 1), classes[label - 1], fill=color, stroke_width=2, stroke_fill=(0, 0, 0))
    return np.array(picture)


def paint_labels(pixels: np.ndarray, labels: Tensor) -> np.ndarray:
    """Paint each class of labels `[H, W]` in its color over the gray image; leave ignored pixels as they are.

    The image is gray, so that a class looks the same on images of any color.
    """
    known = (labels != IGNORED).numpy()
    painted = pixels.astype(np.float32)
    gray = painted.mean(axis=-1, keepdims=True)
    painted[known] = 0.3 * gray[known] + 0.7 * COLORS[labels.numpy()[known] % len(COLORS)]
    return painted.astype(np.uint8)


def draw_legend(labels: Tensor, classes: Sequence[str]) -> Panel:
    """Draw colors and names of the classes in `labels`, most pixels first."""
    from PIL import Image, ImageDraw

    counts = labels[labels != IGNORED].bincount(minlength=len(classes))
    order = [label for label in counts.argsort(descending=True, stable=True).tolist() if counts[label]]
    picture = Image.new("RGB", (LEGEND_WIDTH, HEIGHT), (255, 255, 255))
    pen, lines = ImageDraw.Draw(picture), HEIGHT // LEGEND_LINE
    shown = order if len(order) <= lines else order[: lines - 1]
    for line, label in enumerate(shown):
        top, side = line * LEGEND_LINE, LEGEND_LINE - 6
        pen.rectangle((0, top, side, top + side), fill=_color(label))
        pen.text((LEGEND_LINE, top), classes[label], fill=(0, 0, 0))
    if len(order) > len(shown):
        pen.text((0, len(shown) * LEGEND_LINE), f"and {len(order) - len(shown)} more", fill=(0, 0, 0))
    return Panel("classes", np.array(picture))


def join_panels(panels: Sequence[Panel]) -> Any:
    """Join panels side by side into a PIL image, each below its title."""
    from PIL import Image, ImageDraw

    columns = [(title, _scale_to_height(pixels)) for title, pixels in panels]
    width = sum(picture.width + MARGIN for _, picture in columns) + MARGIN
    page = Image.new("RGB", (width, HEIGHT + TITLE_HEIGHT + MARGIN), (255, 255, 255))
    pen, left = ImageDraw.Draw(page), MARGIN
    for title, picture in columns:
        pen.text((left, 4), title, fill=(0, 0, 0))
        page.paste(picture, (left, TITLE_HEIGHT))
        left += picture.width + MARGIN
    return page


def _scale_to_height(pixels: np.ndarray) -> Any:
    from PIL import Image

    factor = HEIGHT / pixels.shape[0]
    resample = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.BICUBIC
    return Image.fromarray(pixels).resize((max(1, round(pixels.shape[1] * factor)), HEIGHT), resample)


def _color(label: int) -> tuple[int, ...]:
    return tuple(int(value) for value in COLORS[label % len(COLORS)])
