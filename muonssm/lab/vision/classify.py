"""Image classification as a task; accuracy in percent."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from muonssm.lab.core.scorer import PredictionScorer
from muonssm.lab.core.task import DataSplits, Metric, PaperScores
from muonssm.models.vision.classification import VisionClassifier
from muonssm.ops import Muon

from .augment import ImageAugmentation, ImageView, ViewedImages
from .grad_cam import grad_cam
from .image_task import ImageTask, LabeledImage, TrainedRun, VisionModelConfig
from .imagenet import is_imagenet
from .images import ImageConfig, ImageData, load_images
from .pictures import Panel, overlay_heat, to_rgb

if TYPE_CHECKING:
    from muonssm.lab.core.experiment import Experiment

MAX_CONFUSION_CLASSES = 50  # no confusion matrix for more classes


@dataclass(frozen=True)
class VisionTask(ImageTask):
    """The recipe sections of image classification."""

    sections: ClassVar[dict[str, Any]] = {
        "data": ImageConfig,
        "model": VisionModelConfig,
        "muon": Muon,
        "augment": ImageAugmentation,
    }
    analyses: ClassVar[tuple[str, ...]] = ("spectrum", "rank", "gradients", "memory", "truncation", "convergence")
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("accuracy", "accuracy", "%", True),
        Metric("top5", "top-5 accuracy", "%", True),
    )
    picture_text: ClassVar[str] = (
        "Grad-CAM: which pixels support the predicted class, from blue (little) to red (much)."
    )

    data: ImageConfig
    model: VisionModelConfig
    muon: Muon
    augment: ImageAugmentation

    @property
    def title(self) -> str:
        return f"MambaVision {self.model.size} ({self.model.backbone}) on {self.data.source}"

    @property
    def classes(self) -> int:
        """The number of classes of the data."""
        return len(_load(self.data).classes)

    def load_data(self) -> DataSplits:
        data = _load(self.data)
        metadata = data.metadata()
        train = ViewedImages(data.train, ImageView(self.augment, metadata, training=True))
        view = ImageView(self.augment, metadata, training=False)
        test = None if data.test is None else ViewedImages(data.test, view)
        return DataSplits(train, ViewedImages(data.validation, view), test, metadata)

    def build_model(self, metadata: dict[str, Any]) -> VisionClassifier:
        return VisionClassifier(self.model.build(self.muon, len(metadata["classes"]), metadata["channels"]))

    def collate(self, items: list[tuple[Tensor, int]], training: bool) -> dict[str, Tensor]:
        images, labels = torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])
        if not training:
            return {"images": images, "labels": labels}
        images = self.augment.transform(images)
        mixup = _mixup(self.augment, self.classes)
        if mixup is not None and len(items) % 2 == 0:  # timm mixes pairs; an odd last batch stays unmixed
            images, labels = mixup(images, labels)
        return {"images": images, "labels": labels}

    def scorer(self, split: Dataset) -> PredictionScorer:
        return PredictionScorer(score_logits)

    def paper_scores(self, metadata: Mapping[str, Any]) -> PaperScores:
        """The paper's scores on ImageNet-1k, with those on `imagenet-r`, `imagenet-a` and ImageNet-C (`mce`)."""
        return self.read_paper_table("imagenet") if is_imagenet(metadata["classes"]) else {}

    def report_sections(self, experiment: Experiment) -> list[Any]:
        """The robustness scores and the Grad-CAM pictures."""
        from .report_sections import robustness_sections

        return [*robustness_sections(experiment), *super().report_sections(experiment)]

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        """The commands for robustness scores and pictures, if they were not run."""
        from .report_sections import missing_robustness

        return [*missing_robustness(experiment), *super().missing_evaluations(experiment)]

    def labeled_image(self, split: Any, index: int) -> tuple[Tensor, int]:
        return split.images[index]

    def draw_predictions(self, item: LabeledImage, runs: Sequence[TrainedRun]) -> list[Panel]:
        """Draw the Grad-CAM of the predicted class."""
        panels = []
        for run in runs:
            classes = run.metadata["classes"]
            x = ImageView(self.augment, run.metadata, training=False)(item.image)[None]
            heat, logits = grad_cam(run.model, x)
            best = int(logits.argmax())
            probability = float(logits.softmax(-1)[best])
            truth = "" if item.target is None else f" (is {classes[item.target]})"
            title = f"{run.name}: {classes[best]} {100 * probability:.0f}%{truth}"
            panels.append(Panel(title, overlay_heat(to_rgb(item.image), heat)))
        return panels


def score_logits(logits: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Accuracies, the loss, and for a few classes the confusion matrix (a row per true class)."""
    predicted, true = torch.as_tensor(logits).float(), torch.as_tensor(labels)
    classes = predicted.shape[1]
    correct = predicted.topk(min(5, classes), dim=1).indices == true[:, None]
    result: dict[str, Any] = {
        "accuracy": 100 * correct[:, 0].double().mean().item(),
        "top5": 100 * correct.any(1).double().mean().item(),
        "loss": F.cross_entropy(predicted, true).item(),
    }
    if classes <= MAX_CONFUSION_CLASSES:
        counts = torch.bincount(true * classes + predicted.argmax(1), minlength=classes**2)
        result["confusion"] = counts.reshape(classes, classes).tolist()
    return result


@functools.lru_cache(maxsize=1)
def _load(config: ImageConfig) -> ImageData:
    return load_images(config)


@functools.lru_cache(maxsize=4)
def _mixup(augment: ImageAugmentation, classes: int) -> Any:
    return augment.create_mixup(classes)
