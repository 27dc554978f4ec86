"""Taking up an earlier result: what it was made with has to be the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_same(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raises where one of `settings` was another in an earlier result."""
    for name, value in settings.items():
        was = earlier.get(name)
        if was != value:
            raise ValueError(
                f"{name} is {value!r}, but the earlier result has {was!r}; it may be the same, or start anew"
            )
