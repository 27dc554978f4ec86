"""The commands of activity recognition: `muonssm predict`, `muonssm stream` and `muonssm export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from muonssm.lab.core.command_table import CommandTable, add_run_argument


def add_commands(table: CommandTable) -> None:
    """Add predict, stream and export."""
    predict = table.add("predict", _predict, "activity", "classify every window of a recording")
    add_run_argument(predict)
    predict.add_argument("file", metavar="FILE.csv", help="a recording with the channels of the training data")
    stream = table.add("stream", _stream, "activity", "classify windows while samples arrive, and time each sample")
    add_run_argument(stream)
    stream.add_argument(
        "file", metavar="FILE.csv|-", help="a recording, or - to read comma-separated lines from a pipe"
    )
    export = table.add("export", _export, "export", "write a trained classifier as ONNX programs, or as a web page")
    add_run_argument(export)
    export.add_argument("--to", choices=("onnx", "web"), required=True, help="ONNX programs, or a page that runs them")
    export.add_argument("--output", help="folder of the export, which must be free (default: RUN/onnx or RUN/web)")
    export.add_argument("--check", metavar="FILE.csv", help="also compare with torch at every step of this recording")
    export.add_argument(
        "--onnxruntime", metavar="FOLDER", help="a copy of the npm package onnxruntime-web, instead of npm (for web)"
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


def _export(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.run_folder import RunFolder

    from .export_onnx import Trained, export_onnx, new_folder

    if arguments.onnxruntime is not None and arguments.to != "web":
        raise ValueError(f"--onnxruntime must be left out unless --to is web, got --to {arguments.to}")
    run = RunFolder(arguments.folder)
    recipe, metadata, model = run.load_model("activity")
    trained = Trained(recipe.task.data, metadata, model)  # type: ignore[attr-defined]
    output = Path(arguments.output or run.path / arguments.to)
    with new_folder(output) as folder:
        if arguments.to == "onnx":
            differences = export_onnx(trained, folder, arguments.check)
        else:
            from .export_web import export_web
            from .onnxruntime_web import load

            files = load(arguments.onnxruntime and Path(arguments.onnxruntime))
            differences = export_web(trained, folder, files, f"{recipe.name}: {run.path.name}", arguments.check)
    for name, difference in differences.items():
        print(f"{name} equals torch: largest difference {difference:.2g}")
    for path in sorted(output.iterdir()):
        print(f"{path.stat().st_size:>12,} bytes  {path.name}")
    print(f"folder: {output}")
    return 0
