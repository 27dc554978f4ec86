"""The table of commands. Each imports what it needs when it runs, and does nothing here but call it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """The `muonssm` command."""
    parser = argparse.ArgumentParser(prog="muonssm", description="State space models with Muon memory updates.")
    parser.add_argument("--version", action="version", version=f"muonssm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    info = commands.add_parser("info", help="versions, device, and which implementations are usable here")
    info.set_defaults(run=_info)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def _info(_: argparse.Namespace) -> int:
    from .info import describe

    print(describe())
    return 0


if __name__ == "__main__":
    sys.exit(main())
