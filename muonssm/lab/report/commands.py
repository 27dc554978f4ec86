"""The commands `compare` and `report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from muonssm.lab.core.commands import CommandTable, add_recipe_arguments


def add_commands(table: CommandTable) -> None:
    """Add `compare`, which also writes the report, and `report`."""
    compare = table.add("compare", _compare, "activity", "train plain and Muon on equal terms, and write a report")
    add_recipe_arguments(compare)
    compare.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    compare.add_argument("--folds", type=int, default=1, help="number of cross-validation folds (default: 1)")
    compare.add_argument("--against", metavar="PEER", help="also train a classifier of another library")
    text = "write one HTML page about runs and comparisons: scores beside the paper's, figures, analyses, settings"
    report = table.add("report", _report, "report", text)
    report.add_argument("runs", metavar="RUN", nargs="+", help="folder of a finished run or comparison")
    default = "RUN/report.html; for several runs: runs/report.html"
    report.add_argument("--output", metavar="FILE.html", help=f"where to write the page (default: {default})")


def _compare(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.compare import compare, table
    from muonssm.lab.core.recipe import Recipe

    from .report import write_report

    recipe = Recipe.load(arguments.recipe, arguments.set)
    output = Path(arguments.output or f"runs/compare-{recipe.name}")
    result = compare(recipe, output, arguments.seeds, arguments.folds, arguments.against, arguments.resume)
    print(table(result))
    print(f"\nreport: {write_report([output])}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from .report import write_report

    print(f"report: {write_report(arguments.runs, arguments.output)}")
    return 0
