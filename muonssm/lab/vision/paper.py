"""The paper's figures for vision: MambaVision-T on ImageNet and its harder sets, COCO and ADE20K, in percent."""

from __future__ import annotations

from collections.abc import Sequence

from .imagenet import synsets

Columns = tuple[str, ...]
Table = dict[str, tuple[tuple[float, ...], ...]]
KINDS = ("plain", "muon")  # the order of the rows of a backbone

# tab:muon_comparison: columns as _IMAGES; its Top-1 on ImageNet-C is left out, since mCE is what is measured here.
_IMAGES: Columns = ("accuracy", "top5", "imagenet-r", "imagenet-a", "mce")
_CLASSIFIED: Table = {
    "mamba": ((81.08, 95.32, 42.35, 20.57, 112.84), (81.19, 95.36, 42.61, 20.50, 112.52)),
    "longhorn": ((81.63, 95.82, 45.44, 23.76, 111.68), (82.01, 95.90, 46.28, 25.27, 111.24)),
    "gated_deltanet": ((79.92, 95.24, 41.55, 19.92, 114.12), (80.31, 95.35, 42.18, 20.47, 113.56)),
}
# tab:unified_downstream: COCO's boxes and masks, and ADE20K.
_OBJECTS: Columns = ("box_ap", "box_ap50", "box_ap75", "mask_ap", "mask_ap50", "mask_ap75", "miou")
_DOWNSTREAM: Table = {
    "mamba": ((50.8, 69.5, 55.2, 44.1, 67.0, 47.9, 43.9), (51.1, 69.9, 55.4, 44.3, 67.4, 48.2, 45.2)),
    "longhorn": ((50.6, 69.3, 55.3, 44.0, 66.7, 47.6, 44.2), (51.0, 69.8, 55.4, 44.1, 67.1, 47.6, 45.7)),
    "gated_deltanet": ((49.5, 68.1, 53.8, 43.4, 67.2, 46.8, 41.2), (50.1, 68.8, 54.5, 43.8, 67.8, 47.3, 41.8)),
}


def published_vision(
    task: str, source: str, size: str, backbone: str, classes: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Return the paper's scores by variant and score; empty for other data.

    Classifiers also have `imagenet-r`, `imagenet-a` and `mce`. ImageNet is recognized by its classes.
    """
    if task == "vision" and len(classes) == 1000 and tuple(classes) == synsets():  # timm has them: not asked in vain
        columns, table = _IMAGES, _CLASSIFIED
    elif (task, source) in (("detection", "coco"), ("segmentation", "ade20k")):
        columns, table = _OBJECTS, _DOWNSTREAM
    else:
        return {}
    rows = table.get(backbone, ()) if size == "tiny" else ()
    chosen = [i for i, name in enumerate(columns) if task != "segmentation" or name == "miou"]
    chosen = [i for i in chosen if task != "detection" or columns[i] != "miou"]
    return {kind: {columns[i]: row[i] for i in chosen} for kind, row in zip(KINDS, rows, strict=False)}
