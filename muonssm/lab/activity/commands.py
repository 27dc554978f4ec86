"""The commands of activity recognition: `muonssm predict` and `muonssm stream`."""

from __future__ import annotations

import argparse
import sys

from muonssm.lab.core.commands import CommandTable, add_run_argument


def add_commands(table: CommandTable) -> None:
    """Add predict and stream."""
    predict = table.add("predict", _predict, "activity", "classify every window of a recording")
    add_run_argument(predict)
    predict.add_argument("file", metavar="FILE.csv", help="a recording with the channels of the training data")
    stream = table.add("stream", _stream, "activity", "classify windows while samples arrive, and time each sample")
    add_run_argument(stream)
    stream.add_argument(
        "file", metavar="FILE.csv|-", help="a recording, or - to read comma-separated lines from a pipe"
    )


def _predict(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.run_folder import RunFolder

    from .predict import predict

    recipe, metadata, model = RunFolder(arguments.folder).load_model("activity")
    for prediction in predict(model, recipe.task.data, metadata, arguments.file):  # type: ignore[attr-defined]
        print(prediction)
    return 0


def _stream(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.run_folder import RunFolder

    from .predict import file_samples, piped_samples, stream

    recipe, metadata, model = RunFolder(arguments.folder).load_model("activity")
    config = recipe.task.data  # type: ignore[attr-defined]
    if arguments.file == "-":
        samples = piped_samples(sys.stdin, metadata["channels"])
    else:
        samples = file_samples(arguments.file, config, metadata)
    for prediction in stream(model, config, metadata, samples):
        print(prediction, flush=True)
    return 0
