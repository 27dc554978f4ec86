"""The command `bench` for tests."""

from __future__ import annotations

import argparse

from muonssm.lab.bench.commands import add_commands
from muonssm.lab.core.command_table import CommandTable


def run_command(*arguments):
    """Run `muonssm bench` as the command line does."""
    parser = argparse.ArgumentParser()
    add_commands(CommandTable(parser))
    parsed = parser.parse_args(["bench", *arguments])
    return parsed.run(parsed)
