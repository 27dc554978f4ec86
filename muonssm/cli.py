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
    bench = commands.add_parser("bench", help="our implementations and their peers side by side (extra: bench)")
    bench.add_argument("--output", default="runs/bench", help="folder for what is measured, and a picture")
    bench.add_argument("--mixers", action="store_true", help="whole mixers in place of the operator")
    bench.add_argument("--rounds", type=int, default=15, help="rounds of which the best counts")
    bench.add_argument("--threads", type=int, default=2)
    bench.add_argument("--longest", type=int, default=131072, help="where the sweep over lengths ends")
    bench.set_defaults(run=_bench)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


def _info(_: argparse.Namespace) -> int:
    from .info import describe

    print(describe())
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    try:
        from .bench import mixers, suite
    except ImportError as error:
        print(f"muonssm bench needs the extra `bench` (pip install 'muonssm[bench]'): {error}", file=sys.stderr)
        return 2
    if arguments.mixers:
        return mixers.run(Path(arguments.output), arguments.rounds, arguments.threads)
    return suite.run(Path(arguments.output), arguments.rounds, arguments.threads, arguments.longest)


if __name__ == "__main__":
    sys.exit(main())
