"""`ImageTask`: what the three vision tasks share: the model, the paper's table, pictures, report sections."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor, nn

from muonssm.lab.core.paper import read_table, scores_by_variant
from muonssm.lab.core.task import PaperScores, Task
from muonssm.models.vision import vision_config
from muonssm.models.vision.config import VisionConfig
from muonssm.ops import Muon

from .pictures import Panel

if TYPE_CHECKING:
    from muonssm.lab.core.experiment import Experiment

PAPER = Path(__file__).with_name("paper.toml")


@dataclass(frozen=True)
class VisionModelConfig:
    """The network.

    Attributes:
        size: `"tiny"` as published, `"mini"` for photographs of about 32 pixels, or `"micro"`; both are for CPUs.
        backbone: a name in `muonssm.layers.BACKBONES`.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`.
        drop_path: fraction of residual branches dropped in training; None uses the default of the size.
    """

    size: str = "micro"
    backbone: str = "mamba"
    momentum: str = "fixed"
    drop_path: float | None = None

    def __post_init__(self) -> None:
        self.build(Muon(), 10, 3)

    def build(self, muon: Muon, classes: int, channels: int) -> VisionConfig:
        """Build the configuration of the network."""
        return vision_config(self.size, self.backbone, muon, classes, channels, self.drop_path, self.momentum)


class LabeledImage(NamedTuple):
    """An image uint8 `[C, H, W]` to explain, its name, and its target where that is known."""

    name: str
    image: Tensor
    target: Any = None


class TrainedRun(NamedTuple):
    """A trained model to explain: the name above its predictions, its task, the metadata of its data, and the model."""

    name: str
    task: ImageTask
    metadata: dict[str, Any]
    model: nn.Module


class ImageTask(Task):
    """A task on images, with a section `model`.

    Attributes:
        picture_text: what the pictures of `muonssm explain` show, for the report.
    """

    picture_text: ClassVar[str]
    model: VisionModelConfig  # a field of the subclasses

    @abstractmethod
    def labeled_image(self, split: Any, index: int) -> tuple[Tensor, Any]:
        """One item of a split as uint8 `[C, H, W]`, and its target."""

    @abstractmethod
    def draw_predictions(self, item: LabeledImage, runs: Sequence[TrainedRun]) -> list[Panel]:
        """Draw what the runs predict for one image; the target, where it is known, comes first."""

    def read_paper_table(self, name: str) -> PaperScores:
        """The paper's scores of this model in a table of paper.toml; the paper has MambaVision-T alone."""
        if self.model.size != "tiny":
            return {}
        return scores_by_variant(read_table(PAPER)[name], backbone=self.model.backbone)

    def report_sections(self, experiment: Experiment) -> list[Any]:
        """The pictures of `muonssm explain`."""
        from .report_sections import picture_sections

        return picture_sections(experiment, self.picture_text)

    def missing_evaluations(self, experiment: Experiment) -> list[str]:
        """The command that draws the pictures, if it was not run."""
        from .report_sections import missing_pictures

        return missing_pictures(experiment)
