"""Image classification as a task: images in, a class out; accuracy in percent."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.lab.core.scorer import PredictionScorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores, Task
from muonssm.models.vision import vision_config
from muonssm.models.vision.classification import VisionClassifier
from muonssm.models.vision.config import VisionConfig
from muonssm.ops import Muon

from .augment import ImageAugmentation, ImageView, ImageViews, view_of
from .images import ImageConfig, ImageData, load_images
from .paper import published_vision

if TYPE_CHECKING:
    from muonssm.lab.core.experiment import Experiment

MATRIX = 50  # classes up to which a confusion matrix is kept
PICTURES = "The regions that led to the predicted class: Grad-CAM, from blue (little) to red (much)."


@dataclass(frozen=True)
class VisionModelConfig:
    """The network.

    Attributes:
        size: `"tiny"` as published, or `"micro"` for small images and CPUs.
        backbone: a name in `muonssm.layers.BACKBONES`.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
        drop_path: share of residual branches left out in training; None is the size's own.
    """

    size: str = "micro"
    backbone: str = "mamba"
    momentum: str = "fixed"
    drop_path: float | None = None

    def __post_init__(self) -> None:
        self.build(Muon(), 10, 3)

    def build(self, muon: Muon, classes: int, channels: int) -> VisionConfig:
        """The configuration of the network."""
        return vision_config(self.size, self.backbone, muon, classes, channels, self.drop_path, self.momentum)


@dataclass(frozen=True)
class VisionTask(Task):
    """The sections of a recipe of image classification."""

    sections: ClassVar[dict[str, Any]] = {
        "data": ImageConfig,
        "model": VisionModelConfig,
        "muon": Muon,
        "augment": ImageAugmentation,
    }
    analyses: ClassVar[tuple[str, ...]] = ("spectrum", "rank", "gradients", "memory", "truncation", "convergence")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "accuracy", "%", True),
        Metric("top5", "among the first five", "%", True),
    )

    data: ImageConfig
    model: VisionModelConfig
    muon: Muon
    augment: ImageAugmentation

    @property
    def title(self) -> str:
        return f"MambaVision {self.model.size} ({self.model.backbone}) on {self.data.source}"

    def load_data(self) -> DataSplits:
        data = _load(self.data)
        metadata = data.metadata()
        train = ImageViews(data.train, ImageView(self.augment, metadata, training=True))
        view = view_of(self.augment, metadata)
        test = None if data.test is None else ImageViews(data.test, view)
        return DataSplits(train, ImageViews(data.validation, view), test, metadata)

    def build_model(self, metadata: dict[str, Any]) -> VisionClassifier:
        return VisionClassifier(self.model.build(self.muon, len(metadata["classes"]), metadata["channels"]))

    def collate(self, items: list[tuple[Tensor, int]], training: bool) -> dict[str, Tensor]:
        images, labels = torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])
        if not training:
            return {"images": images, "labels": labels}
        images = self.augment.bend(images)
        mixing = _mixing(self.augment, self.classes)
        if mixing is not None and len(items) % 2 == 0:  # timm pairs images up; the odd end of an epoch stays as it is
            images, labels = mixing(images, labels)
        return {"images": images, "labels": labels}

    @property
    def classes(self) -> int:
        """How many the data has."""
        return len(_load(self.data).classes)

    def scorer(self, split: Dataset) -> PredictionScorer:
        return PredictionScorer(score_logits)

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        """Return the paper's scores for this data and model."""
        source, model = self.data.source, self.model
        return published_vision("vision", source, model.size, model.backbone, metadata["classes"])

    def report_sections(self, experiment: Experiment) -> list[Any]:
        """Return the robustness scores and the Grad-CAM pictures."""
        from .report_sections import picture_sections, robustness_sections

        return [*robustness_sections(experiment), *picture_sections(experiment, PICTURES)]

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        """Return the commands of evaluations that were not run."""
        from .report_sections import missing_pictures, missing_robustness

        return missing_robustness(experiment) + missing_pictures(experiment)


def score_logits(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Shares of right classes, the loss, and the confusion matrix of a few classes (rows: true class)."""
    found, true = torch.as_tensor(logits).float(), torch.as_tensor(labels)
    best = found.topk(min(5, found.shape[1]), dim=1).indices == true[:, None]
    scores: dict[str, Any] = {
        "accuracy": 100 * best[:, 0].double().mean().item(),
        "top5": 100 * best.any(1).double().mean().item(),
        "loss": F.cross_entropy(found, true).item(),
    }
    classes = found.shape[1]
    if classes <= MATRIX:
        counts = torch.bincount(true * classes + found.argmax(1), minlength=classes**2)
        scores["confusion"] = counts.reshape(classes, classes).tolist()
    return scores


@functools.lru_cache(maxsize=1)
def _load(config: ImageConfig) -> ImageData:
    return load_images(config)


@functools.lru_cache(maxsize=4)
def _mixing(augment: ImageAugmentation, classes: int) -> Any:
    return augment.mixing(classes)
