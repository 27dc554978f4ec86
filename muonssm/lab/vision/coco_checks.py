"""Check annotations in COCO's format, field by field, before pycocotools trusts them: its C code does not check.

Every error names the file, the item and the field.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from muonssm.checks import is_int, is_number

from . import image_files

MAX_COORDINATE = 1_000_000  # of boxes and polygons, in pixels
MAX_OUTLINE = 10_000_000  # length of a polygon in pixels: pycocotools takes 80 bytes for each
MAX_AREA = 1e15
ID_LIMIT = 1 << 53  # pycocotools keeps ids as floats
RLE_DIGITS = 7  # of 5 bits, in one number of a compressed mask
MAX_SHOWN = 100  # characters of a wrong value


def _is_id(value: object) -> bool:
    return is_int(value) and abs(value) <= ID_LIMIT


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_inside(value: object) -> bool:
    """Whether a path stays in the folder of the images."""
    return isinstance(value, str) and _is_name(value) and not value.startswith("/") and ".." not in Path(value).parts


def _is_box(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and _are_coordinates(value)


def _is_area(value: object) -> bool:
    return is_number(value) and 0 <= value <= MAX_AREA


def _is_flag(value: object) -> bool:
    return value is False or value is True or (is_int(value) and value in (0, 1))


def _are_coordinates(values: Sequence[Any]) -> bool:
    """Whether all are finite numbers up to `MAX_COORDINATE`; there can be millions."""
    if not values or not set(map(type, values)) <= {int, float}:
        return False
    return min(values) >= -MAX_COORDINATE and max(values) <= MAX_COORDINATE and math.isfinite(sum(values))


BOX = f"four finite numbers up to {MAX_COORDINATE} ({__name__}.MAX_COORDINATE)"
ID = "an integer"
Field = tuple[str, bool, str, Callable[[Any], bool]]  # its name, whether it is required, what it must be, the check
FIELDS: dict[str, tuple[Field, ...]] = {
    "images": (
        ("id", True, ID, _is_id),
        ("file_name", True, "a path inside the folder of images", _is_inside),
        ("height", True, "an integer >= 1", lambda value: is_int(value, 1)),
        ("width", True, "an integer >= 1", lambda value: is_int(value, 1)),
    ),
    "annotations": (
        ("id", True, ID, _is_id),
        ("image_id", True, ID, _is_id),
        ("category_id", True, ID, _is_id),
        ("bbox", True, BOX, _is_box),
        ("area", False, "a finite number >= 0", _is_area),
        ("iscrowd", False, "0 or 1", _is_flag),
    ),
    "categories": (("id", True, ID, _is_id), ("name", True, "a name", _is_name)),
}


def check_annotations(path: Path, content: Any) -> None:
    """Check that the content of an annotation file is complete and consistent, and that every number is usable."""
    for name, fields in FIELDS.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), list):
            raise ValueError(f"{path} must have a list of {name}, got none; is it in COCO's format?")
        for number, item in enumerate(content[name]):
            _check_item(path, name, number, item, fields)
    _check_references(path, content)
    sizes = {image["id"]: _checked_size(path, image) for image in content["images"]}
    for item in content["annotations"]:
        if item.get("segmentation"):
            reason = _why_not_a_mask(item["segmentation"], *sizes[item["image_id"]])
            if reason is not None:
                raise ValueError(f"{path} must have a segmentation that {reason}, in annotation {item['id']}")


def _check_item(path: Path, name: str, number: int, item: Any, fields: Sequence[Field]) -> None:
    if not isinstance(item, dict):
        raise ValueError(f"{path} must have an object as item {number} of {name}, got {_show(item)}")
    for key, required, wanted, check in fields:
        if key not in item:
            if required:
                raise ValueError(f"{path} must have {key!r} in every item of {name}, got none in item {number}")
        elif not check(item[key]):
            raise ValueError(f"{path} must have {wanted} as {key!r} of item {number} of {name}, got {_show(item[key])}")


def _show(value: object) -> str:
    try:
        return repr(value)[:MAX_SHOWN]
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return f"a {type(value).__name__}"


def _check_references(path: Path, content: dict[str, Any]) -> None:
    """Check that ids are unique and that annotations refer to existing images and categories."""
    for name in ("images", "categories"):
        if not content[name]:
            raise ValueError(f"{path} must have one or more {name}, got none")
    for name in FIELDS:
        ((id_, count),) = Counter(item["id"] for item in content[name]).most_common(1) or [(None, 1)]
        if count > 1:
            raise ValueError(f"{path} must have every id once in {name}, got id {id_} {count} times")
    ids = {name: {item["id"] for item in content[name]} for name in ("images", "categories")}
    for item in content["annotations"]:
        for key, name in (("image_id", "images"), ("category_id", "categories")):
            if item[key] not in ids[name]:
                raise ValueError(
                    f"{path} must have every {key} in {name}, got {key} {item[key]} in annotation {item['id']}"
                )


def _checked_size(path: Path, image: dict[str, Any]) -> tuple[int, int]:
    height, width = image["height"], image["width"]
    if height * width > image_files.MAX_PIXELS:
        wanted = f"height x width of {image_files.MAX_PIXELS} or less ({image_files.__name__}.MAX_PIXELS)"
        raise ValueError(f"{path} must have {wanted} in image {image['id']}, got {_show(height)} x {_show(width)}")
    return height, width


def _why_not_a_mask(segmentation: Any, height: int, width: int) -> str | None:
    """The reason why polygons or a mask cannot be used for an image of this size; None if they can."""
    if isinstance(segmentation, list):
        return next(filter(None, map(_why_not_a_polygon, segmentation)), None)
    if not isinstance(segmentation, dict):
        return f"is a list of polygons or an object with size and counts, got {_show(segmentation)}"
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if not isinstance(size, list) or size != [height, width] or not all(map(is_int, size)):
        return f"has the image's size [{height}, {width}], got size {_show(size)}"
    if isinstance(counts, str):
        counts = decompress_counts(counts)
    if not isinstance(counts, list) or not all(is_int(count, 0) for count in counts):
        return f"has counts >= 0, or a string of them, got counts {_show(segmentation.get('counts'))}"
    filled = sum(counts)
    if filled != height * width:
        return f"has counts that fill its {height * width} pixels, got {_show(filled)}"
    return None


def _why_not_a_polygon(polygon: Any) -> str | None:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2 or not _are_coordinates(polygon):
        wanted = f"finite numbers up to {MAX_COORDINATE} ({__name__}.MAX_COORDINATE)"
        return f"has polygons of 3 or more points, each two {wanted}, got {_show(polygon)}"
    longest = len(polygon) / 2 * (max(polygon) - min(polygon)) * 2
    if longest > MAX_OUTLINE and _outline(polygon) > MAX_OUTLINE:
        return f"has polygons of a length up to {MAX_OUTLINE} ({__name__}.MAX_OUTLINE), got {_outline(polygon):.6g}"
    return None


def _outline(polygon: Sequence[float]) -> float:
    """The length of a polygon, along the axes."""
    following = [*polygon[2:], *polygon[:2]]
    return float(sum(abs(b - a) for a, b in zip(polygon, following, strict=True)))


def decompress_counts(text: str) -> list[int] | None:
    """The run lengths in a compressed mask: digits of 5 bits, each number but the first three a difference.

    None if it is not such a string.
    """
    counts: list[int] = []
    value = digits = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or digits == RLE_DIGITS:
            return None
        value |= (bits & 31) << 5 * digits
        digits += 1
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << 5 * digits
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = digits = 0
    return None if digits else counts
