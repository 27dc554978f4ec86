"""The command table, and the commands that serve every task: info, train, compare, eval.

Each room adds its own commands in its `commands.py`:

    def add_commands(table: CommandTable) -> None:
        parser = table.add("predict", _predict, "activity", "classify every window of a recording")
        add_run_argument(parser)

A command imports what it needs when it runs, so that `muonssm --help` is fast and needs no extra.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .processes import is_first_process

Run = Callable[[argparse.Namespace], int]


class CommandTable:
    """The subcommands of `muonssm`, filled by each room's `add_commands`."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
        self._parsers: dict[str, argparse.ArgumentParser] = {}

    def add(self, name: str, run: Run, extra: str, text: str) -> argparse.ArgumentParser:
        """Add a command. `extra` is the pip extra that it needs; an ImportError names it."""
        parser = self._subparsers.add_parser(name, help=text, description=text)
        parser.set_defaults(run=run, extra=extra, modes={})
        self._parsers[name] = parser
        return parser

    def add_mode(self, name: str, option: str, run: Run, extra: str) -> argparse.ArgumentParser:
        """Give a command another mode: when `--option` is set, `run` replaces it. Returns the command's parser."""
        parser = self._parsers[name]
        parser.get_default("modes")[option] = (run, extra)
        return parser


def select(parsed: argparse.Namespace) -> tuple[Run, str]:
    """What a parsed command line runs, and the extra it needs."""
    for option, mode in parsed.modes.items():
        if getattr(parsed, option) is not None:
            return mode
    return parsed.run, parsed.extra


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """RECIPE, --set, --output and --resume."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, or a .toml file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="change a setting")
    parser.add_argument("--output", help="folder of the run (default: runs/RECIPE)")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN, the folder of a finished run."""
    parser.add_argument("folder", metavar="RUN", help="folder of a finished run")


def add_commands(table: CommandTable) -> None:
    """info, train and eval. `compare` also writes the report, so that the report room adds it."""
    info = table.add("info", _info, "dev", "show versions, device and usable implementations")
    info.add_argument("--check", action="store_true", help="compare the GPU kernels with chunked on this device")
    add_recipe_arguments(table.add("train", _train, "activity", "train one model by a recipe"))
    add_run_argument(table.add("eval", _eval, "activity", "score a finished run again"))


def _info(arguments: argparse.Namespace) -> int:
    from .info import check_kernels, describe

    if arguments.check:
        text, passed = check_kernels()
        print(text)
        return 0 if passed else 1
    print(describe())
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from .recipe import Recipe
    from .trainer import train

    recipe = Recipe.load(arguments.recipe, arguments.set)
    output = Path(arguments.output or f"runs/{recipe.name}")
    metrics = train(recipe, output, arguments.resume)
    if not is_first_process():
        return 0
    _print_scores(recipe, metrics)
    for text in recipe.task.sample_outputs(output):
        print(text)
    print(f"run folder: {output}")
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from .evaluate import evaluate
    from .run_folder import RunFolder

    scores = evaluate(arguments.folder)
    folder = RunFolder(arguments.folder)
    reason = folder.read("metrics.json").get("diverged") if folder.is_finished else None
    _print_scores(folder.read_recipe(), {**scores, "diverged": reason})
    return 0


def _print_scores(recipe: Any, scores: dict[str, Any]) -> None:
    splits = {**{split: scores[split] for split in ("validation", "test")}, **scores.get("extra_tests", {})}
    for split, values in splits.items():
        print(f"{split:<11}" + "".join(f"  {m.title} {m.format(values[m.name])}" for m in recipe.task.metrics))
    if scores.get("diverged"):
        print(f"the run diverged: {scores['diverged']}")
