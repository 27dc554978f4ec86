"""Semantic segmentation as a task: a class for each pixel; mean intersection over union in percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_choice, check_int, check_number
from muonssm.lab.core.scorer import Scorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores
from muonssm.models.vision.segmentation import Segmenter
from muonssm.ops import Muon

from .ade20k import IGNORED, Ade20k, CropView, pad
from .canvases import canvas_config, canvases
from .image_task import ImageTask, LabeledImage, TrainedRun, VisionModelConfig
from .images import IMAGENET_STATISTICS
from .pictures import Panel, draw_legend, paint_labels, to_rgb
from .segmentation_metrics import PixelCounts

COUNTED_IMAGES = 100  # training images, evenly spaced, from which the class shares are counted


@dataclass(frozen=True)
class SegmentationConfig:
    """Images with labeled pixels.

    Attributes:
        source: `"canvases"` (embedded: digits composed on canvases, not photographs) or `"ade20k"`.
        root: for `"ade20k"`, the folder with `images/training`, `annotations/training` and those of validation.
        classes: for `"ade20k"`, the number of classes.
        size: side of the training crops.
        scales: smallest and largest factor that images are scaled by in training.
        flip: probability of a horizontal flip in training.
        canvases: settings of the canvases; see `CanvasConfig`.
    """

    source: str = "canvases"
    root: str | None = None
    classes: int | None = None
    size: int = 512
    scales: tuple[float, float] = (0.5, 2.0)
    flip: float = 0.5
    canvases: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("canvases", "ade20k"))
        embedded = self.source == "canvases"
        for name in ("root", "classes"):
            if (getattr(self, name) is None) != embedded:
                wanted = "None" if embedded else "set"
                raise ValueError(f"{name} must be {wanted} with source {self.source!r}, got {getattr(self, name)!r}")
        object.__setattr__(self, "scales", self.view().scales)
        if self.canvases and not embedded:
            raise ValueError(f"canvases must be empty with source {self.source!r}, got {self.canvases!r}")
        canvas_config(self.canvases)

    def view(self) -> CropView:
        """The random transformation of training images."""
        return CropView(self.size, self.scales, self.flip)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; numbers for ADE20K, whose files have no names."""
        if self.source == "canvases":
            return canvas_config(self.canvases).classes
        return tuple(str(number) for number in range(self.classes or 0))

    def open(self) -> dict[str, Ade20k]:
        """Open the splits. ADE20K's test split has no labels, so its validation split is the test set."""
        embedded = self.source == "canvases"
        root = canvases(canvas_config(self.canvases)) if embedded else Path(str(self.root))
        splits = ("training", "validation", "test") if embedded else ("training", "validation")
        views = {"training": self.view()}
        return {split: Ade20k(root, split, len(self.class_names), views.get(split)) for split in splits}


@dataclass(frozen=True)
class Decoder:
    """UperNet's decoder.

    Attributes:
        hidden: channels.
        balance: exponent b in [0, 1]; the loss weights a class by (share of its pixels)^-b. 0 weights all alike.
    """

    hidden: int = 512
    balance: float = 0.0

    def __post_init__(self) -> None:
        check_number("balance", self.balance, 0, 1)
        check_int("hidden", self.hidden, 1)


@dataclass(frozen=True)
class SegmentationTask(ImageTask):
    """The recipe sections of segmentation."""

    sections: ClassVar[dict[str, Any]] = {
        "data": SegmentationConfig,
        "model": VisionModelConfig,
        "decoder": Decoder,
        "muon": Muon,
    }
    eval_draws_random: ClassVar[bool] = False
    analyses: ClassVar[tuple[str, ...]] = ("spectrum", "rank", "gradients", "memory", "convergence")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("miou", "mIoU", "%", True),
        Metric("pixel_accuracy", "pixel accuracy", "%", True),
    )
    picture_text: ClassVar[str] = "The class of every pixel: the ground truth beside the predictions."

    data: SegmentationConfig
    model: VisionModelConfig
    decoder: Decoder
    muon: Muon

    @property
    def title(self) -> str:
        return f"UperNet on MambaVision {self.model.size} ({self.model.backbone}), {self.data.source}"

    def load_data(self) -> DataSplits:
        splits, classes = self.data.open(), self.data.class_names
        counts = ", ".join(f"{len(data)} for {split}" for split, data in splits.items())
        summary = f"{self.data.source}: {len(classes)} classes; {counts}"
        shares = splits["training"].class_shares(COUNTED_IMAGES)
        metadata = {"classes": list(classes), "channels": 3, "summary": summary, "shares": shares}
        return DataSplits(splits["training"], splits["validation"], splits.get("test"), metadata)

    def build_model(self, metadata: dict[str, Any]) -> Segmenter:
        network = self.model.build(self.muon, 0, metadata["channels"])
        decoder = self.decoder
        return Segmenter(network, len(metadata["classes"]), decoder.hidden, metadata["shares"], decoder.balance)

    def collate(self, items: list[tuple[Tensor, Tensor]], training: bool) -> dict[str, Tensor]:
        """Pad images of different sizes to the largest; padding has no label."""
        height, width = (max(labels.shape[axis] for _, labels in items) for axis in (0, 1))
        images, labels = zip(*(pad(image, label, height, width) for image, label in items), strict=True)
        return {"images": normalize(torch.stack(images)), "labels": torch.stack(labels)}

    def scorer(self, split: Dataset) -> SegmentationScorer:
        return SegmentationScorer(len(self.data.class_names))

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        return self.read_paper_table("ade20k") if self.data.source == "ade20k" else {}

    def labeled_image(self, split: Any, index: int) -> tuple[Tensor, Tensor]:
        image, labels = split[index]
        return (255 * image).round().byte(), labels

    def draw_predictions(self, item: LabeledImage, runs: Sequence[TrainedRun]) -> list[Panel]:
        """Paint the true and the predicted class of each pixel, with a legend."""
        painted = [] if item.target is None else [("truth", item.target)]
        for run in runs:
            predicted = _predict(run.model, item.image)
            title = run.name
            if item.target is not None:
                correct = (predicted == item.target)[item.target != IGNORED].float().mean()
                title = f"{run.name}: {100 * correct:.0f}% of pixels correct"
            painted.append((title, predicted))
        panels = [Panel(title, paint_labels(to_rgb(item.image), labels)) for title, labels in painted]
        legend = draw_legend(torch.stack([labels for _, labels in painted]), runs[0].metadata["classes"])
        return [*panels, legend]


def normalize(images: Tensor) -> Tensor:
    """Normalize images `[..., 3, H, W]` in [0, 1] by ImageNet's mean and deviation."""
    mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET_STATISTICS)
    return (images - mean) / std


@torch.no_grad()
def _predict(model: Any, image: Tensor) -> Tensor:
    """The predicted class of each pixel, `[H, W]`, of an image uint8 `[3, H, W]`."""
    logits = model(normalize(image.float() / 255)[None])["logits"]
    return F.interpolate(logits, image.shape[-2:], mode="bilinear", align_corners=False).argmax(1)[0]


class SegmentationScorer(Scorer):
    """Count predicted pixels by true class."""

    def __init__(self, classes: int) -> None:
        self.pixels = PixelCounts(classes, IGNORED)

    def add(self, batch: dict[str, Any], outputs: dict[str, Any]) -> None:
        labels, logits = batch["labels"], outputs["logits"]
        if logits.shape[-2:] != labels.shape[-2:]:
            logits = F.interpolate(logits, labels.shape[-2:], mode="bilinear", align_corners=False)
        self.pixels.add(logits.argmax(1).cpu(), labels.cpu())

    def collected(self) -> Tensor:
        return self.pixels.counts

    def replace(self, shares: Sequence[Tensor]) -> None:
        self.pixels.counts = torch.stack(list(shares)).sum(0)

    def result(self) -> dict[str, Any]:
        """Mean IoU, pixel accuracy, and the IoU of each class."""
        return self.pixels.score()
