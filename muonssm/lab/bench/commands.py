"""The command `bench`."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from muonssm.checks import check_int
from muonssm.lab.core.command_table import CommandTable

MODES = {  # option and module
    "mixers": "time training steps of whole mixers",
    "training": "time training steps of the activity recipe",
    "language": "time training and decoding of small language models",
    "decode": "time decoding, beside transformers and llama.cpp",
    "vision": "time training steps of MambaVision-T",
}


def add_commands(table: CommandTable) -> None:
    """Add `bench`."""
    parser = table.add("bench", _bench, "bench", "time our implementations and their peers side by side")
    parser.add_argument("--output", default="runs/bench", help="folder of the results (default: runs/bench)")
    modes = parser.add_mutually_exclusive_group()
    for mode, text in MODES.items():
        modes.add_argument(f"--{mode}", dest="mode", action="store_const", const=mode, help=f"{text} instead")
    parser.add_argument(
        "--rounds", type=int, default=15, help="number of rounds, of which the best counts (default: 15)"
    )
    parser.add_argument("--threads", type=int, default=2, help="number of threads (default: 2)")
    parser.add_argument("--longest", type=int, default=131072, help="longest sequence of the sweep (default: 131072)")


def _bench(arguments: argparse.Namespace) -> int:
    output = Path(arguments.output)
    for name in ("rounds", "threads", "longest"):
        check_int(f"--{name}", getattr(arguments, name), 1)
    if arguments.mode is not None:
        return import_module(f".{arguments.mode}", __package__).run(output, arguments.rounds, arguments.threads)
    from . import operators

    return operators.run(output, arguments.rounds, arguments.threads, arguments.longest)
