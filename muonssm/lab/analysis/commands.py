"""The commands `analyze` and `study`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from muonssm.lab.core.command_table import CommandTable
from muonssm.lab.core.registry import study_files, task_class

STUDY_LISTS = ("recipes", "backbones", "variants", "peers", "analyses")  # of a grid, and options of `study`


def add_commands(table: CommandTable) -> None:
    """Add `analyze` and `study`."""
    _add_study(table)
    text = "analyze a run or a comparison (spectra, ranks, gradients, ablations), and update its report"
    parser = table.add("analyze", _analyze, "report", text)
    parser.add_argument("folder", metavar="RUN", help="folder of a finished run or comparison")
    parser.add_argument(
        "--what",
        metavar="NAMES",
        help="names of analyses, separated by commas; a wrong name lists them (default: all that apply)",
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


def _add_study(table: CommandTable) -> None:
    text = "compare variants over several recipes and backbones, analyze them, and write one report"
    parser = table.add("study", _study, "activity", text)
    names = ", ".join(sorted(study_files()))
    parser.add_argument("study", metavar="STUDY", help=f"name of a study ({names}), or a .toml file")
    for name in STUDY_LISTS:
        parser.add_argument(f"--{name}", metavar="NAMES", help=f"{name}, separated by commas (default: the study's)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the study's)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="[NAME:]SECTION.KEY=VALUE",
        help="change a setting of every recipe, or of one recipe or backbone, like watch-small:training.epochs=5 or "
        "mamba:training.epochs=5; in a study in stages, STAGE:SECTION.KEY=VALUE or STAGE.KEY=VALUE",
    )
    parser.add_argument("--output", help="folder of the study (default: runs/study-STUDY)")
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted study, also with more seeds")


def _stages(arguments: argparse.Namespace) -> int | None:
    """Run a study in stages, whose task knows them; None for a grid."""
    from muonssm.lab.core.recipe import read_toml

    name = arguments.study
    path = Path(name) if name.endswith(".toml") else study_files().get(name)
    if path is None or not path.is_file() or "stages" not in (content := read_toml(path, "STUDY")):
        return None
    for option in ("recipes", "peers", "analyses", "workers"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} must be left out for a study in stages, got {getattr(arguments, option)!r}")
    options = {key: getattr(arguments, key) for key in ("set", "resume", "seeds", "variants", "backbones")}
    for text in task_class(content.get("task")).run_stages(path, arguments.output, options):
        print(text, flush=True)
    return 0


def _study(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.grid import Grid, run_grid
    from muonssm.lab.report.study_page import text_table, write_study

    from .analyses import analyze, check_names

    if (stages := _stages(arguments)) is not None:
        return stages
    replacements: dict[str, Any] = {} if arguments.seeds is None else {"seeds": arguments.seeds}
    for name in STUDY_LISTS:
        if (value := getattr(arguments, name)) is not None:
            replacements[name] = tuple(part.strip() for part in value.split(",") if part.strip())
    grid = Grid.load(arguments.study, arguments.set, **replacements)
    for cell in grid.cells():
        check_names(grid.recipe(*cell).task, grid.analyses, "--analyses")
    result = run_grid(grid, arguments.output or f"runs/study-{grid.name}", arguments.resume, arguments.workers)
    print(text_table(result), flush=True)
    for folder in result.folders if grid.analyses else ():
        for name, sentences in analyze(folder, grid.analyses, workers=arguments.workers, resume=True):
            print(f"{folder.name}, {name}: {sentences[0] if sentences else 'done'}", flush=True)
    print(f"\nreport: {write_study(result)}")
    return 0


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
