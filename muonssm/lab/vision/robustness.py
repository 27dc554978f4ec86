"""Robustness of a classifier: corrupted images (ImageNet-C), other renderings (-R) and hard photographs (-A).

    CE_c = 100 (mean error over 5 severities) / (AlexNet's mean error)          mCE = mean of CE_c over 15 corruptions

`predict` takes images `[B, C, H, W]` and returns logits `[B, classes]`; `transform` prepares one image uint8
`[3, H, W]` for it. If a corruption, a severity, a class or an image is missing, there is no mCE: the scores list the
gaps, and the CE of the complete corruptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from muonssm.checks import is_number
from muonssm.lab.core.run_files import need, require, require_number_or_null
from muonssm.lab.core.run_folder import RunFolder

from .augment import ImageView
from .corruptions import CORRUPTIONS, SEVERITIES
from .image_files import ImageFile, read_image
from .imagenet import find_imagenet_c, find_subset, is_imagenet, subset, synsets

Predict = Callable[[Tensor], Tensor]
Transform = Callable[[Tensor], Tensor]

ROBUSTNESS_SETS = {
    "imagenet-c": "corrupted images",
    "imagenet-r": "other renderings",
    "imagenet-a": "hard photographs",
}
ALEXNET_NAME = "AlexNet on ImageNet-C"
# AlexNet's error on each corruption of ImageNet-C, from its authors; CE is relative to it.
ALEXNET = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640, "defocus_blur": 0.819880,
    "glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572,
    "fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056, "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}  # fmt: skip
MAX_LISTED = 10  # missing folders and images that are printed


@dataclass(frozen=True)
class CorruptionScores:
    """Scores on corrupted images, in percent.

    Attributes:
        errors: error by corruption and severity, also of incomplete corruptions.
        ce: the corruption error of each complete corruption.
        mce: the mean over all fifteen corruptions; None if anything is missing.
        missing: a line for each missing folder or image.
        reference: whose errors CE is relative to.
    """

    errors: dict[str, dict[int, float]]
    ce: dict[str, float]
    mce: float | None
    missing: tuple[str, ...]
    reference: str = ALEXNET_NAME

    def lines(self) -> Iterator[str]:
        """The scores as text."""
        for corruption, ce in self.ce.items():
            errors = " ".join(f"{self.errors[corruption][severity]:6.2f}" for severity in SEVERITIES)
            yield f"{corruption:<18} CE {ce:7.2f}   errors {errors}"
        yield f"CE is relative to the errors of {self.reference}"
        if self.mce is None:
            yield f"no mCE: {len(self.missing)} folders or images are missing"
            yield from _list_missing(self.missing)
        else:
            yield f"mCE {self.mce:.2f}"


@dataclass(frozen=True)
class SubsetScores:
    """Accuracy on ImageNet-R or ImageNet-A.

    Attributes:
        accuracy: in percent; None if a class is missing.
        accuracy_on_present: in percent, over the images that are present.
        images: number of images.
        missing: a line for each class without images.
    """

    accuracy: float | None
    accuracy_on_present: float
    images: int
    missing: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The score as text."""
        if self.accuracy is not None:
            yield f"accuracy {self.accuracy:.2f}% on {self.images} images"
        else:
            yield f"no accuracy: {len(self.missing)} classes are missing"
            yield f"{self.accuracy_on_present:.2f}% on the {self.images} images that are present"
            yield from _list_missing(self.missing)


def _list_missing(missing: Sequence[str]) -> Iterator[str]:
    yield from (f"  {line}" for line in missing[:MAX_LISTED])
    if len(missing) > MAX_LISTED:
        yield f"  and {len(missing) - MAX_LISTED} more"


def evaluate_robustness(
    run: str | Path, name: str, data: str | Path, batch_size: int = 64, reference: str | Path | None = None
) -> Iterator[str]:
    """Score a trained classifier; write RUN/NAME.json, and return the scores as lines of text.

    Args:
        run: a finished run of image classification.
        name: `"imagenet-c"` (also for other classes, see `muonssm corrupt`), `"imagenet-r"` or `"imagenet-a"`.
        data: the folder of the images.
        batch_size: images per batch.
        reference: with `"imagenet-c"`, a run that was scored on the same images: CE is relative to its errors. None:
            to AlexNet's on ImageNet-C.
    """
    if reference is not None and name != "imagenet-c":
        raise ValueError(f"--reference must be left out for {name}, got {str(reference)!r}")
    errors = ALEXNET if reference is None else reference_errors(reference)
    folder = RunFolder(run)
    recipe, metadata, model = folder.load_model("vision")
    if not Path(data).is_dir():
        raise ValueError(f"--data must be the folder of {name}, got {str(data)!r}")

    @torch.inference_mode()
    def predict(images: Tensor) -> Tensor:
        return model(images)["logits"]

    view = ImageView(recipe.task.augment, metadata, training=False)  # type: ignore[attr-defined]
    scores: CorruptionScores | SubsetScores
    if name == "imagenet-c":
        scores = evaluate_imagenet_c(predict, Path(data), view, metadata["classes"], errors, batch_size)
        scores = scores if reference is None else replace(scores, reference=str(reference))
    elif is_imagenet(metadata["classes"]):
        scores = evaluate_subset(predict, Path(data), name, view, batch_size=batch_size)
    else:
        raise ValueError(f"RUN must be a run on ImageNet-1k for {name}, got {str(run)!r}, which has other classes")
    folder.write(f"{name}.json", asdict(scores))
    return scores.lines()


def reference_errors(run: str | Path) -> dict[str, float]:
    """Mean error in [0, 1] on each corruption, of a run that `evaluate_robustness` has scored on all of them."""
    folder = RunFolder(run)
    is_scored = (folder.path / "imagenet-c.json").is_file()
    scores = folder.read("imagenet-c.json", check_corruption_scores) if is_scored else None
    if scores is None or scores["mce"] is None:
        got = "no imagenet-c.json" if scores is None else f"{len(scores['missing'])} gaps"
        raise ValueError(f"--reference must be a run that was scored on all corruptions, got {str(run)!r} with {got}")
    return {corruption: sum(by.values()) / len(by) / 100 for corruption, by in scores["errors"].items()}


def check_corruption_scores(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless the content can be that of imagenet-c.json."""
    for corruption, by_severity in need("errors", content.get("errors"), dict).items():
        for severity, error in need(f"errors.{corruption}", by_severity, dict).items():
            require(severity in map(str, SEVERITIES), f"errors.{corruption}", "errors by severity, 1 to 5", severity)
            require(is_number(error), f"errors.{corruption}.{severity}", "a number", error)
    for corruption, value in need("ce", content.get("ce"), dict).items():
        require(is_number(value), f"ce.{corruption}", "a number", value)
    require_number_or_null("mce", content.get("mce"))
    if content.get("mce") is not None:
        complete = [name for name, errors in content["errors"].items() if len(errors) == len(SEVERITIES)]
        require(set(complete) >= set(CORRUPTIONS), "mce", "null without all corruptions", content["mce"])
    _check_missing(content)
    need("reference", content.get("reference", ALEXNET_NAME), str)


def check_subset_scores(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless the content can be that of imagenet-r.json or imagenet-a.json."""
    require_number_or_null("accuracy", content.get("accuracy"))
    for name in ("accuracy_on_present", "images"):
        require(is_number(content.get(name)), name, "a number", content.get(name))
    _check_missing(content)


def _check_missing(content: Mapping[str, Any]) -> None:
    for line in need("missing", content.get("missing"), list):
        need("missing", line, str)


CHECKS = {"imagenet-c": check_corruption_scores, "imagenet-r": check_subset_scores, "imagenet-a": check_subset_scores}


def corruption_errors(errors: Mapping[str, Mapping[int, float]], reference: Mapping[str, float]) -> dict[str, float]:
    """CE in percent for each corruption in `errors`, which has errors in [0, 1] for all five severities."""
    scores = {}
    for corruption, by_severity in errors.items():
        if not reference.get(corruption, 0) > 0:
            raise ValueError(f"reference must have an error > 0 for {corruption!r}, got {reference.get(corruption)}")
        absent = [severity for severity in SEVERITIES if severity not in by_severity]
        if absent:
            raise ValueError(f"errors must have the severities {SEVERITIES} of {corruption!r}, got no {absent[0]}")
        mean = sum(by_severity[severity] for severity in SEVERITIES) / len(SEVERITIES)
        scores[corruption] = 100 * mean / reference[corruption]
    return scores


def mean_corruption_error(errors: Mapping[str, Mapping[int, float]], reference: Mapping[str, float] = ALEXNET) -> float:
    """mCE in percent, from errors in [0, 1] of all fifteen corruptions and five severities."""
    absent = [corruption for corruption in CORRUPTIONS if corruption not in errors]
    if absent:
        raise ValueError(f"errors must have all fifteen corruptions, got no {', '.join(absent)}")
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
    """Score a classifier on all corruptions in a folder of ImageNet-C's layout.

    Args:
        predict: images to logits.
        root: the folder with one folder per corruption.
        transform: prepares one image; None converts it to floats in [0, 1].
        classes: names of the classes in the order of the logits; None for ImageNet's.
        reference: errors in [0, 1] that CE is relative to. AlexNet's are errors on ImageNet: for other images, pass
            the errors of a model on the same images, or compare CE values of the same images only.
        batch_size: images per batch.
        workers: data loading processes.
        progress: show a progress bar.
    """
    names = synsets() if classes is None else tuple(classes)
    found = find_imagenet_c(Path(root), names)
    errors: dict[str, dict[int, float]] = {}
    with _progress_bar(sum(map(len, found.images.values())), progress) as bar:
        for (corruption, severity), files in found.images.items():
            if files:
                loader = _loader(files, transform, batch_size, workers)
                correct = _count_correct(predict, loader, torch.arange(len(names)), len(names), bar)
                errors.setdefault(corruption, {})[severity] = 1 - correct / len(files)
    complete = {corruption: errors[corruption] for corruption in found.complete}
    mce = None if found.missing else mean_corruption_error(errors, reference)
    percent = {name: {severity: 100 * error for severity, error in by.items()} for name, by in errors.items()}
    return CorruptionScores(percent, corruption_errors(complete, reference), mce, tuple(found.missing))


def evaluate_subset(
    predict: Predict,
    root: Path,
    name: str,
    transform: Transform | None = None,
    batch_size: int = 64,
    workers: int = 0,
    progress: bool = True,
) -> SubsetScores:
    """Score a classifier on `"imagenet-r"` or `"imagenet-a"`, by the largest of the logits of their 200 classes.

    `predict` returns all 1,000 logits; for the other arguments see `evaluate_imagenet_c`.
    """
    outputs = torch.tensor(subset(name))
    found = find_subset(Path(root), name)
    files = found.images[name, 0]
    with _progress_bar(len(files), progress) as bar:
        loader = _loader(files, transform, batch_size, workers)
        correct = _count_correct(predict, loader, outputs, len(synsets()), bar)
    accuracy = 100 * correct / len(files)
    return SubsetScores(None if found.missing else accuracy, accuracy, len(files), tuple(found.missing))


def _loader(files: Sequence[ImageFile], transform: Transform | None, batch_size: int, workers: int) -> DataLoader:
    return DataLoader(_LoadedImages(files, transform), batch_size, num_workers=workers, collate_fn=_stack)


def _progress_bar(total: int, progress: bool) -> Any:
    from tqdm import tqdm

    return tqdm(desc="evaluating", total=total, unit="image", delay=1, leave=False, disable=not progress)


class _LoadedImages(Dataset):
    """Images as `predict` takes them, with their files."""

    def __init__(self, files: Sequence[ImageFile], transform: Transform | None) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, ImageFile]:
        image = read_image(self.files[index].path)
        return image.float() / 255 if self.transform is None else self.transform(image), self.files[index]


def _stack(items: Sequence[tuple[Tensor, ImageFile]]) -> tuple[Tensor, Tensor]:
    first, first_file = items[0]
    for image, file in items:
        if image.shape != first.shape:
            shapes = f"{tuple(first.shape)} for {first_file.path} and {tuple(image.shape)} for {file.path}"
            raise ValueError(f"transform must give all images the same shape, got {shapes}")
    return torch.stack([image for image, _ in items]), torch.tensor([file.label for _, file in items])


def _count_correct(predict: Predict, loader: DataLoader, outputs: Tensor, classes: int, bar: Any) -> int:
    """Count images whose label is the largest of the logits at `outputs`; the model has `classes` logits."""
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            logits = predict(images).cpu()
            if logits.shape != (len(images), classes):
                wanted = (len(images), classes)
                raise ValueError(f"predict must return logits of shape {wanted}, got {tuple(logits.shape)}")
            if logits.isnan().any():  # argmax of nan would be an arbitrary class
                raise ValueError("predict must return numbers, got nan")
            correct += int((logits[:, outputs].argmax(1) == labels).sum())
            bar.update(len(images))
    return correct
