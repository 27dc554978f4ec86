"""Checks of arguments and configuration fields, with one wording for all errors: "NAME must be ..., got ...".

A value of the wrong type raises TypeError, a value out of range ValueError. Booleans do not count as numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeGuard

LARGEST_INT = 2**63 - 1
LARGEST_FLOAT = sys.float_info.max  # an integer can be larger, and not be converted


def is_int(value: object, least: float = -math.inf) -> TypeGuard[int]:
    """Whether `value` is an integer >= `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is an integer or a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int | None = None) -> int:
    """An integer, >= `least` if given."""
    wanted = "an integer" if least is None else f"an integer >= {least}"
    if not is_int(value):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    if abs(value) > LARGEST_INT:
        raise ValueError(f"{name} must be {wanted}, at most 2**63 - 1, got {value!r}")
    return value


def check_number(
    name: str,
    value: Any,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> float:
    """A finite number in [low, high]; `open_low` and `open_high` exclude a bound."""
    wanted = _range(low, high, open_low, open_high)
    if not is_number(value):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    if (
        not (abs(value) <= LARGEST_FLOAT and low <= value <= high)  # torch.compile cannot trace math.isfinite
        or (open_low and value == low)
        or (open_high and value == high)
    ):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return value


def check_bool(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """One of `choices`."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _range(low: float, high: float, open_low: bool, open_high: bool) -> str:
    if math.isinf(low) and math.isinf(high):
        return "a finite number"
    if math.isinf(high):
        return f"a finite number {'>' if open_low else '>='} {low:g}"
    return f"a number in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
