"""Axes: where a value stands, linear or by its logarithm, and the round numbers beside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ROOM = 0.05  # of its length an axis goes on beyond what it shows


@dataclass(frozen=True)
class Axis:
    """Values `low` to `high` on pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, log: bool = False, padded: bool = False) -> Axis:
        """One that shows all `values`; with some room beyond them if it is padded."""
        low, high = (min(values), max(values)) if values else (1.0, 1.0)
        if log:
            wide = 10 ** (ROOM * (math.log10(high / low) or 1.0)) if padded else 1.0
            return cls(low / wide, high * wide, start, end, True)
        return cls(*(_padded(low, high) if padded else (low, high)), start, end)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return self.start + (value - low) / (high - low or 1.0) * (self.end - self.start)

    def ticks(self, values: Sequence[float] = ()) -> list[float]:
        """Round numbers; on a logarithmic axis `values` themselves where they are few and apart."""
        if not self.log:
            return ticks(self.low, self.high, 1.0 if values and all(float(x).is_integer() for x in values) else 0.0)
        few = sorted(set(values))
        gaps = [abs(self.at(b) - self.at(a)) for a, b in pairwise(few)]
        return few if few and len(few) <= 7 and min(gaps, default=99) >= 30 else log_ticks(self.low, self.high)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = (high - low or abs(high) or 1.0) * ROOM
    return (low - room if low < 0 or low > room else 0.0), high + room


def ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """About five round numbers from low to high, `least` apart at least."""
    span = high - low or 1.0
    power = 10.0 ** math.floor(math.log10(span))
    step = next((factor * power for factor in (0.2, 0.5, 1.0, 2.0) if span / (factor * power) <= 6), 5 * power)
    step = max(step, least)
    first = -(-low // step)
    return [round(step * (first + i), 10) for i in range(int((high - first * step) / step + 1e-9) + 1)]


def number(value: float) -> str:
    """As it stands beside an axis: thousandths and millions as powers of ten."""
    said = f"{value:g}"
    if value <= 0 or 1e-3 <= value < 1e5:
        return said
    factor, _, power = f"{value:e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if float(factor) == 1 else f"{float(factor):g}·10{raised}"


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from low to high, some six at most; over little more than one also their doubles and fives."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if math.log10(high / low) < 2:
        found = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in (1, 2, 5)]
    else:
        found = [10.0**power for power in range(first, last + 1, -(-(last - first) // 6) or 1)]
    inside = [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
    return inside if len(inside) > 1 else ticks(low, high)
