"""`CommandTable`: the subcommands of `muonssm`. Each room adds its own in its `commands.py`:

    def add_commands(table: CommandTable) -> None:
        parser = table.add("predict", _predict, "activity", "classify every window of a recording")
        add_run_argument(parser)

A command imports what it needs when it runs, so that `muonssm --help` is fast and needs no extra.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable

from .registry import recipe_files

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


def add_recipe_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """RECIPE, --set, --output and --resume; `output` is the folder's default name. The help lists all recipes."""
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, listed below, or a .toml file")
    text = "change a setting, such as training.epochs=5; can be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)
    parser.add_argument("--output", metavar="DIR", help=f"folder of the results (default: {output})")
    parser.add_argument("--resume", action="store_true", help="continue after an interruption; finished runs are kept")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = textwrap.wrap(", ".join(sorted(recipe_files())), 78, break_on_hyphens=False)
    parser.epilog = "\n".join(["recipes:", *(f"  {line}" for line in names)])


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN, the folder of a finished run."""
    parser.add_argument("folder", metavar="RUN", help="folder of a finished run")
