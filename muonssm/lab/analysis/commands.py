"""The command `analyze`."""

from __future__ import annotations

import argparse

from muonssm.lab.core.commands import CommandTable


def add_commands(table: CommandTable) -> None:
    """Add `analyze`."""
    text = "analyze a run: spectra, ranks, gradients and studies, as in the paper, into RUN/analysis"
    parser = table.add("analyze", _analyze, "report", text)
    parser.add_argument("folder", metavar="RUN", help="folder of a finished run or comparison")
    parser.add_argument(
        "--what", metavar="NAMES", help="names of analyses, separated by commas (default: all that apply)"
    )
    parser.add_argument(
        "--seeds", type=int, default=1, help="number of seeds of studies, which train models (default: 1)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="change a setting of the recipe that studies train",
    )
    parser.add_argument("--workers", type=int, help="number of processes of studies (default: one per core)")
    parser.add_argument("--resume", action="store_true", help="keep results that exist already")


def _analyze(arguments: argparse.Namespace) -> int:
    from muonssm.lab.report.report import write_report

    from .analyses import analyze

    names = arguments.what.split(",") if arguments.what else ()
    for name, sentences in analyze(
        arguments.folder, names, arguments.set, arguments.seeds, arguments.workers, arguments.resume
    ):
        print(f"{name}\n" + "".join(f"  {sentence}\n" for sentence in sentences), flush=True)
    print(f"report: {write_report([arguments.folder])}")
    return 0
