"""The paper's table of zero-shot scores: its columns, the paper's rows, and the row of an lm-eval result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from muonssm.lab.core.paper import read_table, scores_by_variant

from .zero_shot_data import TASKS

Result = dict[str, Any]  # of `lm_eval.run_harness`
Rows = Mapping[str, Mapping[str, float]]  # scores by the row's name and the column's key


class Column(NamedTuple):
    """A column of the paper's table: lm-eval's names of the task and the metric, and the paper's heading."""

    task: str
    metric: str
    heading: str

    @property
    def key(self) -> str:
        """The column's name in messages and in paper.toml."""
        return f"{self.task} {self.metric}"

    @property
    def is_accuracy(self) -> bool:
        """Whether it is an accuracy, in percent and part of the average; the others are perplexities."""
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
SHORT_NAMES = {"word_perplexity": "ppl", "perplexity": "ppl", "acc_norm": "acc_n"}


def paper_zero_shot(backbone: str) -> dict[str, dict[str, float]]:
    """The paper's scores of a 170M model, by variant (`"plain"`, `"muon"`) and column; empty where it has none."""
    rows = read_table(Path(__file__).with_name("paper.toml"))["zero_shot"]
    return scores_by_variant(rows, backbone=backbone)


def split_scores(result: Result) -> tuple[dict[str, float], dict[str, float]]:
    """The scores of a result that are in the paper's table, in its units and with the average, and all others."""
    tasks = result["tasks"]
    others = {f"{task} {metric}": value for task in tasks for metric, value in tasks[task]["metrics"].items()}
    others = {key: math.nan if value is None else value for key, value in others.items()}  # JSON has no nan
    scores = {c.key: others.pop(c.key) * (100 if c.is_accuracy else 1) for c in PAPER_TASKS if c.key in others}
    accuracies = [column.key for column in PAPER_TASKS if column.is_accuracy]
    if set(accuracies) <= set(scores):
        scores[AVERAGE] = statistics.fmean(scores[key] for key in accuracies)
    return scores, others


def standard_errors(result: Result) -> dict[str, float]:
    """The standard error of each accuracy in the paper's table, in percent."""
    scores, _ = split_scores(result)
    columns = [column for column in PAPER_TASKS if column.is_accuracy and column.key in scores]
    counts = {column.key: result["tasks"][column.task]["samples"] - 1 for column in columns}
    return {key: math.sqrt(scores[key] * (100 - scores[key]) / n) for key, n in counts.items() if n > 0}


def notes(result: Result) -> list[str]:
    """Restrictions of the scores: a limit on samples, another split, truncated texts."""
    lines, tasks = [], result["tasks"]
    limit, length = result["settings"]["limit"], result["settings"]["max_length"]
    if limit is not None:
        lines.append(f"at most {limit} samples per task: not comparable with scores of all samples")
    for task, local in (result["settings"].get("data") or {}).items():
        if task in tasks and local["split"] != TASKS[task].split:
            lines.append(
                f"{task}: the {local['split']} split was scored ({local['file']}), not the {TASKS[task].split} split"
            )
    truncated = {task: score["truncated"] for task, score in tasks.items() if score.get("truncated")}
    return lines + [f"{task}: {n} texts cut at the beginning, to {length} tokens" for task, n in truncated.items()]


def missing_columns(scores: Mapping[str, float]) -> str:
    """A sentence that names the columns without a score; empty if there are none."""
    absent = ", ".join(column.key for column in PAPER_TASKS if column.key not in scores)
    return f"missing: {absent}" + ("" if AVERAGE in scores else "; no average without them") if absent else ""


def table(result: Result, paper: Rows | None = None, name: str = "this model") -> str:
    """The result as text: the paper's table with the rows of `paper`, then other scores, then notes."""
    scores, others = split_scores(result)
    lines = []
    if scores:
        published = {f"paper, {variant}": row for variant, row in (paper or {}).items()}
        lines += aligned(table_cells({name: scores, "standard error": standard_errors(result), **published}))
        lines += [missing_columns(scores)] if missing_columns(scores) else []
    lines += [f"{key}: {format_score(value, 4)}" for key, value in others.items()]
    return "\n".join([*lines, *notes(result)])


def table_cells(rows: Rows) -> list[list[str]]:
    """The paper's columns as text, with two rows of headings; `-` where there is no score."""
    headings = [["", *(column.heading for column in PAPER_TASKS), "Avg."]]
    headings.append(["", *(SHORT_NAMES.get(column.metric, column.metric) for column in PAPER_TASKS), "acc"])
    keys = [*(column.key for column in PAPER_TASKS), AVERAGE]
    return headings + [
        [name, *(format_score(row[key], 2) if key in row else "-" for key in keys)] for name, row in rows.items()
    ]


def aligned(cells: list[list[str]]) -> list[str]:
    """The lines of a table as text, with the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    formats = [f"<{widths[0]}", *(f">{width}" for width in widths[1:])]
    return ["  ".join(map(format, line, formats)) for line in cells]


def format_score(value: float, digits: int) -> str:
    """A score with this many digits after the point; huge ones in exponent notation."""
    return f"{value:.{digits}f}" if abs(value) < 1e6 else f"{value:.3g}"
