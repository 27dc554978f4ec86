"""The commands `compare` and `report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from muonssm.lab.core.command_table import CommandTable, add_recipe_arguments
from muonssm.lab.core.variants import DEFAULT_VARIANTS, VARIANTS


def add_commands(table: CommandTable) -> None:
    """Add `compare`, which also writes the report, and `report`."""
    compare = table.add("compare", _compare, "activity", "train variants on equal terms, and write a report")
    add_recipe_arguments(compare, "runs/compare-RECIPE")
    default = ",".join(DEFAULT_VARIANTS)
    text = f"variants to train, separated by commas (default: {default}); they are listed below"
    compare.add_argument("--variants", metavar="NAMES", default=default, help=text)
    compare.epilog = f"{_variant_lines()}\n\n{compare.epilog}"
    compare.add_argument("--seeds", type=int, default=1, help="number of seeds (default: 1)")
    compare.add_argument("--folds", type=int, default=1, help="number of cross-validation folds (default: 1)")
    text = "also train a classifier of another library; each task has its own, and a wrong name lists them"
    compare.add_argument("--against", metavar="PEER", help=text)
    text = "runs to train side by side, each with its share of the cores (default: 1)"
    compare.add_argument("--workers", type=int, default=1, metavar="N", help=text)
    text = "write one HTML page about runs and comparisons: scores beside the paper's, figures, analyses, settings"
    report = table.add("report", _report, "report", text)
    report.add_argument("runs", metavar="RUN", nargs="+", help="folder of a finished run or comparison")
    default = "RUN/report.html; for several runs: runs/report.html"
    report.add_argument("--output", metavar="FILE.html", help=f"where to write the page (default: {default})")


def _variant_lines() -> str:
    """The table of variants for `--help`."""
    lines = [f"  {name:<{max(map(len, VARIANTS))}}  {variant.text}" for name, variant in VARIANTS.items()]
    return "\n".join(["variants, each compared with plain:", *lines])


def _compare(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.compare import compare, table
    from muonssm.lab.core.lock import locked
    from muonssm.lab.core.recipe import Recipe

    from .report import write_report

    recipe = Recipe.load(arguments.recipe, arguments.set)
    output = Path(arguments.output or f"runs/compare-{recipe.name}")
    variants = [name.strip() for name in arguments.variants.split(",")]
    counts = (arguments.seeds, arguments.folds)
    with locked(output):
        result = compare(recipe, output, *counts, arguments.against, arguments.resume, variants, arguments.workers)
        print(table(result))
        print(f"\nreport: {write_report([output])}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from .report import write_report

    print(f"report: {write_report(arguments.runs, arguments.output)}")
    return 0
