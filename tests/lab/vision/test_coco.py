"""COCO's format: targets of Mask R-CNN, resize and flip, and errors that name the file."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from pycocotools import mask as coding

from muonssm.lab.vision.coco import CocoImages, CocoView, flip, resize, resized_shape
from muonssm.lab.vision.coco_checks import decompress_counts
from muonssm.lab.vision.image_files import DamagedImageError

from . import pictures


def rle(height, width, rows, columns):
    mask = np.zeros((height, width), dtype=np.uint8, order="F")
    mask[rows, columns] = 1
    encoded = coding.encode(mask)
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


def content():
    """Two images of 20 x 30, and one of 10 x 10 without objects; ids with gaps."""
    square = {"image_id": 3, "iscrowd": 0}
    return {
        "images": [
            {"id": 9, "file_name": "b.png", "height": 10, "width": 10},
            {"id": 3, "file_name": "a.png", "height": 20, "width": 30},
            {"id": 12, "file_name": "c.png", "height": 20, "width": 30},
        ],
        "categories": [{"id": 90, "name": "dog"}, {"id": 7, "name": "cat"}],
        "annotations": [
            # a polygon of 6 x 4 pixels, and a mask of 5 x 10
            {**square, "id": 1, "category_id": 90, "bbox": [4, 2, 6, 4], "area": 24,
             "segmentation": [[4, 2, 10, 2, 10, 6, 4, 6]]},
            {**square, "id": 2, "category_id": 7, "bbox": [20, 10, 10, 5], "area": 50,
             "segmentation": rle(20, 30, slice(10, 15), slice(20, 30))},
            {**square, "id": 3, "category_id": 7, "bbox": [0, 0, 30, 20], "area": 600, "iscrowd": 1,
             "segmentation": {"size": [20, 30], "counts": [0, 600]}},
            {**square, "id": 4, "category_id": 7, "bbox": [5, 5, 0, 8], "area": 0,
             "segmentation": [[5, 5, 5, 13, 5, 9]]},
            {"image_id": 12, "id": 5, "category_id": 7, "bbox": [-5, -2, 10, 8], "area": 30, "iscrowd": 0,
             "segmentation": rle(20, 30, slice(0, 6), slice(0, 5))},
        ],
    }  # fmt: skip


@pytest.fixture
def make(tmp_path):
    """Write annotations and the three images, and open them."""
    pictures.save(tmp_path / "images" / "a.png", pictures.picture(20, 30))
    pictures.save(tmp_path / "images" / "b.png", pictures.picture(10, 10))
    pictures.save(tmp_path / "images" / "c.png", pictures.picture(20, 30, seed=1))

    def write(annotations=None, **settings):
        (tmp_path / "a.json").write_text(json.dumps(content() if annotations is None else annotations))
        return CocoImages(tmp_path / "a.json", tmp_path / "images", **settings)

    return write


def test_a_target_has_the_form_that_mask_r_cnn_takes(make, capsys):
    data = make()
    assert data.image_ids == [3, 9, 12]
    assert data.classes == ("cat", "dog")
    assert data.category_ids == (7, 90)
    image, target = data[0]
    assert image.shape == (3, 20, 30)
    assert image.dtype == torch.float32
    assert torch.equal(
        (image * 255).round().byte().permute(1, 2, 0), torch.from_numpy(np.array(pictures.picture(20, 30)))
    )
    assert target["boxes"].tolist() == [[4, 2, 10, 6], [20, 10, 30, 15]]
    assert target["labels"].tolist() == [2, 1]
    assert target["masks"].shape == (2, 20, 30)
    assert target["masks"].sum((1, 2)).tolist() == [24, 50]
    assert target["masks"][0, 2:6, 4:10].all()
    assert target["masks"][1, 10:15, 20:30].all()
    assert target["area"].tolist() == [24, 50]
    assert (target["image_id"].item(), target["iscrowd"].tolist()) == (3, [0, 0])
    dtypes = {name: value.dtype for name, value in target.items()}
    assert dtypes == {
        "boxes": torch.float32, "labels": torch.int64, "masks": torch.uint8, "area": torch.float32,
        "iscrowd": torch.int64, "image_id": torch.int64,
    }  # fmt: skip
    assert (data.crowds, data.empty_boxes) == (1, 1)
    assert capsys.readouterr().out == ""


def test_boxes_are_clipped_to_the_image(make):
    assert make()[2][1]["boxes"].tolist() == [[0, 0, 5, 6]]


def test_an_image_without_objects(make):
    target = make()[1][1]
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 10, 10)
    assert make(drop_empty=True).image_ids == [3, 12]
    image, target = make(view=CocoView(short=20, flip=1.0))[1]
    assert image.shape == (3, 20, 20)
    assert target["masks"].shape == (0, 20, 20)


def test_flipped_boxes_fit_flipped_masks(make):
    image, target = make()[0]
    flipped, changed = flip(image, target)
    assert flipped.equal(image.flip(2))
    assert changed["boxes"].tolist() == [[20, 2, 26, 6], [0, 10, 10, 15]]
    assert changed["masks"][0, 2:6, 20:26].all()
    again = flip(flipped, changed)
    assert again[0].equal(image)
    assert all(again[1][name].equal(target[name]) for name in target)


def test_resized_boxes_fit_resized_masks(make):
    image, target = make()[0]
    larger, changed = resize(image, target, (40, 60))
    assert larger.shape == (3, 40, 60)
    assert changed["boxes"].tolist() == [[8, 4, 20, 12], [40, 20, 60, 30]]
    assert changed["masks"].sum((1, 2)).tolist() == changed["area"].tolist() == [96, 200]
    assert changed["masks"][0, 4:12, 8:20].all()


@pytest.mark.parametrize(
    ("size", "short", "longest", "expected"),
    [
        ((20, 30), 40, 100, (40, 60)),
        ((30, 20), 40, 50, (50, 33)),
        ((480, 640), 800, 1333, (800, 1067)),
        ((100, 500), 800, 1333, (267, 1333)),
    ],
)
def test_the_longer_side_is_limited(size, short, longest, expected):
    assert resized_shape(size, short, longest) == expected


def test_a_view_uses_torchs_generator(make):
    data = make(view=CocoView(short=(20, 24, 28), longest=42, flip=0.5))
    torch.manual_seed(0)
    first = [data[0] for _ in range(20)]
    torch.manual_seed(0)
    again = [data[0] for _ in range(20)]
    assert all(one[0].equal(other[0]) for one, other in zip(first, again, strict=True))
    assert {image.shape[1] for image, _ in first} == {20, 24, 28}
    lefts = {round(float(target["boxes"][1, 0]) / image.shape[2], 3) for image, target in first}
    assert lefts == {0.0, 0.667}


def test_files_that_are_missing_or_of_another_size(make, tmp_path):
    data = make()
    pictures.save(tmp_path / "images" / "a.png", pictures.picture(20, 31))
    with pytest.raises(DamagedImageError, match=r"a.png must be 20 x 30 .* got 20 x 31"):
        data[0]
    (tmp_path / "images" / "b.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"b.png must exist, as image 9 of .*a.json"):
        make()
    with pytest.raises(FileNotFoundError, match="images must be a folder, got 'nowhere'"):
        CocoImages(tmp_path / "a.json", "nowhere")
    with pytest.raises(FileNotFoundError, match=r"none.json must be an annotation file"):
        CocoImages(tmp_path / "none.json", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("categories"), "a.json must have a list of categories"),
        (lambda c: c["images"][0].pop("height"), "'height' in every item of images, got none in item 0"),
        (lambda c: c["images"].clear(), "a.json must have one or more images"),
        (lambda c: c["annotations"][1].update(category_id=5), "category_id 5 in annotation 2"),
        (lambda c: c["annotations"][1].update(image_id=5), "image_id 5 in annotation 2"),
        (lambda c: c["annotations"][1].update(id=1), "every id once in annotations, got id 1 2 times"),
        (lambda c: c["annotations"][0].pop("segmentation"), "must have a segmentation in annotation 1"),
    ],
)  # fmt: skip
def test_inconsistent_annotations_raise(make, change, message):
    annotations = content()
    change(annotations)
    with pytest.raises(ValueError, match=message):
        make(annotations)


def test_invalid_json_and_missing_annotations_raise(make, tmp_path):
    make()
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.json is not valid JSON"):
        CocoImages(tmp_path / "a.json", tmp_path / "images")
    with pytest.raises(ValueError, match=r"a.json must have usable annotations"):
        make({**content(), "annotations": []}, drop_empty=True)


@pytest.mark.parametrize(
    ("settings", "name", "error"),
    [
        ({"short": ()}, "short", ValueError),
        ({"short": (0,)}, "short", ValueError),
        ({"short": (1.5,)}, "short", TypeError),
        ({"short": 800, "longest": 700}, "longest", ValueError),
        ({"flip": 2}, "flip", ValueError),
    ],
)
def test_invalid_views_raise(settings, name, error):
    with pytest.raises(error, match=rf"^{name} must be"):
        CocoView(**settings)


def segmentation(**changes):
    return lambda c: c["annotations"][1]["segmentation"].update(changes)


def polygons(*values):
    return lambda c: c["annotations"][0].update(segmentation=list(values))


SPIKES = [0, 0, 900_000, 0] * 50
HOSTILE = {
    "counts too short": (segmentation(counts=[0, 5]), "fill its 600 pixels, got 5, in annotation 2"),
    "counts too long": (segmentation(counts=[0, 601]), "fill its 600 pixels, got 601, in annotation 2"),
    "no counts": (segmentation(counts=""), "fill its 600 pixels, got 0, in annotation 2"),
    "negative counts": (segmentation(counts=[700, -100]), "counts >= 0.* got counts .*in annotation 2"),
    "counts of words": (segmentation(counts=["a", 600]), "counts >= 0.* got counts .*in annotation 2"),
    "truncated string": (segmentation(counts="Zf0"), "fill its 600 pixels, got .*in annotation 2"),
    "unfinished string": (segmentation(counts="Zf0P"), "counts >= 0.* got counts 'Zf0P', in annotation 2"),
    "endless string": (segmentation(counts="o" * 99 + "0"), "counts >= 0"),
    "no string of counts": (segmentation(counts="\x01\u20ac"), "counts >= 0"),
    "another size": (segmentation(size=[30, 20]), r"size \[20, 30\], got size \[30, 20\], in annotation 2"),
    "a size of words": (segmentation(size="20"), "got size '20', in annotation 2"),
    "nan box": (lambda c: c["annotations"][0].update(bbox=[0, 0, float("nan"), 3]), "valid JSON: .*finite, got NaN"),
    "infinite box": (lambda c: c["annotations"][0].update(bbox=[0, 0, float("inf"), 3]), "not valid JSON: .*Infinity"),
    "huge box": (lambda c: c["annotations"][0].update(bbox=[0, 0, 10**300, 3]), "'bbox' of item 0 of annotations, got"),
    "overflowing box": (lambda c: c["annotations"][0].update(bbox=[0, 0, 10**400, 3]), "must be finite, got 1000"),
    "short box": (lambda c: c["annotations"][0].update(bbox=[0, 0, 3]), "'bbox' of item 0 of annotations, got"),
    "box of words": (lambda c: c["annotations"][0].update(bbox="abcd"), "'bbox' of item 0 of annotations, got 'abcd'"),
    "nan polygon": (polygons([0, 0, 1, 1, 2, float("nan")]), "valid JSON: .*finite, got NaN"),
    "huge polygon": (polygons([0, 0, 1, 1, 2, 1e9]), "MAX_COORDINATE.* got .*in annotation 1"),
    "odd polygon": (polygons([0, 0, 1, 1, 2, 2, 3]), "3 or more points.* got .*in annotation 1"),
    "short polygon": (polygons([0, 0, 1, 1]), "3 or more points.* got .*in annotation 1"),
    "endless polygon": (polygons(SPIKES), "polygons of a length .*MAX_OUTLINE.* in annotation 1"),
    "polygon of junk": (polygons([None, "a", [], {}, 1, 2]), "3 or more points.* got .*in annotation 1"),
    "polygon of numbers": (polygons(1, 2, 3), "3 or more points.* got 1, in annotation 1"),
    "a word as mask": (lambda c: c["annotations"][0].update(segmentation="x"), "list of polygons .* got 'x'"),
    "area": (lambda c: c["annotations"][0].update(area="x"), "'area' of item 0 of annotations, got 'x'"),
    "iscrowd": (lambda c: c["annotations"][0].update(iscrowd=[]), "'iscrowd' of item 0 of annotations, got"),
    "list as id": (lambda c: c["annotations"][0].update(id=[1]), "'id' of item 0 of annotations, got"),
    "none as image": (lambda c: c["annotations"][0].update(image_id=None), "'image_id' of item 0 of annotations"),
    "number as item": (lambda c: c["annotations"].insert(0, 5), "object as item 0 of annotations, got 5"),
    "null as item": (lambda c: c["images"].append(None), "object as item 3 of images, got None"),
    "no height": (lambda c: c["images"][0].update(height=0), "'height' of item 0 of images, got 0"),
    "float height": (lambda c: c["images"][0].update(height=10.0), "'height' of item 0 of images, got 10.0"),
    "huge height": (lambda c: c["images"][0].update(height=10**9), "MAX_PIXELS.* in image 9, got 1000000000 x 10"),
    "file name": (lambda c: c["images"][0].update(file_name=3), "'file_name' of item 0 of images, got 3"),
    "file outside": (lambda c: c["images"][0].update(file_name="../b.png"), "inside the folder .*got '../b.png'"),
    "absolute file": (lambda c: c["images"][0].update(file_name="/b.png"), "inside the folder .*got '/b.png'"),
    "category name": (lambda c: c["categories"][0].update(name=None), "'name' of item 0 of categories, got None"),
    "category id": (lambda c: c["categories"][0].update(id="90"), "'id' of item 0 of categories, got '90'"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_annotations_are_refused_by_file_and_field(make, case):
    change, message = HOSTILE[case]
    annotations = content()
    change(annotations)
    with pytest.raises(ValueError, match=rf"a\.json .*{message}"):
        make(annotations)


def test_compressed_counts_are_those_of_pycocotools():
    random = np.random.default_rng(0)
    for density in (0.0, 0.01, 0.5, 1.0):
        mask = np.asfortranarray(random.random((300, 200)) < density).astype(np.uint8)
        counts = decompress_counts(coding.encode(mask)["counts"].decode())
        starts = np.flatnonzero(np.diff(np.r_[0, mask.ravel(order="F")]))
        expected = np.diff(np.r_[0, starts, mask.size]).tolist()
        assert counts == expected


def test_annotations_and_images_are_regular_files(make, tmp_path):
    make()
    (tmp_path / "images" / "b.png").unlink()
    os.mkfifo(tmp_path / "images" / "b.png")
    with pytest.raises(ValueError, match=r"b\.png must be a regular file, got a pipe"):
        make()
    (tmp_path / "a.json").unlink()
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"a\.json must be a regular file, got a pipe"):
        CocoImages(tmp_path / "a.json", tmp_path / "images")
