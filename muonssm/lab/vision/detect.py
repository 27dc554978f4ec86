"""Detection and instance segmentation as a task: boxes and masks; average precision in percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.utils.data import Dataset

from muonssm.lab.core.scorer import Scorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores, Task
from muonssm.models.vision.detection import Heads, MaskDetector
from muonssm.ops import Muon

from .canvases import CanvasConfig, canvases
from .classify import VisionModelConfig
from .coco import LONGEST, SHORT, CocoImages, CocoView
from .detection_metrics import coco_results, score_detections
from .paper import published_vision

if TYPE_CHECKING:
    from muonssm.lab.core.experiment import Experiment

NAMES = {"ap": "AP", "ap50": "AP50", "ap75": "AP75"}
PICTURES = "Boxes and masks: ground truth beside predictions."


@dataclass(frozen=True)
class DetectionConfig:
    """Which images with boxes and masks.

    Attributes:
        source: `"canvases"` (embedded: digits composed on canvases, no photographs) or `"coco"`.
        root: for `"coco"`, the folder with `annotations/instances_train2017.json`, `train2017/`, and of val2017.
        short: sides that the shorter side of an image is brought to, one of which is drawn in training.
        longest: what the longer side may then be.
        flip: chance to be mirrored in training.
        canvases: settings of the canvases; see `CanvasConfig`.
    """

    source: str = "canvases"
    root: str | None = None
    short: tuple[int, ...] = SHORT
    longest: int = LONGEST
    flip: float = 0.5
    canvases: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.source not in ("canvases", "coco"):
            raise ValueError(f"source is {self.source!r}; it may be 'canvases' or 'coco'")
        if (self.root is None) != (self.source == "canvases"):
            may = "None: the data is embedded" if self.source == "canvases" else "the folder of the data"
            raise ValueError(f"root is {self.root!r} with source {self.source!r}; it may be {may}")
        view = CocoView(self.short, self.longest, self.flip)
        object.__setattr__(self, "short", view.short)
        if self.canvases and self.source != "canvases":
            raise ValueError(f"canvases is {self.canvases!r} with source {self.source!r}; it may be empty")
        canvas_config(self.canvases)

    def open(self) -> dict[str, CocoImages]:
        """The parts; COCO's own test part has no labels, so that its validation part is the test."""
        shown = {"train": CocoView(None, self.longest, self.flip)}
        if self.source == "canvases":
            folder = canvases(canvas_config(self.canvases))
            names = {"train": "training", "validation": "validation", "test": "test"}
            places = {p: (folder / f"instances_{n}.json", folder / "images" / n) for p, n in names.items()}
        else:
            folder = Path(str(self.root))
            years = {"train": "train2017", "validation": "val2017"}
            places = {p: (folder / "annotations" / f"instances_{y}.json", folder / y) for p, y in years.items()}
        return {p: CocoImages(*place, shown.get(p), drop_empty=p == "train") for p, place in places.items()}


def canvas_config(settings: dict[str, Any]) -> CanvasConfig:
    """Canvases by the settings of a recipe."""
    try:
        return CanvasConfig(**settings)
    except TypeError as error:
        raise ValueError(f"canvases is {settings!r}; it may have the settings of CanvasConfig ({error})") from error


@dataclass(frozen=True)
class DetectionTask(Task):
    """The sections of a recipe of detection."""

    sections: ClassVar[dict[str, Any]] = {
        "data": DetectionConfig,
        "model": VisionModelConfig,
        "heads": Heads,
        "muon": Muon,
    }
    analyses: ClassVar[tuple[str, ...]] = ("spectrum", "rank", "memory", "convergence")
    metrics: ClassVar[tuple[Metric, ...]] = tuple(
        Metric(f"{kind}_{stat}", f"{name} ({kind})", "%", True)
        for kind in ("box", "mask")
        for stat, name in NAMES.items()
    )

    data: DetectionConfig
    model: VisionModelConfig
    heads: Heads
    muon: Muon

    @property
    def title(self) -> str:
        return f"Mask R-CNN on MambaVision {self.model.size} ({self.model.backbone}), {self.data.source}"

    def load_data(self) -> DataSplits:
        parts = self.data.open()
        train = parts["train"]
        counts = ", ".join(f"{len(data)} for {part}" for part, data in parts.items())
        left_out = f"left out {train.crowds} crowds and {train.degenerate} boxes without area"
        metadata = {
            "classes": list(train.classes),
            "category_ids": list(train.category_ids),
            "channels": 3,
            "summary": f"{self.data.source}: {len(train.classes)} classes; {counts}; {left_out}",
        }
        return DataSplits(train, parts["validation"], parts.get("test"), metadata)

    def build_model(self, metadata: dict[str, Any]) -> MaskDetector:
        network = self.model.build(self.muon, 0, metadata["channels"])
        return MaskDetector(network, len(metadata["classes"]), self.data.short, self.data.longest, self.heads)

    def collate(self, items: list[tuple[Tensor, dict[str, Tensor]]], training: bool) -> dict[str, Any]:
        images, targets = (list(parts) for parts in zip(*items, strict=True))
        return {"images": images, "targets": targets}

    def scorer(self, part: Dataset) -> DetectionScorer:
        assert isinstance(part, CocoImages)
        return DetectionScorer(part)

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        """Return the paper's scores for this data and model."""
        source, model = self.data.source, self.model
        return published_vision("detection", source, model.size, model.backbone, metadata["classes"])

    def report_sections(self, experiment: Experiment) -> list[Any]:
        """Return the pictures of predicted boxes and masks."""
        from .report_sections import picture_sections

        return picture_sections(experiment, PICTURES)

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        """Return the commands of evaluations that were not run."""
        from .report_sections import missing_pictures

        return missing_pictures(experiment)


class DetectionScorer(Scorer):
    """Collects what was found, and has pycocotools score it."""

    def __init__(self, part: CocoImages) -> None:
        self.part = part
        self.found: list[dict[str, Any]] = []
        self.looked: list[int] = []

    def add(self, batch: dict[str, Any], outputs: dict[str, Any]) -> None:
        """What the model said of a batch."""
        for target, output in zip(batch["targets"], outputs["detections"], strict=True):
            image = int(target["image_id"])
            self.looked.append(image)
            self.found += coco_results(output, image, self.part.category_ids)

    def collected(self) -> tuple[list[dict[str, Any]], list[int]]:
        return self.found, self.looked

    def replace(self, shares: Sequence[tuple[list[dict[str, Any]], list[int]]]) -> None:
        self.found = [detection for found, _ in shares for detection in found]
        self.looked = [image for _, looked in shares for image in looked]

    def result(self) -> dict[str, Any]:
        """AP, AP50 and AP75 of boxes and masks."""
        return dict(score_detections(self.part.annotations, self.found, self.looked))
