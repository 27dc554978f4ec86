"""The `muonssm` command: collects the commands of each room, runs one, and turns errors into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from muonssm.lab.core.command_table import CommandTable, select
from muonssm.lab.core.files import sentence
from muonssm.lab.core.openmp import let_waiting_threads_sleep
from muonssm.lab.core.processes import leave_group
from muonssm.lab.core.torchvision_cpu import prepare_torchvision
from muonssm.lab.core.untrusted import printable
from muonssm.version import __version__

ROOMS = ("core", "report", "activity", "language", "vision", "analysis", "bench")  # each has a commands.py
TOO_LARGE = ("DefaultCPUAllocator", "Storage size calculation overflowed", "multiplication overflow")  # torch's words
DECODING = {"generate", "stream"}  # steps of microseconds, which threads that sleep would slow down


def build_parser() -> argparse.ArgumentParser:
    """The parser with the commands of all rooms."""
    text = "Train, compare and explain state space models whose memory has momentum and normalized writes."
    parser = argparse.ArgumentParser(prog="muonssm", description=text)
    parser.add_argument("--version", action="version", version=f"muonssm {__version__}")
    table = CommandTable(parser)
    for room in ROOMS:
        import_module(f"muonssm.lab.{room}.commands").add_commands(table)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `muonssm` command; return its exit code."""
    if arguments is None and not set(sys.argv[1:2]) & DECODING:
        let_waiting_threads_sleep()
    parsed = build_parser().parse_args(arguments)
    run, extra = select(parsed)
    prepare_torchvision()  # before a command imports transformers, which imports torchvision if it is installed
    try:
        return run(parsed)
    except BrokenPipeError:  # the reader of our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        return _fail(parsed.command, f"needs the extra `{extra}` (pip install 'muonssm[{extra}]'): {error}")
    except (ValueError, TypeError, ImportError, OSError) as error:
        if isinstance(error, TypeError) and "must be" not in str(error):
            raise  # a bug, not a wrong setting
        return _fail(parsed.command, sentence(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        return _fail(parsed.command, f"not enough memory: {reason}")
    except KeyboardInterrupt:
        print(f"\nmuonssm {parsed.command}: interrupted; commands with --resume can continue", file=sys.stderr)
        return 130
    finally:
        leave_group()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch could not allocate memory; torch is not imported here, see `openmp`."""
    by_torch = type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in TOO_LARGE)
    return isinstance(error, MemoryError) or by_torch


def _fail(command: str, text: str) -> int:
    """Print why a command failed, with control characters escaped; return its exit code."""
    lines = "\n".join(printable(line) for line in text.split("\n"))
    print(f"muonssm {command}: {lines}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
