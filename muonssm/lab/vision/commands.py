"""Commands for vision: explain, corrupt, and the robustness mode of eval."""

from __future__ import annotations

import argparse
from pathlib import Path

from muonssm.lab.core.command_table import CommandTable

from . import EXTRA


def add_commands(table: CommandTable) -> None:
    """Add explain and corrupt, and `eval --robustness`."""
    _add_explain(table)
    _add_corrupt(table)
    _add_robustness(table)


def _add_explain(table: CommandTable) -> None:
    text = "draw what a vision model sees: Grad-CAM, boxes and masks, or the class of each pixel"
    parser = table.add("explain", _explain, EXTRA, text)
    parser.add_argument("folder", metavar="RUN", help="a finished run, or a comparison (shows plain beside Muon)")
    parser.add_argument("images", metavar="IMAGE", nargs="*", help="image files (default: images of the test set)")
    parser.add_argument("--count", type=int, default=8, help="number of test images (default: 8)")
    parser.add_argument("--output", help="folder of the pictures (default: RUN/explain)")


def _explain(arguments: argparse.Namespace) -> int:
    from .explain import explain

    for path in explain(arguments.folder, arguments.images, arguments.count, arguments.output):
        print(path)
    return 0


def _add_corrupt(table: CommandTable) -> None:
    text = "apply ImageNet-C's fifteen corruptions to your own images"
    parser = table.add("corrupt", _corrupt, EXTRA, text)
    parser.add_argument("source", metavar="SOURCE", help="folder with one folder of images per class")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write to; existing files are kept")
    parser.add_argument("--count", type=int, help="first images of each class (default: all)")
    parser.add_argument("--size", type=int, help="center crop of this size (default: whole images)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random corruptions (default: 0)")


def _corrupt(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.untrusted import printable

    from .corruptions import corrupt_folder
    from .images import list_skipped

    source, output, count = Path(arguments.source), Path(arguments.output), arguments.count
    new, skipped = corrupt_folder(source, output, size=arguments.size, seed=arguments.seed, count=count)
    print(f"{new} new images in {arguments.output}")
    for line in list_skipped(skipped):
        print(printable(line))
    return 0


def _add_robustness(table: CommandTable) -> None:
    parser = table.add_mode("eval", "robustness", _evaluate_robustness, EXTRA)
    sets = ("imagenet-c", "imagenet-r", "imagenet-a")
    parser.add_argument("--robustness", choices=sets, help="score a classifier on corrupted or hard images")
    text = "for imagenet-c: a run scored on the same images, whose errors CE is relative to (default: AlexNet's)"
    parser.add_argument("--reference", metavar="RUN", help=text)


def _evaluate_robustness(arguments: argparse.Namespace) -> int:
    from .robustness import evaluate_robustness

    if arguments.data is None:
        raise ValueError(f"--data must be the folder of {arguments.robustness}, got nothing")
    options = {"batch_size": arguments.batch_size, "reference": arguments.reference}
    for line in evaluate_robustness(arguments.folder, arguments.robustness, arguments.data, **options):
        print(line)
    return 0
