"""Further commands of the table in cli.py: those that look at what was trained. No logic here either."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

Command = Callable[[Any, str, Any, str, str], argparse.ArgumentParser]


def add(commands: Any, command: Command) -> None:
    """Adds them to the table; `command` makes the parser of one."""
    for add_one in (_add_analyze, _add_report, _add_explain, _add_corrupt):
        add_one(commands, command)


def _add_analyze(commands: Any, command: Command) -> None:
    text = "spectra, ranks, gradients and studies of a run, as in the paper, into RUN/analysis"
    analyze = command(commands, "analyze", _analyze, "activity", text)
    analyze.add_argument("folder", metavar="RUN", help="a finished run, or a comparison: plain beside Muon")
    analyze.add_argument("--what", help="names with commas between; all that apply by default")
    analyze.add_argument("--seeds", type=int, default=1, help="of studies, which train anew")
    analyze.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="changes what they train"
    )
    analyze.add_argument("--workers", type=int, help="processes of studies; one a core by default")
    analyze.add_argument("--resume", action="store_true", help="keeps results that are there")


def _analyze(arguments: argparse.Namespace) -> int:
    from muonssm.lab.analysis.analyze import Plan, analyze
    from muonssm.lab.report.report import write_report

    what = tuple(arguments.what.split(",")) if arguments.what else ()
    plan = Plan(what, tuple(arguments.set), arguments.seeds, arguments.workers, arguments.resume)
    for name, found in analyze(arguments.folder, plan):
        print(f"{name}\n" + "".join(f"  {line}\n" for line in found), flush=True)
    print(f"the page is {write_report([arguments.folder])}")
    return 0


def _add_report(commands: Any, command: Command) -> None:
    text = "one page on runs and comparisons: tables beside the paper's, figures, analyses, configuration"
    report = command(commands, "report", _report, "activity", text)
    report.add_argument("runs", metavar="RUN", nargs="+", help="folders of finished runs and comparisons")
    report.add_argument("--output", metavar="FILE.html", help="RUN/report.html by default; of several runs/report.html")


def _report(arguments: argparse.Namespace) -> int:
    from muonssm.lab.report.report import write_report

    print(f"the page is {write_report(arguments.runs, arguments.output)}")
    return 0


def _add_explain(commands: Any, command: Command) -> None:
    text = "pictures of what a vision model sees: Grad-CAM, boxes and masks, classes of pixels"
    explain = command(commands, "explain", _explain, "vision", text)
    explain.add_argument("folder", metavar="RUN", help="a finished run, or a comparison: plain beside Muon")
    explain.add_argument("images", metavar="IMAGE", nargs="*", help="image files; without any, of the test part")
    explain.add_argument("--count", type=int, default=8, help="how many of the test part")
    explain.add_argument("--output", help="folder of the pictures; RUN/explain by default")


def _explain(arguments: argparse.Namespace) -> int:
    from muonssm.lab.vision.explain import explain

    for path in explain(arguments.folder, arguments.images, arguments.count, arguments.output):
        print(path)
    return 0


def _add_corrupt(commands: Any, command: Command) -> None:
    corrupt = command(commands, "corrupt", _corrupt, "vision", "one's own images in ImageNet-C's fifteen corruptions")
    corrupt.add_argument("source", metavar="SOURCE", help="a folder with a folder of images for each class")
    corrupt.add_argument("output", metavar="OUTPUT", help="where to write; what is there already stays")
    corrupt.add_argument("--size", type=int, help="the middle of each image at this size; as they are by default")
    corrupt.add_argument("--seed", type=int, default=0)


def _corrupt(arguments: argparse.Namespace) -> int:
    from muonssm.lab.vision.corruptions import corrupt_folder

    new = corrupt_folder(Path(arguments.source), Path(arguments.output), size=arguments.size, seed=arguments.seed)
    print(f"{new} new images in {arguments.output}")
    return 0
