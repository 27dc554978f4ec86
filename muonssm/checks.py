"""What counts as a number in an argument: True and False do not, though Python takes them for 1 and 0."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_whole(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether it is an integer, and not below `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_real(value: object) -> TypeGuard[float]:
    """Whether it is an integer or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
