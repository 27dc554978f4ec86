"""Average precision of boxes and masks, by pycocotools.

    detections = coco_results(model([image])[0], image_id, data.category_ids)
    score_detections(data.annotations, detections)           # box_ap, box_ap50, box_ap75, mask_ap, ..., in percent

AP is the mean over the ten IoU thresholds from 0.50 to 0.95; AP50 and AP75 use one threshold. These are the numbers 0,
1 and 2 of COCOeval's `stats`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .coco import hide_output, index_annotations

IOU_TYPES = {"box": "bbox", "mask": "segm"}  # COCOeval's names
STATS = ("ap", "ap50", "ap75")


def coco_results(
    output: Mapping[str, Tensor], image_id: int, category_ids: Sequence[int], size: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """Convert the output of Mask R-CNN for one image to COCO's format.

    Args:
        output: boxes `[n, 4]`, labels `[n]` from 1, scores `[n]`, masks `[n, 1, H, W]` in [0, 1].
        image_id: the image's id in the annotations.
        category_ids: ids of the categories, as `CocoImages.category_ids`.
        size: height and width of the image in the annotations, if the model saw it at another size.
    """
    from pycocotools import mask as rle

    boxes, masks = output["boxes"].detach().cpu().float(), output["masks"].detach().cpu().float()
    if size is not None and tuple(masks.shape[-2:]) != tuple(size):
        down, across = size[0] / masks.shape[-2], size[1] / masks.shape[-1]
        boxes = boxes * torch.tensor([across, down, across, down])
        masks = F.interpolate(masks, size, mode="bilinear", align_corners=False) if len(masks) else masks
    left, top, right, bottom = boxes.unbind(1)
    coco_boxes = torch.stack([left, top, right - left, bottom - top], dim=1).tolist()
    detections = []
    for number, (label, score) in enumerate(zip(output["labels"].tolist(), output["scores"].tolist(), strict=True)):
        encoded = rle.encode(np.asfortranarray((masks[number, 0] >= 0.5).numpy().astype(np.uint8)))
        encoded["counts"] = encoded["counts"].decode("ascii")
        detections.append({
            "image_id": int(image_id), "category_id": int(category_ids[label - 1]), "score": score,
            "bbox": coco_boxes[number], "segmentation": encoded,
        })  # fmt: skip
    return detections


def score_detections(
    annotations: dict[str, Any], detections: Sequence[dict[str, Any]], image_ids: Sequence[int] | None = None
) -> dict[str, float]:
    """AP, AP50 and AP75 of boxes and masks, in percent.

    Args:
        annotations: the content of an annotation file.
        detections: of all images, from `coco_results`.
        image_ids: the images that the model was run on; None for all of the annotations.
    """
    truth = _index_truth(annotations)
    evaluated = sorted(truth.imgs) if image_ids is None else sorted(set(image_ids))
    _check_images(truth, detections, evaluated)
    scores: dict[str, float] = {}
    for name, iou_type in IOU_TYPES.items():
        indexed = _index_detections(annotations, detections, iou_type)
        values = 100 * _stats(truth, indexed, evaluated, iou_type)
        scores |= {f"{name}_{stat}": float(value) for stat, value in zip(STATS, values, strict=True)}
    return scores


def _check_images(truth: Any, detections: Sequence[dict[str, Any]], image_ids: Sequence[int]) -> None:
    unknown = set(image_ids) - set(truth.imgs)
    if unknown:
        raise ValueError(f"image_ids must be images of the annotations, got {min(unknown)}")
    unknown = {item["image_id"] for item in detections} - set(image_ids)
    if unknown:
        raise ValueError(f"detections must be of images in image_ids, got image {min(unknown)}")
    if not any(not truth.anns[ann].get("iscrowd", 0) for ann in truth.getAnnIds(imgIds=image_ids)):
        raise ValueError("annotations must have one or more objects on these images, got none")


def _index_truth(annotations: dict[str, Any]) -> Any:
    """Index a copy of the annotations, because pycocotools writes into them; fill in optional keys."""
    items = [{"iscrowd": 0, "area": item["bbox"][2] * item["bbox"][3], **item} for item in annotations["annotations"]]
    return _index(annotations, items)


def _index_detections(annotations: dict[str, Any], detections: Sequence[dict[str, Any]], iou_type: str) -> Any:
    """Index detections; pycocotools' own `loadRes` does not accept an empty list."""
    from pycocotools import mask as rle

    items = []
    for number, item in enumerate(detections, start=1):
        area = item["bbox"][2] * item["bbox"][3] if iou_type == "bbox" else float(rle.area(item["segmentation"]))
        items.append({**item, "id": number, "area": area, "iscrowd": 0})
    return _index(annotations, items)


def _index(annotations: dict[str, Any], items: list[dict[str, Any]]) -> Any:
    return index_annotations({
        "images": annotations["images"], "categories": annotations["categories"], "annotations": items,
    })  # fmt: skip


def _stats(truth: Any, detections: Any, image_ids: list[int], iou_type: str) -> np.ndarray:
    from pycocotools.cocoeval import COCOeval

    with hide_output():
        evaluation = COCOeval(truth, detections, iou_type)
        evaluation.params.imgIds = image_ids
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return np.asarray(evaluation.stats[:3])
