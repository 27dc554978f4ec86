"""The table of commands. Each imports what it needs when it runs, and does nothing here but call it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """The `muonssm` command."""
    parser = argparse.ArgumentParser(prog="muonssm", description="State space models with Muon memory updates.")
    parser.add_argument("--version", action="version", version=f"muonssm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_info, _add_bench, _add_train, _add_compare, _add_eval, _add_predict, _add_stream):
        add(commands)
    parsed = parser.parse_args(arguments)
    try:
        return parsed.run(parsed)
    except BrokenPipeError:  # whoever read this has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ImportError, OSError) as error:
        print(f"muonssm {parsed.command}: {_advice(parsed, error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nmuonssm {parsed.command}: stopped; --resume goes on, where there is one", file=sys.stderr)
        return 130


def _advice(parsed: argparse.Namespace, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"needs the extra `{parsed.extra}` (pip install 'muonssm[{parsed.extra}]'): {error}"
    return str(error)


def _command(commands: Any, name: str, run: Any, extra: str, text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run, extra=extra)
    return parser


def _add_info(commands: Any) -> None:
    _command(commands, "info", _info, "dev", "versions, device, and which implementations are usable here")


def _info(_: argparse.Namespace) -> int:
    from .info import describe

    print(describe())
    return 0


def _add_bench(commands: Any) -> None:
    bench = _command(commands, "bench", _bench, "bench", "our implementations and their peers side by side")
    bench.add_argument("--output", default="runs/bench", help="folder for what is measured, and a picture")
    bench.add_argument("--mixers", action="store_true", help="whole mixers in place of the operator")
    bench.add_argument("--training", action="store_true", help="training steps of the activity recipe")
    bench.add_argument("--rounds", type=int, default=15, help="rounds of which the best counts")
    bench.add_argument("--threads", type=int, default=2)
    bench.add_argument("--longest", type=int, default=131072, help="where the sweep over lengths ends")


def _bench(arguments: argparse.Namespace) -> int:
    from .bench import mixers, suite, training

    for asked, module in ((arguments.mixers, mixers), (arguments.training, training)):
        if asked:
            return module.run(Path(arguments.output), arguments.rounds, arguments.threads)
    return suite.run(Path(arguments.output), arguments.rounds, arguments.threads, arguments.longest)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a .toml file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="changes the recipe")
    parser.add_argument("--output", help="folder of the run; runs/RECIPE by default")
    parser.add_argument("--resume", action="store_true", help="goes on where an earlier run stopped")


def _add_train(commands: Any) -> None:
    _add_recipe(_command(commands, "train", _train, "activity", "trains one model by a recipe"))


def _train(arguments: argparse.Namespace) -> int:
    from .training.recipe import Recipe
    from .training.trainer import train

    recipe = Recipe.load(arguments.recipe, arguments.set)
    output = Path(arguments.output or f"runs/{recipe.name}")
    metrics = train(recipe, output, arguments.resume)
    if os.environ.get("RANK", "0") != "0":  # of several processes one speaks
        return 0
    _print_scores(recipe, metrics)
    print(f"the run is in {output}")
    return 0


def _print_scores(recipe: Any, scores: dict[str, Any]) -> None:
    parts = {**{part: scores[part] for part in ("validation", "test")}, **scores.get("more", {})}
    for part, values in parts.items():
        print(f"{part:<11}" + "".join(f"  {m.title} {m.show(values[m.name])}" for m in recipe.task.metrics))


def _add_compare(commands: Any) -> None:
    compare = _command(commands, "compare", _compare, "activity", "plain against Muon on equal terms, with a report")
    _add_recipe(compare)
    compare.add_argument("--seeds", type=int, default=1, help="how many seeds")
    compare.add_argument("--folds", type=int, default=1, help="on how many folds")
    compare.add_argument("--against", metavar="PEER", help="another classifier on the same windows: minirocket")


def _compare(arguments: argparse.Namespace) -> int:
    from .analysis.comparison import write_report
    from .training.compare import compare, table
    from .training.recipe import Recipe

    recipe = Recipe.load(arguments.recipe, arguments.set)
    output = Path(arguments.output or f"runs/compare-{recipe.name}")
    result = compare(recipe, output, arguments.seeds, arguments.folds, arguments.against, arguments.resume)
    print(table(result))
    print(f"\nthe page is {write_report(output)}")
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="folder of a finished run")


def _add_eval(commands: Any) -> None:
    _add_run(_command(commands, "eval", _eval, "activity", "scores a run again from its weights"))


def _eval(arguments: argparse.Namespace) -> int:
    from .training.evaluate import evaluate
    from .training.folder import RunFolder
    from .training.recipe import Recipe

    scores = evaluate(arguments.folder)
    _print_scores(Recipe.from_dict(RunFolder(arguments.folder).read("recipe.json")), scores)
    return 0


def _add_predict(commands: Any) -> None:
    predict = _command(commands, "predict", _predict, "activity", "the class of every window of a recording")
    _add_run(predict)
    predict.add_argument("file", metavar="FILE.csv", help="a recording with the channels of the training data")


def _predict(arguments: argparse.Namespace) -> int:
    from .tasks.recognise import predict
    from .training.folder import RunFolder

    recipe, facts, model = RunFolder(arguments.folder).load_model("activity")
    for found in predict(model, recipe.task.data, facts, arguments.file):  # type: ignore[attr-defined]
        print(found)
    return 0


def _add_stream(commands: Any) -> None:
    stream = _command(commands, "stream", _stream, "activity", "classes while samples come in, and the time they take")
    _add_run(stream)
    stream.add_argument("file", metavar="FILE.csv|-", help="a recording, or - for lines of numbers from a pipe")


def _stream(arguments: argparse.Namespace) -> int:
    from .tasks.recognise import rows_from, rows_of, stream
    from .training.folder import RunFolder

    recipe, facts, model = RunFolder(arguments.folder).load_model("activity")
    config = recipe.task.data  # type: ignore[attr-defined]
    piped = arguments.file == "-"
    rows = rows_from(sys.stdin, facts["channels"]) if piped else rows_of(arguments.file, config, facts)
    for found in stream(model, config, facts, rows):
        print(found, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
