"""What zero-shot.json and needle.json of a run must hold. An error says which field, what it must be and what it was.

The files can be damaged or edited by hand; reports and resumed evaluations rely on these checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muonssm.checks import is_int, is_number
from muonssm.lab.core.run_files import need, require, require_number_or_null

from .needle import BINS
from .needle_prompts import VARIANTS


def check_zero_shot(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless `content` can be that of zero-shot.json."""
    settings = need("settings", content.get("settings"), dict)
    require_number_or_null("settings.limit", settings.get("limit"))
    require(is_int(settings.get("max_length"), 1), "settings.max_length", "an integer >= 1", settings.get("max_length"))
    data = settings.get("data")
    for task, local in need("settings.data", {} if data is None else data, dict).items():
        for key in ("file", "split"):
            need(f"settings.data.{task}.{key}", need(f"settings.data.{task}", local, dict).get(key), str)
    for task, scores in need("tasks", content.get("tasks"), dict).items():
        place = f"tasks.{task}"
        metrics = need(f"{place}.metrics", need(place, scores, dict).get("metrics"), dict)
        for metric, value in metrics.items():
            require_number_or_null(f"{place}.metrics.{metric}", value)
            is_share = value is None or not metric.startswith("acc") or 0 <= value <= 1
            require(is_share, f"{place}.metrics.{metric}", "an accuracy in [0, 1]", value)
        for key, value in (("samples", scores.get("samples")), ("truncated", scores.get("truncated", 0))):
            require(is_int(value, 0), f"{place}.{key}", "an integer >= 0", value)


def check_needle(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless `content` can be that of needle.json."""
    settings = need("settings", content.get("settings"), dict)
    for key in ("samples", "answer_tokens", "seed"):
        require(is_int(settings.get(key), 0), f"settings.{key}", "an integer >= 0", settings.get(key))
    for number, cell in enumerate(need("cells", content.get("cells"), list)):
        _check_cell(f"cells[{number}]", cell)


def _check_cell(place: str, cell: Any) -> None:
    need(place, cell, dict)
    variant = cell.get("variant")
    require(variant in VARIANTS, f"{place}.variant", f"one of {', '.join(VARIANTS)}", variant)
    for key, least in (("length", 1), ("samples", 1), ("repeated", 0)):
        require(is_int(cell.get(key), least), f"{place}.{key}", f"an integer >= {least}", cell.get(key))
    require(is_number(cell.get("score")), f"{place}.score", "a number", cell.get("score"))
    depths = need(f"{place}.depths", cell.get("depths"), list)
    require(len(depths) == BINS, f"{place}.depths", f"a list of {BINS} bins", depths)
    for depth in depths:
        need(f"{place}.depths", depth, dict)
        require_number_or_null(f"{place}.depths.score", depth.get("score"))
        for key in ("from", "to", "samples"):
            require(is_number(depth.get(key)), f"{place}.depths.{key}", "a number", depth.get(key))
    for wrong in need(f"{place}.wrong", cell.get("wrong"), list):
        need(f"{place}.wrong", wrong, dict)
        require(is_number(wrong.get("depth")), f"{place}.wrong.depth", "a number", wrong.get("depth"))
        for key in ("key", "value", "answer"):
            need(f"{place}.wrong.{key}", wrong.get(key), str)
