"""Pictures of what a vision model sees: Grad-CAM of a classifier, boxes and masks of a detector, classes of pixels.

    explain("runs/compare-vision-demo", [])           # the first test images; plain and Muon beside each other

One PNG for each image: the image, the truth where it is known, and a column for each run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.checks import is_int
from muonssm.lab.core.files import atomic
from muonssm.lab.core.run_folder import RunFolder

from .augment import view_of
from .image_files import read_image, to_pil
from .images import IMAGENET
from .segmentation_metrics import IGNORED

KINDS = ("vision", "detection", "segmentation")
SIDE = 256  # least height of a picture's columns
LEGEND, LINE = 112, 18  # width and line height of the list of classes
SURE = 0.5  # score from which a detection is drawn
COLOURS = np.array([
    (230, 25, 75), (60, 180, 75), (255, 225, 25), (0, 130, 200), (245, 130, 48), (145, 30, 180),
    (70, 240, 240), (240, 50, 230), (210, 245, 60), (250, 190, 212), (0, 128, 128), (170, 110, 40),
], dtype=np.float32)  # fmt: skip


class Shown(NamedTuple):
    """An image uint8 `[3, H, W]`, its name, and what is known to be on it."""

    name: str
    image: Tensor
    truth: Any = None


class Panel(NamedTuple):
    """A column of a picture: uint8 `[H, W, 3]` and what stands above it."""

    title: str
    pixels: np.ndarray


def explain(
    run: str | Path, images: Sequence[str | Path], count: int = 8, output: str | Path | None = None
) -> list[Path]:
    """Writes a picture for each image into `output` (by default RUN/explain), and returns their paths.

    Args:
        run: a finished run, or a comparison, whose first plain and Muon runs then stand beside each other.
        images: files; none takes the first `count` of the test part.
        count: how many of these.
        output: a folder.
    """
    if not is_int(count, 1):
        raise ValueError(f"count is {count!r}; it may be an integer >= 1")
    runs = {name: RunFolder(path).load_model(*KINDS) for name, path in _runs(Path(run)).items()}
    recipe, metadata, _ = next(iter(runs.values()))
    draw = {"vision": _classified, "detection": _detected, "segmentation": _segmented}[recipe.task_name]
    shown = _from_files(images, metadata) if images else _from_data(recipe, count)
    folder = Path(run) / "explain" if output is None else Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for item in shown:
        panels = [Panel("image", _rgb(item.image)), *draw(item, runs)]
        written.append(folder / f"{item.name}.png")
        with atomic(written[-1]) as part:
            _join(panels).save(part, format="PNG")
    return written


def _runs(path: Path) -> dict[str, Path]:
    found = {kind: path / f"{kind}-seed0-fold0" for kind in ("plain", "muon")}
    return found if all(folder.is_dir() for folder in found.values()) else {"run": path}


def _from_files(images: Sequence[str | Path], metadata: dict[str, Any]) -> list[Shown]:
    return [Shown(Path(path).stem, read_image(Path(path), metadata["channels"])) for path in images]


def _from_data(recipe: Any, count: int) -> list[Shown]:
    data = recipe.task.load_data()
    part = data.validation if data.test is None else data.test
    chosen = [int(i) for i in np.linspace(0, len(part) - 1, min(count, len(part)))]
    if recipe.task_name == "vision":
        pairs = [(i, *part.images[i]) for i in chosen]
    else:
        pairs = [(i, (255 * part[i][0]).round().byte(), part[i][1]) for i in chosen]
    return [Shown(f"test-{i:05d}", image, truth) for i, image, truth in pairs]


# one kind of task each


def _classified(item: Shown, runs: dict[str, Any]) -> list[Panel]:
    """Where the class that was found comes from, by Grad-CAM on the last stage that has room for it."""
    panels = []
    for name, (recipe, metadata, model) in runs.items():
        x = view_of(recipe.task.augment, metadata)(item.image)[None]
        heat, logits = grad_cam(model, x)
        best = int(logits.argmax())
        share = float(logits.softmax(-1)[best])
        true = "" if item.truth is None else f" (is {metadata['classes'][item.truth]})"
        title = f"{name}: {metadata['classes'][best]} {100 * share:.0f}%{true}"
        panels.append(Panel(title, _overlay(_rgb(item.image), heat)))
    return panels


def grad_cam(model: nn.Module, x: Tensor) -> tuple[np.ndarray, Tensor]:
    """Heat in [0, 1] of the likeliest class over the input's pixels, `[H, W]`, and the logits `[classes]`.

    The map looked at is that of the last stage with at least four positions a side: fewer show nothing.
    """
    from pytorch_grad_cam import GradCAM

    network: Any = model.network
    with torch.no_grad():
        logits, maps = network(x)[0], network.forward_features(x)
    fitting = [i for i, h in enumerate(maps) if min(h.shape[-2:]) >= 4] or [0]
    with GradCAM(model=network, target_layers=[network.levels[fitting[-1]]]) as cam:
        heat = cam(input_tensor=x, targets=None)[0]
    return heat, logits


def _detected(item: Shown, runs: dict[str, Any]) -> list[Panel]:
    pixels, panels = _rgb(item.image), []
    _, metadata, _ = next(iter(runs.values()))
    if item.truth is not None:
        panels.append(
            Panel("truth", _objects(pixels, item.truth["masks"], item.truth["boxes"], item.truth["labels"], metadata))
        )
    for name, (_, metadata, model) in runs.items():
        with torch.no_grad():
            found = model([item.image.float() / 255])["detections"][0]
        sure = found["scores"] >= SURE
        masks = found["masks"][sure, 0] >= 0.5
        drawn = _objects(pixels, masks, found["boxes"][sure], found["labels"][sure], metadata)
        panels.append(Panel(f"{name}: {int(sure.sum())} found", drawn))
    return panels


def _objects(pixels: np.ndarray, masks: Tensor, boxes: Tensor, labels: Tensor, metadata: dict[str, Any]) -> np.ndarray:
    from PIL import Image, ImageDraw

    painted = pixels.astype(np.float32)
    for mask, label in zip(masks.numpy().astype(bool), labels.tolist(), strict=True):
        painted[mask] = 0.5 * painted[mask] + 0.5 * COLOURS[label % len(COLOURS)]
    factor = max(1, -(-SIDE // pixels.shape[0]))  # lines and names are drawn on the larger picture, to be readable
    picture = Image.fromarray(painted.astype(np.uint8)).resize(
        (pixels.shape[1] * factor, pixels.shape[0] * factor), Image.Resampling.NEAREST
    )
    pen = ImageDraw.Draw(picture)
    for box, label in zip(boxes.tolist(), labels.tolist(), strict=True):
        colour = tuple(int(value) for value in COLOURS[label % len(COLOURS)])
        left, top, right, bottom = (factor * value for value in box)
        pen.rectangle((left, top, right, bottom), outline=colour, width=2)
        pen.text(
            (left + 3, top + 1), metadata["classes"][label - 1], fill=colour, stroke_width=2, stroke_fill=(0, 0, 0)
        )
    return np.array(picture)


def _segmented(item: Shown, runs: dict[str, Any]) -> list[Panel]:
    pixels = _rgb(item.image)
    painted = [] if item.truth is None else [("truth", item.truth)]
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)
    for name, (_, _, model) in runs.items():
        with torch.no_grad():
            logits = model((item.image.float() / 255 - mean)[None] / std)["logits"]
        size = item.image.shape[-2:]
        found = F.interpolate(logits, size, mode="bilinear", align_corners=False).argmax(1)[0]
        title = name
        if item.truth is not None:
            known = item.truth != IGNORED
            title = f"{name}: {100 * (found == item.truth)[known].float().mean():.0f}% of pixels right"
        painted.append((title, found))
    classes = next(iter(runs.values()))[1]["classes"]
    panels = [Panel(title, _painted(pixels, labels)) for title, labels in painted]
    return [*panels, _legend(torch.stack([labels for _, labels in painted]), classes)]


def _painted(pixels: np.ndarray, labels: Tensor) -> np.ndarray:
    """Each class in its colour, over the image in grey, as a class should look alike everywhere; no label, no paint."""
    known = (labels != IGNORED).numpy()
    painted = pixels.astype(np.float32)
    grey = painted.mean(axis=-1, keepdims=True)
    painted[known] = 0.3 * grey[known] + 0.7 * COLOURS[labels.numpy()[known] % len(COLOURS)]
    return painted.astype(np.uint8)


def _legend(labels: Tensor, classes: Sequence[str]) -> Panel:
    """Colours and names of the classes that are there, most pixels first."""
    from PIL import Image, ImageDraw

    there = labels[labels != IGNORED].bincount(minlength=len(classes))
    order = [number for number in there.argsort(descending=True, stable=True).tolist() if there[number]]
    picture = Image.new("RGB", (LEGEND, SIDE), (255, 255, 255))
    pen, fits = ImageDraw.Draw(picture), SIDE // LINE
    shown = order if len(order) <= fits else order[: fits - 1]
    for row, number in enumerate(shown):
        colour = tuple(int(value) for value in COLOURS[number % len(COLOURS)])
        pen.rectangle((0, row * LINE, LINE - 6, row * LINE + LINE - 6), fill=colour)
        pen.text((LINE, row * LINE), classes[number], fill=(0, 0, 0))
    if len(order) > len(shown):
        pen.text((0, len(shown) * LINE), f"and {len(order) - len(shown)} more", fill=(0, 0, 0))
    return Panel("classes", np.array(picture))


# pixels


def _rgb(image: Tensor) -> np.ndarray:
    return np.array(to_pil(image).convert("RGB"))


def _overlay(pixels: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Heat `[H', W']` in [0, 1] from blue to red over the image."""
    size = pixels.shape[:2]
    heat = F.interpolate(torch.as_tensor(heat)[None, None].float(), size, mode="bilinear", align_corners=False)[
        0, 0
    ].numpy()
    ramp = [np.clip(1.5 - np.abs(4 * heat - centre), 0, 1) for centre in (3, 2, 1)]
    return (0.5 * pixels + 0.5 * 255 * np.stack(ramp, axis=-1)).astype(np.uint8)


def _join(panels: Sequence[Panel]) -> Any:
    """Columns beside each other, each under its title."""
    from PIL import Image, ImageDraw

    columns: list[tuple[str, Any]] = []
    for title, pixels in panels:
        factor = SIDE / pixels.shape[0]
        resample = Image.Resampling.NEAREST if factor >= 1 else Image.Resampling.BICUBIC
        size = (max(1, round(pixels.shape[1] * factor)), SIDE)
        columns.append((title, Image.fromarray(pixels).resize(size, resample)))
    margin, above = 8, 20
    width = sum(picture.width + margin for _, picture in columns) + margin
    page = Image.new("RGB", (width, SIDE + above + margin), (255, 255, 255))
    pen, left = ImageDraw.Draw(page), margin
    for title, picture in columns:
        pen.text((left, 4), title, fill=(0, 0, 0))
        page.paste(picture, (left, above))
        left += picture.width + margin
    return page
