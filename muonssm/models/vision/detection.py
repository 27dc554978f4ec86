"""`MaskDetector`: torchvision's Mask R-CNN on the stages of a MambaVision network, through a feature pyramid.

images      list of float tensors `[3, H, W]` in [0, 1], of any sizes
targets     list of dicts: boxes `[n, 4]` (x0, y0, x1, y1 in pixels), labels `[n]` from 1, masks `[n, H, W]`
detections  list of dicts: boxes `[n, 4]`, labels `[n]`, scores `[n]`, masks `[n, 1, H, W]`
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from muonssm.checks import check_int

from .config import VisionConfig
from .features import VisionFeatures


@dataclass(frozen=True)
class Heads:
    """Sizes of the detector's heads; the defaults are torchvision's and the paper's.

    Attributes:
        pyramid: channels of the feature pyramid.
        hidden: width of the box head.
        mask_layers: convolutions of the mask head, each as wide as the pyramid.
        proposals: regions kept per image, per level before and in all after non-maximum suppression.
        samples: regions per image that the heads are trained on.
        detections: maximum number of detections per image.
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
            check_int(name, value, 1)


DEFAULT_HEADS = Heads()


class Pyramid(nn.Module):
    """Compute maps by name, as torchvision's detectors expect them: the stages, and one more of half the size."""

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
        config: configuration of the network.
        classes: number of classes, without the background.
        short: lengths to which the shorter side of an image is resized; training draws one of them per image.
        longest: upper bound of the longer side.
        heads: sizes of the heads.
    """

    _no_split_modules: ClassVar[list[str]] = VisionFeatures._no_split_modules

    def __init__(
        self, config: VisionConfig, classes: int, short: tuple[int, ...], longest: int, heads: Heads = DEFAULT_HEADS
    ) -> None:
        super().__init__()
        from torchvision.models.detection import MaskRCNN

        self.detector = MaskRCNN(
            Pyramid(config, heads.pyramid),
            min_size=short,
            max_size=longest,
            rpn_anchor_generator=_make_anchors(config, heads),
            rpn_pre_nms_top_n_train=heads.proposals,
            rpn_pre_nms_top_n_test=max(1, heads.proposals // 2),
            rpn_post_nms_top_n_train=heads.proposals,
            rpn_post_nms_top_n_test=max(1, heads.proposals // 2),
            box_batch_size_per_image=heads.samples,
            box_detections_per_img=heads.detections,
            **_make_heads(heads, classes),
        )

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> dict[str, Any]:
        """In training return the sum of the losses as `loss`, and each of them; otherwise return `detections`."""
        if not self.training:
            return {"detections": self.detector(images)}
        losses = self.detector(images, targets)
        return {"loss": sum(losses.values()), **losses}


def _make_anchors(config: VisionConfig, heads: Heads) -> Any:
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    sides = [heads.anchor * stride for stride in (*config.strides, 2 * config.strides[-1])]
    return AnchorGenerator(tuple((side,) for side in sides), ((0.5, 1.0, 2.0),) * len(sides))


def _make_heads(heads: Heads, classes: int) -> dict[str, Any]:
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
    from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

    width = heads.pyramid
    return {
        "box_head": TwoMLPHead(width * 7**2, heads.hidden),
        "box_predictor": FastRCNNPredictor(heads.hidden, classes + 1),
        "mask_head": MaskRCNNHeads(width, (width,) * heads.mask_layers, 1),
        "mask_predictor": MaskRCNNPredictor(width, width, classes + 1),
    }
