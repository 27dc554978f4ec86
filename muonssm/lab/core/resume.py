"""Resuming an earlier result: it must have been made with the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_same_settings(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> None:
    """Raise if one of `settings` differs from the earlier result's."""
    for name, value in settings.items():
        if earlier.get(name) != value:
            wanted = f"{earlier.get(name)!r}, as in the earlier result"
            raise ValueError(f"{name} must be {wanted}, got {value!r}; leave out --resume to start over")
