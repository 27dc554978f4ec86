"""Grad-CAM of a classifier, by the library `grad-cam`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MIN_SIDE = 4  # of the feature map: smaller maps show nothing


def grad_cam(model: nn.Module, x: Tensor) -> tuple[np.ndarray, Tensor]:
    """Heat in [0, 1] of the most likely class over the input's pixels, `[H, W]`, and the logits `[classes]`.

    Uses the last stage whose feature map has at least `MIN_SIDE` positions on each side.

    Args:
        model: a `VisionClassifier`.
        x: one normalized image, `[1, C, H, W]`.
    """
    from pytorch_grad_cam import GradCAM

    network: Any = model.network
    with torch.no_grad():
        logits, maps = network(x)[0], network.forward_features(x)
    large_enough = [stage for stage, h in enumerate(maps) if min(h.shape[-2:]) >= MIN_SIDE] or [0]
    with GradCAM(model=network, target_layers=[network.levels[large_enough[-1]]]) as cam:
        heat = cam(input_tensor=x, targets=None)[0]
    return heat, logits
