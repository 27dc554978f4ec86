"""The fifteen corruptions of ImageNet-C for your own images, in ImageNet-C's layout.

    corrupt_folder(Path("val"), Path("val-c"))              # writes val-c/gaussian_noise/1/class/file.jpg and so on

The corruptions come from `imagecorruptions-imaug`, a maintained fork of the package made from ImageNet-C's own code,
for images of 32 pixels or more. Names and severities are ImageNet-C's. The images do not match it bit by bit: random
numbers differ, and some strengths depend on the size of the image. D. Hendrycks and T. Dietterich, Benchmarking neural
network robustness to common corruptions and perturbations, 2019 (arXiv 1903.12261).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from muonssm.checks import check_choice, check_int
from muonssm.lab.core.files import atomic

from .image_files import (
    DamagedImageError,
    ImageFile,
    SkippedFile,
    class_names,
    find_images,
    missing_package,
    read_image,
    to_pil,
    to_tensor,
)

CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEVERITIES = (1, 2, 3, 4, 5)
MIN_SIDE = 32
JPEG_QUALITY = 85  # as ImageNet-C's
SEEDED = ("impulse_noise", "glass_blur")  # take a seed; the others draw from numpy's global generator
PIL_FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".tif": "TIFF"}  # other formats are named like their suffix


class Corrupted(NamedTuple):
    """How many images `corrupt_folder` wrote, and the files that it skipped, with the reasons."""

    new: int
    skipped: list[SkippedFile]


def corrupt(image: Tensor, corruption: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupt an image, uint8 `[3, H, W]`; the same seed gives the same result."""
    try:
        from imagecorruptions import corruptions
    except ImportError as error:
        raise missing_package("imagecorruptions-imaug", "making corruptions") from error
    _check(image, corruption, severity)
    arguments = {"seed": seed % 2**32} if corruption in SEEDED else {}
    # Some of the functions print when an image has an odd size.
    with _numpy_seed(seed), contextlib.redirect_stdout(io.StringIO()):
        changed = getattr(corruptions, corruption)(to_pil(image), severity, **arguments)
    return torch.from_numpy(np.array(changed).astype(np.uint8)).permute(2, 0, 1).contiguous()


def _check(image: Tensor, corruption: str, severity: int) -> None:
    check_choice("corruption", corruption, CORRUPTIONS)
    check_choice("severity", severity, SEVERITIES)
    if image.dtype != torch.uint8:
        raise TypeError(f"image must be torch.uint8, got {image.dtype}")
    if image.ndim != 3 or image.shape[0] != 3 or min(image.shape[1:]) < MIN_SIDE:
        wanted = f"(3, H, W) with sides of {MIN_SIDE} or more"
        raise ValueError(f"image must have the shape {wanted}, got {tuple(image.shape)}")


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, which the library draws from; restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(before)


def crop_center(image: Tensor, size: int) -> Tensor:
    """Resize the shorter side to 8/7 of `size` (256 for 224, as ImageNet-C), and crop the center, `[3, size, size]`."""
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
    count: int | None = None,
) -> Corrupted:
    """Write every image in every corruption and severity; return how many are new, and which files were skipped.

    Files that exist are kept, and each is written atomically: the same call continues after an interruption.

    Args:
        source: a folder with one folder of images per class.
        output: a folder to write to.
        corruptions, severities: which of them to write.
        size: None corrupts whole images; otherwise their center at that size, see `crop_center`.
        seed: with a file's name, corruption and severity it determines all random numbers.
        progress: show a progress bar.
        count: the first images of each class, by name; None for all.
    """
    from tqdm import tqdm

    source, output = Path(source), Path(output)
    found, skipped = find_images(source, class_names(source))
    files = _first_of_each_class(found, count)
    jobs = [(corruption, severity) for corruption in corruptions for severity in severities]
    _check_jobs(jobs, size, source, output)
    new = 0
    with tqdm(desc="corrupting", total=len(files) * len(jobs), unit="image", delay=1, disable=not progress) as bar:
        for file in files:
            name = file.path.relative_to(source)
            targets = {job: output / job[0] / str(job[1]) / name for job in jobs}
            missing = {job: target for job, target in targets.items() if not target.is_file()}
            bar.update(len(jobs) - len(missing))
            if not missing:
                continue
            try:
                image = _load(file.path, size)
            except DamagedImageError as error:
                skipped.append((str(file.path), str(error).removeprefix(str(file.path)).strip()))
                bar.update(len(missing))
                continue
            for (corruption, severity), target in missing.items():
                _save(corrupt(image, corruption, severity, _seed(seed, name, corruption, severity)), target)
                new += 1
                bar.update()
    return Corrupted(new, skipped)


def _first_of_each_class(files: Sequence[ImageFile], count: int | None) -> list[ImageFile]:
    if count is None:
        return list(files)
    check_int("count", count, 1)
    of_class: dict[int, list[ImageFile]] = {}
    for file in files:
        of_class.setdefault(file.label, []).append(file)
    return [file for images in of_class.values() for file in images[:count]]


def _check_jobs(jobs: Sequence[tuple[str, int]], size: int | None, source: Path, output: Path) -> None:
    """Check all arguments before anything is written."""
    for corruption, severity in jobs:
        check_choice("corruption", corruption, CORRUPTIONS)
        check_choice("severity", severity, SEVERITIES)
    if size is not None:
        check_int("size", size, MIN_SIDE)
    if output.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"output must be outside of source {str(source)!r}, got {str(output)!r}")


def _load(path: Path, size: int | None) -> Tensor:
    image = read_image(path)
    image = image if size is None else crop_center(image, size)
    if min(image.shape[1:]) < MIN_SIDE:
        got = f"{image.shape[1]} x {image.shape[2]}"
        raise ValueError(f"{path} must have sides of {MIN_SIDE} or more, got {got}; --size enlarges it")
    return image


def _save(image: Tensor, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    format_ = PIL_FORMATS.get(target.suffix.lower(), target.suffix[1:].upper())
    with atomic(target) as temporary:
        # The temporary file has another suffix, so the format is given.
        to_pil(image).save(temporary, format_, **({"quality": JPEG_QUALITY} if format_ == "JPEG" else {}))


def _seed(seed: int, name: Path, corruption: str, severity: int) -> int:
    digest = hashlib.blake2b(f"{seed} {name.as_posix()} {corruption} {severity}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big")
