"""Object detection and instance segmentation as a task; average precision of boxes and masks in percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.checks import check_choice
from muonssm.lab.core.scorer import Scorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores
from muonssm.models.vision.detection import Heads, MaskDetector
from muonssm.ops import Muon

from .canvases import canvas_config, canvases
from .coco import LONGEST, SHORT, CocoImages, CocoView
from .detection_metrics import coco_results, score_detections
from .image_task import ImageTask, LabeledImage, TrainedRun, VisionModelConfig
from .pictures import Panel, draw_objects, to_rgb

METRIC_TITLES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
MIN_DRAWN_SCORE = 0.5


@dataclass(frozen=True)
class DetectionConfig:
    """Images with boxes and masks.

    Attributes:
        source: `"canvases"` (embedded: digits composed on canvases, not photographs) or `"coco"`.
        root: for `"coco"`, the folder with `annotations/instances_train2017.json`, `train2017/`, and those of val2017.
        validation: with `"coco"`, the split that is scored: `"val2017"`, or `"train2017"`, the training images
            themselves, to check that a detector overfits a few of them.
        short: lengths of the shorter side after resizing, one of which is drawn in training.
        longest: largest length of the longer side after resizing.
        flip: probability of a horizontal flip in training.
        canvases: settings of the canvases; see `CanvasConfig`.
    """

    source: str = "canvases"
    root: str | None = None
    validation: str = "val2017"
    short: tuple[int, ...] = SHORT
    longest: int = LONGEST
    flip: float = 0.5
    canvases: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("canvases", "coco"))
        if (self.root is None) != (self.source == "canvases"):
            wanted = "None" if self.source == "canvases" else "the folder of the data"
            raise ValueError(f"root must be {wanted} with source {self.source!r}, got {self.root!r}")
        check_choice("validation", self.validation, ("val2017", "train2017"))
        if self.validation != "val2017" and self.source != "coco":
            raise ValueError(f"validation must be 'val2017' with source {self.source!r}, got {self.validation!r}")
        view = CocoView(self.short, self.longest, self.flip)
        object.__setattr__(self, "short", view.short)
        if self.canvases and self.source != "canvases":
            raise ValueError(f"canvases must be empty with source {self.source!r}, got {self.canvases!r}")
        canvas_config(self.canvases)

    def open(self) -> dict[str, CocoImages]:
        """Open the splits. COCO's test split has no labels, so its validation split is the test set."""
        if self.source == "canvases":
            folder = canvases(canvas_config(self.canvases))
            names = {"train": "training", "validation": "validation", "test": "test"}
            files = {split: (folder / f"instances_{n}.json", folder / "images" / n) for split, n in names.items()}
        else:
            folder = Path(str(self.root))
            names = {"train": "train2017", "validation": self.validation}
            files = {split: (folder / "annotations" / f"instances_{n}.json", folder / n) for split, n in names.items()}
        views = {"train": CocoView(None, self.longest, self.flip)}  # the model itself resizes
        return {
            split: CocoImages(*paths, views.get(split), drop_empty=split == "train") for split, paths in files.items()
        }


@dataclass(frozen=True)
class DetectionTask(ImageTask):
    """The recipe sections of detection."""

    sections: ClassVar[dict[str, Any]] = {
        "data": DetectionConfig,
        "model": VisionModelConfig,
        "heads": Heads,
        "muon": Muon,
    }
    eval_draws_random: ClassVar[bool] = False
    analyses: ClassVar[tuple[str, ...]] = ("spectrum", "rank", "memory", "convergence")
    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        Metric(f"{shape}_{stat}", f"{title} ({shape})", "%", True)
        for shape in ("box", "mask")
        for stat, title in METRIC_TITLES.items()
    )
    picture_text: ClassVar[str] = "Boxes and masks: the ground truth beside the detections."

    data: DetectionConfig
    model: VisionModelConfig
    heads: Heads
    muon: Muon

    @property
    def title(self) -> str:
        return f"Mask R-CNN on MambaVision {self.model.size} ({self.model.backbone}), {self.data.source}"

    def load_data(self) -> DataSplits:
        splits = self.data.open()
        train = splits["train"]
        counts = ", ".join(f"{len(data)} for {split}" for split, data in splits.items())
        left_out = f"left out {train.crowds} crowds and {train.empty_boxes} boxes without area"
        if self.data.validation == "train2017":
            left_out += "; validated on the training images themselves"
        metadata = {
            "classes": list(train.classes),
            "category_ids": list(train.category_ids),
            "channels": 3,
            "summary": f"{self.data.source}: {len(train.classes)} classes; {counts}; {left_out}",
        }
        return DataSplits(train, splits["validation"], splits.get("test"), metadata)

    def build_model(self, metadata: dict[str, Any]) -> MaskDetector:
        network = self.model.build(self.muon, 0, metadata["channels"])
        return MaskDetector(network, len(metadata["classes"]), self.data.short, self.data.longest, self.heads)

    def collate(self, items: list[tuple[Tensor, dict[str, Tensor]]], training: bool) -> dict[str, Any]:
        images, targets = (list(values) for values in zip(*items, strict=True))
        return {"images": images, "targets": targets}

    def scorer(self, split: Dataset) -> DetectionScorer:
        assert isinstance(split, CocoImages)
        return DetectionScorer(split)

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        return self.read_paper_table("coco") if self.data.source == "coco" else {}

    def labeled_image(self, split: Any, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        image, target = split[index]
        return (255 * image).round().byte(), target

    def draw_predictions(self, item: LabeledImage, runs: Sequence[TrainedRun]) -> list[Panel]:
        """Draw the true boxes and masks, then the detections of each run with a score of 0.5 or more."""
        pixels, target, panels = to_rgb(item.image), item.target, []
        if target is not None:
            objects = (target["masks"], target["boxes"], target["labels"])
            panels.append(Panel("truth", draw_objects(pixels, *objects, runs[0].metadata["classes"])))
        for run in runs:
            with torch.no_grad():
                detections = run.model([item.image.float() / 255])["detections"][0]
            sure = detections["scores"] >= MIN_DRAWN_SCORE
            objects = (detections["masks"][sure, 0] >= 0.5, detections["boxes"][sure], detections["labels"][sure])
            drawn = draw_objects(pixels, *objects, run.metadata["classes"])
            panels.append(Panel(f"{run.name}: {int(sure.sum())} detections", drawn))
        return panels


class DetectionScorer(Scorer):
    """Collect detections, and score them with pycocotools."""

    def __init__(self, split: CocoImages) -> None:
        self.split = split
        self.detections: list[dict[str, Any]] = []
        self.image_ids: list[int] = []

    def add(self, batch: dict[str, Any], outputs: dict[str, Any]) -> None:
        for target, output in zip(batch["targets"], outputs["detections"], strict=True):
            image_id = int(target["image_id"])
            self.image_ids.append(image_id)
            self.detections += coco_results(output, image_id, self.split.category_ids)

    def collected(self) -> tuple[list[dict[str, Any]], list[int]]:
        return self.detections, self.image_ids

    def replace(self, shares: Sequence[tuple[list[dict[str, Any]], list[int]]]) -> None:
        self.detections = [detection for detections, _ in shares for detection in detections]
        self.image_ids = [image_id for _, image_ids in shares for image_id in image_ids]

    def result(self) -> dict[str, Any]:
        """AP, AP50 and AP75 of boxes and masks."""
        return dict(score_detections(self.split.annotations, self.detections, self.image_ids))
