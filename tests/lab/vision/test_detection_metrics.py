"""Average precision of boxes and masks, against values computed by hand and by pycocotools."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from muonssm.lab.vision.detection_metrics import coco_results, score_detections

SIDE = 40
# Two objects and three detections, by score: the first is object one; the second is a false alarm; the third is object
# two with an IoU of 8 x 5 / 8 x 8 = 0.625.
TRUTH = [(0, 0, 10, 10), (20, 20, 28, 28)]
DETECTED = [(0, 0, 10, 10), (0, 20, 10, 30), (20, 20, 28, 25)]
# At thresholds up to 0.625, precision is 1 up to recall 1/2, then 2/3 (2 of 3 correct). COCO samples recall at 0, 0.01,
# ..., 1: 51 samples of the first, 50 of the second. At the 7 thresholds above, recall ends at 1/2.
LOW, HIGH = (51 + 50 * 2 / 3) / 101, 51 / 101
EXPECTED = {"ap": 100 * (3 * LOW + 7 * HIGH) / 10, "ap50": 100 * LOW, "ap75": 100 * HIGH}


def mask_of(box):
    mask = np.zeros((SIDE, SIDE), dtype=np.uint8, order="F")
    mask[box[1] : box[3], box[0] : box[2]] = 1
    return mask


def annotations():
    items = []
    for number, box in enumerate(TRUTH, start=1):
        encoded = rle.encode(mask_of(box))
        encoded["counts"] = encoded["counts"].decode()
        corner = [box[0], box[1], box[2] - box[0], box[3] - box[1]]
        items.append({
            "id": number, "image_id": 5, "category_id": 17, "bbox": corner, "area": corner[2] * corner[3],
            "iscrowd": 0, "segmentation": encoded,
        })  # fmt: skip
    images = [{"id": number, "file_name": f"{number}.png", "height": SIDE, "width": SIDE} for number in (5, 6)]
    return {"images": images, "categories": [{"id": 17, "name": "a"}, {"id": 30, "name": "b"}], "annotations": items}


def output(boxes=DETECTED, scores=(0.9, 0.8, 0.7), label=1, scale=1):
    """An output of Mask R-CNN."""
    masks = torch.stack([torch.from_numpy(mask_of(box)).float() for box in boxes])[:, None] * 0.9
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32) * scale,
        "labels": torch.full((len(boxes),), label),
        "scores": torch.tensor(scores),
        "masks": masks.repeat_interleave(scale, 2).repeat_interleave(scale, 3),
    }


def named(expected):
    return {f"{kind}_{name}": pytest.approx(value) for kind in ("box", "mask") for name, value in expected.items()}


def test_average_precision_computed_by_hand(capsys):
    detections = coco_results(output(), 5, (17, 30))
    truth = annotations()
    before = copy.deepcopy((truth, detections))
    assert score_detections(truth, detections) == named(EXPECTED)
    assert capsys.readouterr().out == ""
    assert (truth, detections) == before


def test_polygons_and_missing_optional_keys_give_the_same():
    truth = annotations()
    for item, box in zip(truth["annotations"], TRUTH, strict=True):
        left, top, right, bottom = box
        item["segmentation"] = [[left, top, right, top, right, bottom, left, bottom]]
        del item["iscrowd"], item["area"]
    before = copy.deepcopy(truth)
    assert score_detections(truth, coco_results(output(), 5, (17, 30))) == named(EXPECTED)
    assert truth == before


def test_the_same_as_pycocotools_from_files(tmp_path, capsys):
    """pycocotools reads the annotations from a file, and detections by its own `loadRes`."""
    (tmp_path / "a.json").write_text(json.dumps(annotations()))
    detections = coco_results(output(), 5, (17, 30))
    scores = score_detections(annotations(), detections)
    truth = COCO(str(tmp_path / "a.json"))
    for kind, name in (("box", "bbox"), ("mask", "segm")):
        # given boxes and masks, loadRes takes areas from boxes
        results = [{key: value for key, value in item.items() if key != "bbox" or kind == "box"} for item in detections]
        evaluation = COCOeval(truth, truth.loadRes(copy.deepcopy(results)), name)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        ours = [scores[f"{kind}_{stat}"] for stat in ("ap", "ap50", "ap75")]
        assert ours == pytest.approx(100 * evaluation.stats[:3])


def test_classes_without_objects_and_crowds_do_not_count():
    truth = annotations()
    detections = coco_results(output(), 5, (17, 30)) + coco_results(output(label=2), 5, (17, 30))
    assert score_detections(truth, detections) == named(EXPECTED)
    crowd = {"size": [SIDE, SIDE], "counts": rle.encode(mask_of((0, 32, 40, 40)))["counts"].decode()}
    truth["annotations"].append({
        "id": 3, "image_id": 5, "category_id": 17, "bbox": [0, 32, 40, 8], "area": 320, "iscrowd": 1,
        "segmentation": crowd,
    })  # fmt: skip
    inside = coco_results(output([(0, 32, 10, 40)], (0.95,)), 5, (17, 30))
    assert score_detections(truth, detections + inside) == named(EXPECTED)


def test_false_alarms_count_on_evaluated_images_only():
    alarm = coco_results(output([(0, 0, 10, 10)], (1.0,)), 6, (17, 30))
    detections = coco_results(output(DETECTED[:1], (0.9,)), 5, (17, 30))
    alone = score_detections(annotations(), detections, image_ids=[5])
    assert alone["box_ap50"] == pytest.approx(100 * 51 / 101)
    both = score_detections(annotations(), detections + alarm)
    assert both["box_ap50"] == pytest.approx(100 * 51 / 101 / 2)  # the alarm has the highest score: precision 1/2
    with pytest.raises(ValueError, match="detections must be of images in image_ids, got image 6"):
        score_detections(annotations(), detections + alarm, image_ids=[5])
    with pytest.raises(ValueError, match="image_ids must be images of the annotations, got 8"):
        score_detections(annotations(), detections, image_ids=[5, 8])


def test_outputs_at_another_size_are_resized():
    detections = coco_results(output(scale=2), 5, (17, 30), size=(SIDE, SIDE))
    assert detections == coco_results(output(), 5, (17, 30))


def test_no_detections_score_zero_and_no_objects_raise():
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "scores": torch.zeros(0)}
    none = coco_results({**empty, "masks": torch.zeros(0, 1, 80, 80)}, 5, (17, 30), size=(SIDE, SIDE))
    assert none == []
    assert set(score_detections(annotations(), none).values()) == {0.0}
    with pytest.raises(ValueError, match="annotations must have one or more objects"):
        score_detections(annotations(), none, image_ids=[6])
