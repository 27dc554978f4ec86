"""The commands that serve every task: `info`, `train` and `eval`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .command_table import CommandTable, add_recipe_arguments, add_run_argument
from .processes import is_first_process


def add_commands(table: CommandTable) -> None:
    """Add `info`, `train` and `eval`. `compare` also writes the report, so the report room adds it."""
    info = table.add("info", _info, "dev", "show versions, device and usable implementations")
    info.add_argument("--check", action="store_true", help="compare the GPU kernels with chunked on this device")
    add_recipe_arguments(table.add("train", _train, "activity", "train one model by a recipe"), "runs/RECIPE")
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
