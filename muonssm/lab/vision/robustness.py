"""How a classifier holds up: corrupted images (ImageNet-C), other renderings (-R), and hard photographs (-A).

    CE_c = 100 (mean error over 5 severities) / (AlexNet's mean error)          mCE = mean of CE_c over 15 corruptions

`predict` takes images `[b, C, H, W]` and returns logits `[b, classes]`; `transform` makes one image ready for it, from
uint8 `[3, H, W]`. Where a corruption, a severity, a class or some images are missing there is no mCE: what is missing
is named, and CE is shown of those corruptions that are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .corruptions import CORRUPTIONS, SEVERITIES
from .image_files import ImageFile, read_image
from .imagenet import find_imagenet_c, find_subset, subset, synsets

Predict = Callable[[Tensor], Tensor]
Transform = Callable[[Tensor], Tensor]
# AlexNet's error on each corruption of ImageNet-C, from its authors: what CE is relative to.
ALEXNET = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
    "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056, "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}  # fmt: skip
SHOWN = 10


@dataclass(frozen=True)
class CorruptionScores:
    """What came out on corrupted images; all numbers in per cent.

    Attributes:
        errors: error by corruption and severity, of all that are there, with incomplete ones.
        ce: the corruption error of each complete corruption.
        mce: the mean of all fifteen; None where anything is missing.
        missing: what is, a line each.
    """

    errors: dict[str, dict[int, float]]
    ce: dict[str, float]
    mce: float | None
    missing: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The scores as text."""
        for corruption, ce in self.ce.items():
            errors = " ".join(f"{self.errors[corruption][severity]:6.2f}" for severity in SEVERITIES)
            yield f"{corruption:<18} CE {ce:7.2f}   errors {errors}"
        if self.mce is None:
            yield f"mCE: none, as {len(self.missing)} parts of the data are missing"
            yield from _named(self.missing)
        else:
            yield f"mCE {self.mce:.2f}"


@dataclass(frozen=True)
class SubsetScores:
    """What came out on ImageNet-R or -A.

    Attributes:
        accuracy: in per cent, over all images; None where a class is missing.
        of_present: in per cent, over those that are there.
        images: how many.
        missing: classes without an image, a line each.
    """

    accuracy: float | None
    of_present: float
    images: int
    missing: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The score as text."""
        if self.accuracy is not None:
            yield f"accuracy {self.accuracy:.2f}% of {self.images} images"
        else:
            yield f"accuracy: none, as {len(self.missing)} classes are missing"
            yield f"of the {self.images} images that are there {self.of_present:.2f}%"
            yield from _named(self.missing)


def _named(missing: Sequence[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in missing[:SHOWN])
    if len(missing) > SHOWN:
        yield f"  and {len(missing) - SHOWN} more"


def corruption_errors(errors: Mapping[str, Mapping[int, float]], reference: Mapping[str, float]) -> dict[str, float]:
    """CE in per cent for each corruption in `errors`, which has errors in [0, 1] of all five severities."""
    scores = {}
    for corruption, by_severity in errors.items():
        if corruption not in reference or not reference[corruption] > 0:
            raise ValueError(f"reference has no error > 0 for {corruption!r}; it has {tuple(reference)}")
        absent = [severity for severity in SEVERITIES if severity not in by_severity]
        if absent:
            raise ValueError(f"errors has no severity {absent[0]} of {corruption!r}; it may have all of {SEVERITIES}")
        mean = sum(by_severity[severity] for severity in SEVERITIES) / len(SEVERITIES)
        scores[corruption] = 100 * mean / reference[corruption]
    return scores


def mean_corruption_error(errors: Mapping[str, Mapping[int, float]], reference: Mapping[str, float] = ALEXNET) -> float:
    """mCE in per cent, of errors in [0, 1] by corruption and severity; all fifteen and all five must be there."""
    absent = [corruption for corruption in CORRUPTIONS if corruption not in errors]
    if absent:
        raise ValueError(f"errors has no {', '.join(absent)}; it may have all of {CORRUPTIONS}")
    ce = corruption_errors({corruption: errors[corruption] for corruption in CORRUPTIONS}, reference)
    return sum(ce.values()) / len(CORRUPTIONS)


def evaluate_imagenet_c(
    predict: Predict,
    root: Path,
    transform: Transform | None = None,
    classes: Sequence[str] | None = None,
    reference: Mapping[str, float] = ALEXNET,
    batch_size: int = 64,
    workers: int = 0,
    progress: bool = True,
) -> CorruptionScores:
    """Errors on all corruptions in a folder of ImageNet-C's layout.

    Args:
        predict: images to logits.
        root: the folder with a folder for each corruption.
        transform: makes one image ready; None: floats in [0, 1].
        classes: names of the classes in the order of the logits; None: ImageNet's.
        reference: errors in [0, 1] that CE is relative to. AlexNet's are for ImageNet; of other images CE is a ratio to
            an error on other data, unless the reference is a model's on the same.
        batch_size: images at a time.
        workers: processes that read images; 0 reads them in this one.
        progress: shows a bar.
    """
    names = synsets() if classes is None else tuple(classes)
    found = find_imagenet_c(Path(root), names)
    errors: dict[str, dict[int, float]] = {}
    with _bar(sum(map(len, found.images.values())), progress) as bar:
        for (corruption, severity), files in found.images.items():
            if files:
                loader = _loader(files, transform, batch_size, workers)
                right = _right(predict, loader, torch.arange(len(names)), len(names), bar)
                errors.setdefault(corruption, {})[severity] = 1 - right / len(files)
    whole = {corruption: errors[corruption] for corruption in found.complete}
    mce = None if found.missing else mean_corruption_error(errors, reference)
    shown = {name: {severity: 100 * error for severity, error in each.items()} for name, each in errors.items()}
    return CorruptionScores(shown, corruption_errors(whole, reference), mce, tuple(found.missing))


def evaluate_subset(
    predict: Predict,
    root: Path,
    name: str,
    transform: Transform | None = None,
    batch_size: int = 64,
    workers: int = 0,
    progress: bool = True,
) -> SubsetScores:
    """Accuracy on `"imagenet-r"` or `"imagenet-a"`: the largest of the 200 logits that the set has classes for.

    `predict` returns all 1,000 logits; for the other arguments see `evaluate_imagenet_c`.
    """
    chosen = torch.tensor(subset(name))
    found = find_subset(Path(root), name)
    files = found.images[name, 0]
    with _bar(len(files), progress) as bar:
        right = _right(predict, _loader(files, transform, batch_size, workers), chosen, len(synsets()), bar)
    accuracy = 100 * right / len(files)
    return SubsetScores(None if found.missing else accuracy, accuracy, len(files), tuple(found.missing))


def _loader(files: Sequence[ImageFile], transform: Transform | None, batch_size: int, workers: int) -> DataLoader:
    return DataLoader(_Ready(files, transform), batch_size, num_workers=workers, collate_fn=_stack)


def _bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(desc="evaluating", total=total, unit="image", delay=1, leave=False, disable=not progress)


class _Ready(Dataset):
    """Images as `predict` takes them, with their labels and files."""

    def __init__(self, files: Sequence[ImageFile], transform: Transform | None) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, ImageFile]:
        image = read_image(self.files[number].path)
        return image.float() / 255 if self.transform is None else self.transform(image), self.files[number]


def _stack(items: Sequence[tuple[Tensor, ImageFile]]) -> tuple[Tensor, Tensor]:
    first, before = items[0]
    for image, file in items:
        if image.shape != first.shape:
            sizes = f"{tuple(image.shape)}, and {before.path.name} is {tuple(first.shape)}"
            raise ValueError(f"{file.path} is {sizes}; transform may bring all images to one size")
    return torch.stack([image for image, _ in items]), torch.tensor([file.label for _, file in items])


def _right(predict: Predict, loader: DataLoader, chosen: Tensor, outputs: int, bar: Any) -> int:
    """How many images have the largest of the `chosen` logits at their label."""
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            logits = predict(images).cpu()
            if logits.shape != (len(images), outputs):
                raise ValueError(f"predict gave {tuple(logits.shape)}; it may give {(len(images), outputs)}")
            if logits.isnan().any():  # the largest of these would be some class or other
                raise ValueError("predict gave logits that are not a number")
            right += int((logits[:, chosen].argmax(1) == labels).sum())
            bar.update(len(images))
    return right
