"""The fifteen corruptions of ImageNet-C for one's own images, in ImageNet-C's layout.

    corrupt_folder(Path("val"), Path("val-c"))              # val-c/gaussian_noise/1/class/file.jpg and so on

The corruptions are those of `imagecorruptions-imaug`, a kept fork of the package made from ImageNet-C's own code, for
images of any size from 32 pixels on. Names and severities are ImageNet-C's; images are not equal to it bit by bit:
random numbers differ, and some strengths are set for the size of an image. D. Hendrycks and T. Dietterich, Benchmarking
neural network robustness to common corruptions and perturbations, 2019 (arXiv 1903.12261).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from muonssm.checks import is_int
from muonssm.lab.core.files import atomic

from .image_files import class_names, find_images, need, open_image, to_pil, to_tensor

CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 32
QUALITY = 85  # of the JPEG files, as ImageNet-C's
SEEDED = ("impulse_noise", "glass_blur")  # these do not draw from numpy's global generator


def corrupt(image: Tensor, corruption: str, severity: int, seed: int = 0) -> Tensor:
    """An image, uint8 `[3, H, W]`, after a corruption; the same seed gives the same image."""
    try:
        from imagecorruptions import corruptions
    except ImportError as error:
        raise need("imagecorruptions-imaug", "making corruptions") from error
    _check(image, corruption, severity)
    arguments = {"seed": seed % 2**32} if corruption in SEEDED else {}
    # Some of the functions print when they handle an odd size.
    with _numpy_seed(seed), contextlib.redirect_stdout(io.StringIO()):
        changed = getattr(corruptions, corruption)(to_pil(image), severity, **arguments)
    return torch.from_numpy(np.array(changed).astype(np.uint8)).permute(2, 0, 1).contiguous()


def _check(image: Tensor, corruption: str, severity: int) -> None:
    if corruption not in CORRUPTIONS:
        raise ValueError(f"corruption is {corruption!r}; it may be one of {CORRUPTIONS}")
    if severity not in SEVERITIES or isinstance(severity, bool):
        raise ValueError(f"severity is {severity!r}; it may be one of {SEVERITIES}")
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise ValueError(f"image is {image.dtype} {tuple(image.shape)}; it may be torch.uint8 (3, H, W)")
    if min(image.shape[1:]) < SMALLEST:
        raise ValueError(f"image is {image.shape[1]} x {image.shape[2]}; its sides may be {SMALLEST} or more")


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """The library draws from numpy's global generator, which is left as it was."""
    before = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)


def crop_centre(image: Tensor, size: int) -> Tensor:
    """The middle, `[3, size, size]`, once the shorter side is 8/7 of `size`: for 224 that is 256, as ImageNet-C's."""
    from PIL import Image

    shorter = max(size, round(size * 8 / 7))
    factor = shorter / min(image.shape[1:])
    height, width = (max(size, round(side * factor)) for side in image.shape[1:])
    resized = to_tensor(to_pil(image).resize((width, height), Image.Resampling.BILINEAR))
    top, left = (height - size) // 2, (width - size) // 2
    return resized[:, top : top + size, left : left + size].contiguous()


def corrupt_folder(
    source: Path,
    output: Path,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> int:
    """Writes `output/corruption/severity/class/file` for all images in `source/class/`; returns how many are new.

    Files that are there already stay, and each is written whole or not at all: the same call goes on after a stop.

    Args:
        source: a folder with one folder of images for each class.
        output: where to write.
        corruptions, severities: which of them.
        size: None corrupts images as they are; otherwise their middle at that size, see `crop_centre`.
        seed: with a file's name it decides what is random; the other settings may change without a change in it.
        progress: shows a bar.
    """
    from tqdm import tqdm

    source, output = Path(source), Path(output)
    classes = class_names(source)
    files, _ = find_images(source, classes)
    jobs = [(corruption, severity) for corruption in corruptions for severity in severities]
    _check_jobs(jobs, size, source, output)
    new = 0
    with tqdm(desc="corrupting", total=len(files) * len(jobs), unit="image", delay=1, disable=not progress) as bar:
        for file in files:
            name = file.path.relative_to(source)
            targets = {job: output / job[0] / str(job[1]) / name for job in jobs}
            missing = {job: target for job, target in targets.items() if not target.is_file()}
            bar.update(len(jobs) - len(missing))
            image = _load(file.path, size) if missing else None
            for (corruption, severity), target in missing.items():
                assert image is not None
                changed = corrupt(image, corruption, severity, _seed(seed, name, corruption, severity))
                _save(changed, target)
                new += 1
                bar.update()
    return new


def _check_jobs(jobs: Sequence[tuple[str, int]], size: int | None, source: Path, output: Path) -> None:
    sample = torch.zeros(3, SMALLEST, SMALLEST, dtype=torch.uint8)
    for corruption, severity in jobs:
        _check(sample, corruption, severity)
    if size is not None and not is_int(size, SMALLEST):
        raise ValueError(f"size is {size!r}; it may be None or an integer >= {SMALLEST}")
    if output.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"output is {str(output)!r}, which is in source {str(source)!r}; it may be outside of it")


def _load(path: Path, size: int | None) -> Tensor:
    image = to_tensor(open_image(path))
    image = image if size is None else crop_centre(image, size)
    if min(image.shape[1:]) < SMALLEST:
        raise ValueError(
            f"{path} is {image.shape[1]} x {image.shape[2]}; its sides may be {SMALLEST} or more, or size may be given"
        )
    return image


def _save(image: Tensor, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    kinds = {".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF"}
    kind = kinds.get(target.suffix.lower(), target.suffix[1:].upper())
    with atomic(target) as part:
        # The suffix of an unfinished file says nothing of its format.
        to_pil(image).save(part, kind, **({"quality": QUALITY} if kind == "JPEG" else {}))


def _seed(seed: int, name: Path, corruption: str, severity: int) -> int:
    digest = hashlib.blake2b(f"{seed} {name.as_posix()} {corruption} {severity}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
