"""The table that a benchmark prints and the JSON file that it writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from muonssm.lab.core.files import atomic
from muonssm.lab.core.info import describe

LEGEND = "ms: best of several rounds, in turns; x: time divided by that of the first row (above 1 is slower)"


@dataclass(frozen=True)
class Row:
    """The time of one contender in one section.

    Attributes:
        section: the title of the section.
        name: the contender.
        milliseconds: its best time.
        times: its time divided by that of the section's first contender.
    """

    section: str
    name: str
    milliseconds: float
    times: float


def rows_of(section: str, seconds: Mapping[str, float], first: str) -> list[Row]:
    """A row per contender, relative to the contender `first`."""
    return [Row(section, name, 1e3 * value, value / seconds[first]) for name, value in seconds.items()]


def table(rows: Sequence[Row], summary: Mapping[str, float]) -> str:
    """The text that is printed: one block per section, then the summary."""
    lines, section = [], None
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(f"\n{section}")
        lines.append(f"  {row.name:<24} {row.milliseconds:>10.3f} ms {row.times:>9.2f}x")
    lines.append("")
    lines += [f"{name:<45} {value:.2f}" for name, value in summary.items()]
    return "\n".join(lines)


def write_record(path: Path, thread_count: int, rows: Sequence[Row], summary: Mapping[str, float]) -> None:
    """Write the machine, the times and the summary as JSON, atomically."""
    times = [asdict(row) for row in rows]
    record = {"info": describe(), "threads": thread_count, "rows": times, "summary": dict(summary)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1))
    print(f"wrote {path}")
