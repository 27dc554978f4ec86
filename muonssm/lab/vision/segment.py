"""Semantic segmentation as a task: a class for each pixel; mean intersection over union in percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import is_int, is_number
from muonssm.lab.core.scorer import Scorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores, Task
from muonssm.models.vision.segmentation import Segmenter
from muonssm.ops import Muon

from .ade20k import IGNORED, Ade20k, CropView, fill
from .canvases import canvases
from .classify import VisionModelConfig
from .detect import canvas_config
from .images import IMAGENET
from .paper import published_vision
from .segmentation_metrics import PixelCounts

if TYPE_CHECKING:
    from muonssm.lab.core.experiment import Experiment

COUNTED = 100  # training images, evenly apart, whose pixels are counted by class
PICTURES = "The class of every pixel: ground truth beside predictions."


@dataclass(frozen=True)
class SegmentationConfig:
    """Which images with labelled pixels.

    Attributes:
        source: `"canvases"` (embedded: digits composed on canvases, no photographs) or `"ade20k"`.
        root: for `"ade20k"`, the folder with `images/training`, `annotations/training` and the same of validation.
        classes: how many; of canvases it follows from their settings, and is None.
        size: side of the crops of training.
        scales: least and most of the factor that images are scaled by in training.
        flip: chance to be mirrored in training.
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
        if self.source not in ("canvases", "ade20k"):
            raise ValueError(f"source is {self.source!r}; it may be 'canvases' or 'ade20k'")
        embedded = self.source == "canvases"
        for name in ("root", "classes"):
            if (getattr(self, name) is None) != embedded:
                may = "None: the data is embedded" if embedded else "that of the data"
                raise ValueError(f"{name} is {getattr(self, name)!r} with source {self.source!r}; it may be {may}")
        object.__setattr__(self, "scales", self.view().scales)
        if self.canvases and not embedded:
            raise ValueError(f"canvases is {self.canvases!r} with source {self.source!r}; it may be empty")
        canvas_config(self.canvases)

    def view(self) -> CropView:
        """How images are shown in training."""
        return CropView(self.size, self.scales, self.flip)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes."""
        if self.source == "canvases":
            return canvas_config(self.canvases).classes
        return tuple(str(number) for number in range(self.classes or 0))

    def open(self) -> dict[str, Ade20k]:
        """The parts; ADE20K's own test part has no labels, so that its validation part is the test."""
        embedded = self.source == "canvases"
        root = canvases(canvas_config(self.canvases)) if embedded else Path(str(self.root))
        parts = ("training", "validation", "test") if embedded else ("training", "validation")
        return {p: Ade20k(root, p, len(self.names), self.view() if p == "training" else None) for p in parts}


@dataclass(frozen=True)
class Decoder:
    """UperNet's.

    Attributes:
        hidden: channels.
        balance: a class counts its share of the pixels to the power of minus this in the loss; 0 counts all alike.
    """

    hidden: int = 512
    balance: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.balance) or not 0 <= self.balance <= 1:
            raise ValueError(f"balance is {self.balance!r}; it may be in [0, 1]")
        if not is_int(self.hidden, 1):
            raise ValueError(f"hidden is {self.hidden!r}; it may be an integer >= 1")


@dataclass(frozen=True)
class SegmentationTask(Task):
    """The sections of a recipe of segmentation."""

    sections: ClassVar[dict[str, Any]] = {
        "data": SegmentationConfig,
        "model": VisionModelConfig,
        "decoder": Decoder,
        "muon": Muon,
    }
    analyses: ClassVar[tuple[str, ...]] = ("spectrum", "rank", "gradients", "memory", "convergence")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("miou", "mIoU", "%", True),
        Metric("pixel_accuracy", "pixels right", "%", True),
    )

    data: SegmentationConfig
    model: VisionModelConfig
    decoder: Decoder
    muon: Muon

    @property
    def title(self) -> str:
        return f"UperNet on MambaVision {self.model.size} ({self.model.backbone}), {self.data.source}"

    def load_data(self) -> DataSplits:
        parts = self.data.open()
        counts = ", ".join(f"{len(data)} for {part}" for part, data in parts.items())
        summary = f"{self.data.source}: {len(self.data.names)} classes; {counts}"
        shares = parts["training"].shares(COUNTED)
        metadata = {"classes": list(self.data.names), "channels": 3, "summary": summary, "shares": shares}
        return DataSplits(parts["training"], parts["validation"], parts.get("test"), metadata)

    def build_model(self, metadata: dict[str, Any]) -> Segmenter:
        network = self.model.build(self.muon, 0, metadata["channels"])
        decoder = self.decoder
        return Segmenter(network, len(metadata["classes"]), decoder.hidden, metadata["shares"], decoder.balance)

    def collate(self, items: list[tuple[Tensor, Tensor]], training: bool) -> dict[str, Tensor]:
        """Images of different sizes are filled up to the largest; what is added has no label."""
        side = [max(labels.shape[axis] for _, labels in items) for axis in (0, 1)]
        images, labels = zip(*(_filled(image, label, side) for image, label in items), strict=True)
        mean, std = (torch.tensor(values)[:, None, None] for values in IMAGENET)
        return {"images": (torch.stack(images) - mean) / std, "labels": torch.stack(labels)}

    def scorer(self, part: Dataset) -> SegmentationScorer:
        return SegmentationScorer(len(self.data.names))

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        """Return the paper's scores for this data and model."""
        source, model = self.data.source, self.model
        return published_vision("segmentation", source, model.size, model.backbone, metadata["classes"])

    def report_sections(self, experiment: Experiment) -> list[Any]:
        """Return the pictures of predicted pixel classes."""
        from .report_sections import picture_sections

        return picture_sections(experiment, PICTURES)

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        """Return the commands of evaluations that were not run."""
        from .report_sections import missing_pictures

        return missing_pictures(experiment)


def _filled(image: Tensor, labels: Tensor, side: list[int]) -> tuple[Tensor, Tensor]:
    if list(labels.shape) == side:
        return image, labels
    image, labels = fill(image, labels, max(side))
    return image[:, : side[0], : side[1]], labels[: side[0], : side[1]]


class SegmentationScorer(Scorer):
    """Counts pixels."""

    def __init__(self, classes: int) -> None:
        self.counts = PixelCounts(classes, IGNORED)

    def add(self, batch: dict[str, Any], outputs: dict[str, Any]) -> None:
        """What the model said of a batch."""
        labels, logits = batch["labels"], outputs["logits"]
        if logits.shape[-2:] != labels.shape[-2:]:
            logits = F.interpolate(logits, labels.shape[-2:], mode="bilinear", align_corners=False)
        self.counts.add(logits.argmax(1).cpu(), labels.cpu())

    def collected(self) -> Tensor:
        return self.counts.counts

    def replace(self, shares: Sequence[Tensor]) -> None:
        self.counts.counts = torch.stack(list(shares)).sum(0)

    def result(self) -> dict[str, Any]:
        """mIoU, the share of pixels that are right, and the IoU of each class."""
        return self.counts.score()
