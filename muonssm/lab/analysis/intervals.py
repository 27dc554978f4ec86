"""Differences and ratios of paired runs with 95% intervals, and how they read in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from muonssm.lab.core.compare import Interval, Spread

Scores = Mapping[Any, float | None]  # by seed, or by seed and fold; None for a diverged run


def paired_difference(minuends: Scores, subtrahends: Scores) -> Interval:
    """The mean difference over pairs in which both runs have a score, with its 95% interval."""
    pairs = [(one, subtrahends[key]) for key, one in minuends.items() if key in subtrahends]
    return Interval.of([one - other for one, other in pairs if one is not None and other is not None])


def paired_ratio(numerators: Scores, denominators: Scores) -> Interval:
    """The geometric mean of the ratio over pairs, with its 95% interval; scores that are zero are left out."""
    difference = paired_difference(_logarithms(numerators), _logarithms(denominators))
    bounds = (difference.mean, difference.low, difference.high)
    mean, low, high = (None if x is None else float(np.exp(x)) for x in bounds)
    return Interval(mean, low, high, difference.pairs)


def _logarithms(scores: Scores) -> dict[Any, float | None]:
    return {key: None if not x else float(np.log(x)) for key, x in scores.items()}


def format_interval(interval: Interval, form: str = "{:+.2f}") -> str:
    """The mean with its interval and the number of pairs."""
    if interval.mean is None:
        return "unknown (every pair has a run that diverged)"
    if interval.low is None or interval.high is None:
        return f"{form.format(interval.mean)} (one pair: no interval)"
    low, high = form.format(interval.low), form.format(interval.high)
    return f"{form.format(interval.mean)} [{low}, {high}] over {interval.pairs} pairs"


def format_spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """The mean of several runs, with the standard deviation if there are two or more."""
    spread = Spread.of(values)
    if spread.mean is None:
        return "diverged"
    deviation = "" if spread.deviation is None else f" ± {form.format(spread.deviation)}"
    return form.format(spread.mean) + deviation


def is_clear(interval: Interval, neutral: float = 0.0) -> bool:
    """Whether the interval excludes `neutral`, the value of no difference."""
    return interval.low is not None and interval.high is not None and not interval.low <= neutral <= interval.high


def verdict(interval: Interval, neutral: float = 0.0) -> str:
    """Whether there is a clear difference, in words."""
    if interval.pairs < 2:
        return "one pair is too few to tell"
    return "a clear difference" if is_clear(interval, neutral) else "no clear difference"
