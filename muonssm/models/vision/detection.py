"""torchvision's Mask R-CNN on the stages of a MambaVision network, through a feature pyramid.

images      list of float `[3, H, W]` in [0, 1], of any sizes
targets     list of dicts as in `muonssm.lab.vision.coco`
found       list of dicts: boxes `[n, 4]`, labels `[n]`, scores `[n]`, masks `[n, 1, H, W]`
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from muonssm.checks import is_int
from muonssm.lab.core.torchvision_cpu import prepare_torchvision

from .config import VisionConfig
from .features import VisionFeatures


@dataclass(frozen=True)
class Heads:
    """Sizes behind the network; the defaults are torchvision's, and the paper's.

    Attributes:
        pyramid: channels of the feature pyramid.
        hidden: width of the box head.
        mask_layers: convolutions of the mask head, each as wide as the pyramid.
        proposals: regions kept for each image, of each level before and of all after suppression.
        samples: regions that the heads learn from, for each image.
        detections: objects found on an image, at most.
        anchor: side of the smallest anchor, in strides of the first stage.
    """

    pyramid: int = 256
    hidden: int = 1024
    mask_layers: int = 4
    proposals: int = 2000
    samples: int = 512
    detections: int = 100
    anchor: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_int(value, 1):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= 1")


DEFAULT = Heads()


class Pyramid(nn.Module):
    """Images to maps by name, as torchvision's detectors take them: the stages, and one more of half the size."""

    def __init__(self, config: VisionConfig, channels: int) -> None:
        super().__init__()
        from torchvision.ops import FeaturePyramidNetwork
        from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

        self.features = VisionFeatures(config)
        self.fpn = FeaturePyramidNetwork(list(self.features.channels), channels, LastLevelMaxPool())
        self.out_channels = channels

    def forward(self, x: Tensor) -> OrderedDict[str, Tensor]:
        return self.fpn(OrderedDict((str(i), map_) for i, map_ in enumerate(self.features(x))))


class MaskDetector(nn.Module):
    """Mask R-CNN with its loss, as trainers call it.

    Args:
        config: of the network.
        classes: how many, without the background.
        short, longest: sides that images are brought to; in training one of several short ones is drawn.
        heads: what stands behind the network.
    """

    def __init__(
        self, config: VisionConfig, classes: int, short: tuple[int, ...], longest: int, heads: Heads = DEFAULT
    ) -> None:
        super().__init__()
        prepare_torchvision()
        from torchvision.models.detection import MaskRCNN

        self.detector = MaskRCNN(
            Pyramid(config, heads.pyramid),
            min_size=short,
            max_size=longest,
            rpn_anchor_generator=_anchors(config, heads),
            rpn_pre_nms_top_n_train=heads.proposals,
            rpn_pre_nms_top_n_test=max(1, heads.proposals // 2),
            rpn_post_nms_top_n_train=heads.proposals,
            rpn_post_nms_top_n_test=max(1, heads.proposals // 2),
            box_batch_size_per_image=heads.samples,
            box_detections_per_img=heads.detections,
            **_own_heads(heads, classes),
        )

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> dict[str, Any]:
        """The sum of the losses in training, and each of them; otherwise what was found."""
        if not self.training:
            return {"found": self.detector(images)}
        losses = self.detector(images, targets)
        return {"loss": sum(losses.values()), **losses}


def _anchors(config: VisionConfig, heads: Heads) -> Any:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    sides = [heads.anchor * stride for stride in (*config.strides, 2 * config.strides[-1])]
    return AnchorGenerator(tuple((side,) for side in sides), ((0.5, 1.0, 2.0),) * len(sides))


def _own_heads(heads: Heads, classes: int) -> dict[str, Any]:
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    width = heads.pyramid
    return {
        "box_head": TwoMLPHead(width * 7**2, heads.hidden),
        "box_predictor": FastRCNNPredictor(heads.hidden, classes + 1),
        "mask_head": MaskRCNNHeads(width, (width,) * heads.mask_layers, 1),
        "mask_predictor": MaskRCNNPredictor(width, width, classes + 1),
    }
