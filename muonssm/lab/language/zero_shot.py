"""The paper's table of zero-shot scores: its columns, and a result of `harness.run_harness` as its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

Result = dict[str, Any]


class Column(NamedTuple):
    """A column of the paper's table: lm-eval's names of the task and the metric, and the paper's heading."""

    task: str
    metric: str
    heading: str

    @property
    def key(self) -> str:
        """What the column is called in messages and among published figures."""
        return f"{self.task} {self.metric}"

    @property
    def is_accuracy(self) -> bool:
        """In percent, and part of the average; the others are perplexities."""
        return self.metric.startswith("acc")


PAPER_TASKS = (
    Column("wikitext", "word_perplexity", "Wiki."),
    Column("lambada_openai", "perplexity", "LMB."),
    Column("lambada_openai", "acc", "LMB."),
    Column("piqa", "acc", "PIQA"),
    Column("hellaswag", "acc_norm", "Hella."),
    Column("winogrande", "acc", "Wino."),
    Column("arc_easy", "acc", "ARC-e"),
    Column("arc_challenge", "acc_norm", "ARC-c"),
    Column("social_iqa", "acc", "SIQA"),
    Column("boolq", "acc", "BoolQ"),
)
AVERAGE = "average"
SHORT = {"word_perplexity": "ppl", "perplexity": "ppl", "acc_norm": "acc_n"}


def rows(
    result: Result, published: Mapping[str, Mapping[str, float]] | None = None, name: str = "this model"
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Rows of the paper's table by name, empty if none of its columns was scored; and all other figures.

    A row has figures by column, in percent but for perplexities: ours, their standard errors, those of `published`.
    """
    tasks = result["tasks"]
    figures = {f"{task} {metric}": value for task in tasks for metric, value in tasks[task]["metrics"].items()}
    figures = {key: math.nan if value is None else value for key, value in figures.items()}  # JSON has no nan
    ours = {c.key: figures.pop(c.key) * (100 if c.is_accuracy else 1) for c in PAPER_TASKS if c.key in figures}
    if not ours:
        return {}, figures
    accuracies = [column.key for column in PAPER_TASKS if column.is_accuracy]
    if set(accuracies) <= set(ours):
        ours[AVERAGE] = statistics.fmean(ours[key] for key in accuracies)
    counted = {c.key: tasks[c.task]["samples"] - 1 for c in PAPER_TASKS if c.is_accuracy and c.key in ours}
    errors = {key: math.sqrt(ours[key] * (100 - ours[key]) / n) for key, n in counted.items() if n > 0}
    paper = {f"paper, {kind}": dict(row) for kind, row in (published or {}).items()}
    return {name: ours, "standard error": errors, **paper}, figures


def notes(result: Result) -> list[str]:
    """What has to be known of the figures."""
    lines, tasks = [], result["tasks"]
    limit, length = result["settings"]["limit"], result["settings"]["max_length"]
    if limit is not None:
        lines.append(f"of at most {limit} samples of each task: not comparable with figures of all samples")
    cut = {task: score["truncated"] for task, score in tasks.items() if score.get("truncated")}
    return lines + [f"{task}: {n} texts cut off at the beginning, at {length} tokens" for task, n in cut.items()]


def missing(row: Mapping[str, float]) -> str:
    """Columns that a row does not have, in words; nothing where it has all."""
    absent = ", ".join(column.key for column in PAPER_TASKS if column.key not in row)
    return f"missing: {absent}" + ("" if AVERAGE in row else "; so there is no average") if absent else ""


def table(result: Result, published: Mapping[str, Mapping[str, float]] | None = None, name: str = "this model") -> str:
    """What is printed: the paper's table with our row and those of `published`, then other figures, then notes."""
    found, others = rows(result, published, name)
    lines = _lines(found) if found else []
    if found and missing(found[name]):
        lines.append(missing(found[name]))
    lines += [f"{key}: {number(value, 4)}" for key, value in others.items()]
    return "\n".join([*lines, *notes(result)])


def cells(found: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """The paper's columns as text, two rows of headings first; `-` for what is not there."""
    head = [["", *(column.heading for column in PAPER_TASKS), "Avg."]]
    head.append(["", *(SHORT.get(column.metric, column.metric) for column in PAPER_TASKS), "acc"])
    keys = [*(column.key for column in PAPER_TASKS), AVERAGE]
    return head + [[name, *(number(row[key], 2) if key in row else "-" for key in keys)] for name, row in found.items()]


def _lines(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    text = cells(found)
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    shapes = [f"<{widths[0]}", *(f">{width}" for width in widths[1:])]
    return ["  ".join(map(format, line, shapes)) for line in text]


def number(value: float, digits: int) -> str:
    """With so many digits after the point, unless it is huge."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"
