"""What an analysis leaves: sentences, tables, pictures and the arrays behind them, as JSON and SVG files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from muonssm.lab.core.compare import Interval
from muonssm.lab.core.files import atomic
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.report import figures


@dataclass
class Result:
    """One analysis of one run.

    Attributes:
        name, title: as in `--what`, and in words.
        paper: what the paper says.
        found: what was found here, a sentence each.
        tables: dicts with `caption`, `head`, `rows`, and `paper` for its rows.
        figures: dicts with `caption` and `svg`.
        settings: sizes and seeds.
        data: the numbers.
    """

    name: str
    title: str
    paper: str
    found: list[str] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, str]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def table(
        self, caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], paper: Sequence[Any] = ()
    ) -> None:
        """Adds a table."""
        shown = {"caption": caption, "head": list(head), "rows": [list(row) for row in rows]}
        self.tables.append({**shown, "paper": [list(row) for row in paper]})

    def figure(self, caption: str, picture: str) -> None:
        """Adds a picture."""
        self.figures.append({"caption": caption, "svg": picture})

    def write(self, place: Path) -> list[Path]:
        """NAME.json, and NAME-1.svg and so on; returns their paths."""
        place.mkdir(parents=True, exist_ok=True)
        for old in place.glob(f"{self.name}-*.svg"):
            old.unlink()
        paths = [place / f"{self.name}-{i}.svg" for i in range(1, len(self.figures) + 1)]
        for path, figure in zip(paths, self.figures, strict=True):
            with atomic(path) as part:
                part.write_text(figures.standalone(figure["svg"]))
        RunFolder(place).write(f"{self.name}.json", _plain(asdict(self)))
        return [place / f"{self.name}.json", *paths]


def _plain(content: Any) -> Any:
    """Arrays as lists."""
    if isinstance(content, dict):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_plain(value) for value in content]
    return content.tolist() if isinstance(content, (np.ndarray, np.generic)) else content


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """A mean and, of several, its deviation."""
    if not len(values):
        return "diverged"
    mean = form.format(statistics.fmean(values))
    return mean if len(values) < 2 else f"{mean} ± {form.format(statistics.stdev(values))}"


def mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    """As the charts take them."""
    if not len(values):
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def paired(ones: Mapping[Any, float | None], others: Mapping[Any, float | None]) -> Interval:
    """The mean difference over pairs that both have a number, with its 95% interval."""
    both = [(one, others[key]) for key, one in ones.items() if key in others]
    return Interval.of([one - other for one, other in both if one is not None and other is not None])


def ratio(ones: Mapping[Any, float | None], others: Mapping[Any, float | None]) -> Interval:
    """The geometric mean of ones over others, pair by pair, with its 95% interval."""
    logs = [{key: None if not x else float(np.log(x)) for key, x in side.items()} for side in (ones, others)]
    found = paired(*logs)
    mean, low, high = (None if x is None else float(np.exp(x)) for x in (found.mean, found.low, found.high))
    return Interval(mean, low, high, found.pairs)


def say(interval: Interval, form: str = "{:+.2f}") -> str:
    """An interval in words."""
    if interval.mean is None:
        return "unknown: no pair of runs without one that diverged"
    if interval.low is None or interval.high is None:
        return f"{form.format(interval.mean)} (one pair: no interval)"
    low, high = form.format(interval.low), form.format(interval.high)
    return f"{form.format(interval.mean)} [{low}, {high}] over {interval.pairs} pairs"


def is_clear(interval: Interval, neutral: float = 0.0) -> bool:
    """Whether the interval leaves out what would be no difference."""
    return interval.low is not None and interval.high is not None and not interval.low <= neutral <= interval.high


def verdict(interval: Interval, neutral: float = 0.0) -> str:
    """Whether there is a difference, in words."""
    if interval.pairs < 2:
        return "one pair is too few to tell"
    return "a clear difference" if is_clear(interval, neutral) else "no clear difference"
