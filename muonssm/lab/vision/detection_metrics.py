"""Average precision of boxes and masks, by pycocotools.

    found = coco_results(model([image])[0], image_id, data.category_ids)
    score_detections(data.annotations, found)           # box_ap, box_ap50, box_ap75, mask_ap, ..., in per cent

AP is the mean over the ten thresholds of IoU from 0.50 to 0.95, AP50 and AP75 are at one: COCOeval's stats 0, 1, 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .coco import index, quiet

KINDS = {"box": "bbox", "mask": "segm"}
STATS = ("ap", "ap50", "ap75")


def coco_results(
    output: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int], size: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """What Mask R-CNN says of one image, in COCO's format.

    Args:
        output: boxes `[n, 4]`, labels `[n]` from 1 on, scores `[n]`, masks `[n, 1, H, W]` in [0, 1].
        image_id: the image's id in the annotations.
        category_ids: id of label l at `l - 1`, as `CocoImages.category_ids`.
        size: height and width of the image in the annotations, where the model saw it in another size.
    """
    from pycocotools import mask as coding

    boxes, masks = output["boxes"].detach().cpu().float(), output["masks"].detach().cpu().float()
    if size is not None and tuple(masks.shape[-2:]) != tuple(size):
        down, across = size[0] / masks.shape[-2], size[1] / masks.shape[-1]
        boxes = boxes * torch.tensor([across, down, across, down])
        masks = F.interpolate(masks, size, mode="bilinear", align_corners=False) if len(masks) else masks
    left, top, right, bottom = boxes.unbind(1)
    corners = torch.stack([left, top, right - left, bottom - top], dim=1).tolist()
    found = []
    for number, (label, score) in enumerate(zip(output["labels"].tolist(), output["scores"].tolist(), strict=True)):
        encoded = coding.encode(np.asfortranarray((masks[number, 0] >= 0.5).numpy().astype(np.uint8)))
        encoded["counts"] = encoded["counts"].decode("ascii")
        found.append({
            "image_id": int(image_id), "category_id": int(category_ids[label - 1]), "score": score,
            "bbox": corners[number], "segmentation": encoded,
        })  # fmt: skip
    return found


def score_detections(
    annotations: dict[str, Any], found: Sequence[dict[str, Any]], image_ids: Sequence[int] | None = None
) -> dict[str, float]:
    """AP, AP50 and AP75 of boxes and masks, in per cent.

    Args:
        annotations: the content of an annotation file.
        found: detections of all images, from `coco_results`.
        image_ids: the images that were looked at; None: all of the annotations.
    """
    truth = _true(annotations)
    looked = sorted(truth.imgs) if image_ids is None else sorted(set(image_ids))
    strange = {item["image_id"] for item in found} - set(looked)
    if strange or set(looked) - set(truth.imgs):
        number = min(strange or set(looked) - set(truth.imgs))
        raise ValueError(f"found or image_ids has image {number}; it may be one of the annotations and of image_ids")
    if not any(not truth.anns[ann].get("iscrowd", 0) for ann in truth.getAnnIds(imgIds=looked)):
        raise ValueError("annotations has no objects on these images; there may be one or more")
    scores: dict[str, float] = {}
    for kind, name in KINDS.items():
        values = 100 * _stats(truth, _detected(annotations, found, name), looked, name)
        scores |= {f"{kind}_{stat}": float(value) for stat, value in zip(STATS, values, strict=True)}
    return scores


def _true(annotations: dict[str, Any]) -> Any:
    """pycocotools' object for annotations, which are copied: it writes into them. What it needs is filled in."""
    items = [{"iscrowd": 0, "area": item["bbox"][2] * item["bbox"][3], **item} for item in annotations["annotations"]]
    return index({"images": annotations["images"], "categories": annotations["categories"], "annotations": items})


def _detected(annotations: dict[str, Any], found: Sequence[dict[str, Any]], name: str) -> Any:
    """pycocotools' object for detections; its own way to make one does not take an empty list."""
    from pycocotools import mask as coding

    items = []
    for number, item in enumerate(found, start=1):
        area = item["bbox"][2] * item["bbox"][3] if name == "bbox" else float(coding.area(item["segmentation"]))
        items.append({**item, "id": number, "area": area, "iscrowd": 0})
    return index({"images": annotations["images"], "categories": annotations["categories"], "annotations": items})


def _stats(truth: Any, detected: Any, looked: list[int], name: str) -> np.ndarray:
    from pycocotools.cocoeval import COCOeval

    with quiet():
        evaluation = COCOeval(truth, detected, name)
        evaluation.params.imgIds = looked
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return np.asarray(evaluation.stats[:3])
