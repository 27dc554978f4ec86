"""Read the paper's figures from a room's `paper.toml`.

The file holds one array of tables per table of the paper. In a row, strings are labels and numbers are scores:

    [[architectures]]        # the table's name
    source = "MMAct"         # labels: which data, which backbone, ...
    backbone = "mamba"
    variant = "plain"        # every row has this label: "plain" or "muon"
    accuracy = 71.46         # scores, by the metric's name in files
    f1 = 71.68

    table = read_table(Path(__file__).with_name("paper.toml"))
    scores_by_variant(table["architectures"], source="MMAct", backbone="mamba")   # {"plain": {"accuracy": 71.46, ...}}
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, str | float]


@functools.cache
def read_table(path: Path) -> dict[str, list[Row]]:
    """Read the rows of every table in a `paper.toml`, by the table's name."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, rows in tables.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise TypeError(f"{name} must be an array of tables ([[{name}]]) in {path}, got {rows!r}")
        for row in rows:
            _check_row(row, f"[[{name}]] in {path}")
    return tables


def scores_by_variant(rows: Sequence[Row], **labels: str) -> dict[str, dict[str, float]]:
    """Select the rows with these labels; return their scores by variant and metric. Empty where no row has them."""
    selected = [row for row in rows if all(row.get(name) == value for name, value in labels.items())]
    scores = {str(row["variant"]): _scores(row) for row in selected}
    if len(scores) < len(selected):
        raise ValueError(f"labels must select one row per variant, got {len(selected)} rows for {labels}")
    return scores


def _scores(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if not isinstance(value, str)}


def _check_row(row: Row, place: str) -> None:
    if row.get("variant") not in ("plain", "muon"):
        raise ValueError(f"variant must be 'plain' or 'muon' in {place}, got {row.get('variant')!r}")
    for name, value in row.items():
        if not isinstance(value, str | float):
            raise TypeError(f"{name} must be a string or a float in {place}, got {value!r}")
