"""The table of commands. Each imports what it needs when it runs, and does nothing here but call it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muonssm import cli_analysis
from muonssm.lab.core.torchvision_cpu import prepare_torchvision
from muonssm.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """The `muonssm` command."""
    parser = argparse.ArgumentParser(prog="muonssm", description="State space models with Muon memory updates.")
    parser.add_argument("--version", action="version", version=f"muonssm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    adding = (_add_info, _add_bench, _add_prepare, _add_train, _add_compare, _add_eval, _add_predict, _add_stream)
    for add in (*adding, _add_generate, _add_needle):
        add(commands)
    cli_analysis.add(commands, _command)
    parsed = parser.parse_args(arguments)
    prepare_torchvision()  # before a command imports transformers, which imports torchvision if it is installed
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
    from muonssm.lab.core.info import describe

    print(describe())
    return 0


def _add_bench(commands: Any) -> None:
    bench = _command(commands, "bench", _bench, "bench", "our implementations and their peers side by side")
    bench.add_argument("--output", default="runs/bench", help="folder for what is measured, and a picture")
    bench.add_argument("--mixers", action="store_true", help="whole mixers in place of the operator")
    bench.add_argument("--training", action="store_true", help="training steps of the activity recipe")
    bench.add_argument("--language", action="store_true", help="training and decoding of small language models")
    bench.add_argument("--vision", action="store_true", help="training steps of MambaVision-T")
    bench.add_argument("--rounds", type=int, default=15, help="rounds of which the best counts")
    bench.add_argument("--threads", type=int, default=2)
    bench.add_argument("--longest", type=int, default=131072, help="where the sweep over lengths ends")


def _bench(arguments: argparse.Namespace) -> int:
    from muonssm.lab.bench import language, mixers, training, vision
    from muonssm.lab.bench import operators as suite

    asked = (
        (arguments.mixers, mixers),
        (arguments.training, training),
        (arguments.language, language),
        (arguments.vision, vision),
    )
    for wanted, module in asked:
        if wanted:
            return module.run(Path(arguments.output), arguments.rounds, arguments.threads)
    return suite.run(Path(arguments.output), arguments.rounds, arguments.threads, arguments.longest)


def _add_prepare(commands: Any) -> None:
    prepare = _command(commands, "prepare", _prepare, "language", "text to token shards to train language models on")
    prepare.add_argument("source", metavar="SOURCE", help="stdlib, fineweb-edu, alpaca, owner/name, a file or a folder")
    prepare.add_argument("--output", required=True, help="folder of the tokens")
    prepare.add_argument("--tokenizer", help="a name on the hub, a folder or a tokenizer.json; or one is trained")
    prepare.add_argument("--vocab-size", type=int, default=32000, help="of a tokenizer that is trained")
    prepare.add_argument("--kind", help="text or instructions; by default what the source is")
    prepare.add_argument("--field", default="text", help="the field of a row that has the text")
    prepare.add_argument("--validation", type=float, help="share of documents to validate on")
    prepare.add_argument("--limit", type=int, help="only the first so many documents")
    prepare.add_argument("--cut", type=int, help="files of more characters become several documents")
    prepare.add_argument("--revision", help="commit, branch or tag of a data set on the hub")
    prepare.add_argument("--shard-tokens", type=int, default=100_000_000)
    prepare.add_argument("--max-length", type=int, default=2048, help="tokens of an instruction and its response")
    prepare.add_argument("--resume", action="store_true", help="goes on where an earlier job stopped")


def _prepare(arguments: argparse.Namespace) -> int:
    from dataclasses import fields

    from muonssm.lab.language.prepare import PrepareConfig, prepare

    given: dict[str, Any] = {f.name: getattr(arguments, f.name, f.default) for f in fields(PrepareConfig)}
    manifest = prepare(PrepareConfig(**given), Path(arguments.output), arguments.resume)
    for part in ("train", "validation"):
        print(f"{part:<11}{manifest[part]['documents']:>12,} documents{manifest[part]['tokens']:>16,} tokens")
    for reason, lost in manifest["left_out"].items():
        print(f"left out   {lost['count']:>12,} {reason}: {', '.join(lost['names'][:3])}")
    print(f"the tokens are in {arguments.output}; train on them with --set data.source={arguments.output}")
    return 0


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, or a .toml file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="changes the recipe")
    parser.add_argument("--output", help="folder of the run; runs/RECIPE by default")
    parser.add_argument("--resume", action="store_true", help="goes on where an earlier run stopped")


def _add_train(commands: Any) -> None:
    _add_recipe(_command(commands, "train", _train, "activity", "trains one model by a recipe"))


def _train(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.recipe import Recipe
    from muonssm.lab.core.trainer import train

    recipe = Recipe.load(arguments.recipe, arguments.set)
    output = Path(arguments.output or f"runs/{recipe.name}")
    metrics = train(recipe, output, arguments.resume)
    if os.environ.get("RANK", "0") != "0":  # of several processes one speaks
        return 0
    _print_scores(recipe, metrics)
    for text in recipe.task.show(output):
        print(text)
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
    from muonssm.lab.core.compare import compare, table
    from muonssm.lab.core.recipe import Recipe
    from muonssm.lab.report.report import write_report

    recipe = Recipe.load(arguments.recipe, arguments.set)
    output = Path(arguments.output or f"runs/compare-{recipe.name}")
    result = compare(recipe, output, arguments.seeds, arguments.folds, arguments.against, arguments.resume)
    print(table(result))
    print(f"\nthe page is {write_report([output])}")
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN", help="folder of a finished run")


def _add_eval(commands: Any) -> None:
    parser = _command(commands, "eval", _eval, "activity", "scores a run again, or a language model on lm-eval's tasks")
    _add_run(parser)
    parser.add_argument("--tasks", help="`paper`, lm-eval's names or own .yaml files, with commas between")
    parser.add_argument("--include", metavar="FOLDER", help="a folder of further lm-eval tasks")
    parser.add_argument("--robustness", choices=("imagenet-c", "imagenet-r", "imagenet-a"), help="of a classifier")
    parser.add_argument("--data", metavar="DIR", help="the folder of the images for --robustness")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--limit", type=int, help="only the first so many examples of each task")
    parser.add_argument("--max-length", type=int, help="tokens of context; the model's training length by default")
    parser.add_argument("--resume", action="store_true", help="keeps the tasks that are in zero-shot.json")


def _eval(arguments: argparse.Namespace) -> int:
    if arguments.tasks is not None:
        return _zero_shot(arguments)
    if arguments.robustness is not None:
        return _robustness(arguments)
    from muonssm.lab.core.evaluate import evaluate
    from muonssm.lab.core.recipe import Recipe
    from muonssm.lab.core.run_folder import RunFolder

    scores = evaluate(arguments.folder)
    _print_scores(Recipe.from_dict(RunFolder(arguments.folder).read("recipe.json")), scores)
    return 0


def _zero_shot(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.run_folder import RunFolder
    from muonssm.lab.language.lm_eval import TaskDataError, run_harness
    from muonssm.lab.language.paper import published_zero_shot
    from muonssm.lab.language.pretrained import load_pretrained
    from muonssm.lab.language.zero_shot import table

    arguments.extra = "language"
    found, folder = load_pretrained(arguments.folder), RunFolder(arguments.folder)
    settings = (arguments.include, arguments.batch_size, arguments.limit, arguments.max_length)
    save, done = folder.record("zero-shot.json", arguments.resume)
    figures = published_zero_shot(found.backbone)
    try:
        result = run_harness(*found, arguments.tasks.split(","), *settings, save, done)
    except TaskDataError as error:  # what could be scored is not lost
        print(table(error.result, figures))
        raise
    print(table(result, figures))
    return 0


def _robustness(arguments: argparse.Namespace) -> int:
    from muonssm.lab.vision.evaluate_robustness import evaluate_robustness

    arguments.extra = "vision"
    if arguments.data is None:
        raise ValueError(
            f"--data is missing; with --robustness {arguments.robustness} it may be the folder of the images"
        )
    for line in evaluate_robustness(arguments.folder, arguments.robustness, arguments.data, arguments.batch_size):
        print(line)
    return 0


def _add_predict(commands: Any) -> None:
    predict = _command(commands, "predict", _predict, "activity", "the class of every window of a recording")
    _add_run(predict)
    predict.add_argument("file", metavar="FILE.csv", help="a recording with the channels of the training data")


def _predict(arguments: argparse.Namespace) -> int:
    from muonssm.lab.activity.predict import predict
    from muonssm.lab.core.run_folder import RunFolder

    recipe, metadata, model = RunFolder(arguments.folder).load_model("activity")
    for found in predict(model, recipe.task.data, metadata, arguments.file):  # type: ignore[attr-defined]
        print(found)
    return 0


def _add_stream(commands: Any) -> None:
    stream = _command(commands, "stream", _stream, "activity", "classes while samples come in, and the time they take")
    _add_run(stream)
    stream.add_argument("file", metavar="FILE.csv|-", help="a recording, or - for lines of numbers from a pipe")


def _stream(arguments: argparse.Namespace) -> int:
    from muonssm.lab.activity.predict import rows_from, rows_of, stream
    from muonssm.lab.core.run_folder import RunFolder

    recipe, metadata, model = RunFolder(arguments.folder).load_model("activity")
    config = recipe.task.data  # type: ignore[attr-defined]
    piped = arguments.file == "-"
    rows = rows_from(sys.stdin, metadata["channels"]) if piped else rows_of(arguments.file, config, metadata)
    for found in stream(model, config, metadata, rows):
        print(found, flush=True)
    return 0


def _add_generate(commands: Any) -> None:
    generate = _command(commands, "generate", _generate, "language", "text from a language model, as it comes")
    _add_run(generate)
    generate.add_argument("prompt", metavar="PROMPT", help="what the text begins with")
    generate.add_argument("--max-new-tokens", type=int, default=200)
    generate.add_argument("--temperature", type=float, default=0.8)
    generate.add_argument("--top-p", type=float, default=0.95)
    generate.add_argument("--top-k", type=int, default=0, help="0 for no bound")
    generate.add_argument("--greedy", action="store_true", help="always the likeliest token")
    generate.add_argument("--seed", type=int)
    generate.add_argument("--beyond", action="store_true", help="takes a prompt longer than the training length")


def _generate(arguments: argparse.Namespace) -> int:
    import warnings

    from muonssm.lab.language.generate import check_prompt, generate_text
    from muonssm.lab.language.pretrained import load_pretrained

    model, tokenizer = load_pretrained(arguments.folder)
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "greedy", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    if not arguments.beyond:
        check_prompt(model, tokenizer, arguments.prompt)
    rest = [arguments.prompt]  # comes before the first piece, and not before all else is known to be right

    def show(piece: str) -> None:
        print("".join(rest) + piece, end="", flush=True)
        rest.clear()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the prompt is long: it was asked for
        generate_text(model, tokenizer, arguments.prompt, **settings, stream=show)
    print("".join(rest))
    return 0


def _read_text(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is {path!r}, which is not UTF-8 ({error}); it may be a file of text") from error


def _add_needle(commands: Any) -> None:
    needle = _command(commands, "needle", _needle, "language", "the needle in a haystack: table and heat map")
    _add_run(needle)
    needle.add_argument("--lengths", default="2048,4096,8192", help="tokens of prompt and answer, with commas between")
    needle.add_argument("--variants", default="pk,number,uuid")
    needle.add_argument("--samples", type=int, default=500)
    needle.add_argument("--answer-tokens", type=int, default=128)
    needle.add_argument("--batch-size", type=int, default=8)
    needle.add_argument("--essay", metavar="FILE", help="any text to hide needles in; Python's reference by default")
    needle.add_argument("--seed", type=int, default=0)
    needle.add_argument("--resume", action="store_true", help="keeps what is in needle.json")


def _needle(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.run_folder import RunFolder
    from muonssm.lab.language.needle import NeedleTest, run_needle, table
    from muonssm.lab.language.needle_page import write_heatmap
    from muonssm.lab.language.pretrained import load_pretrained

    try:
        lengths = tuple(int(length) for length in arguments.lengths.split(","))
    except ValueError as error:
        raise ValueError(f"--lengths is {arguments.lengths!r}; it may be numbers with commas between") from error
    names = ("samples", "answer_tokens", "seed", "batch_size")
    test = NeedleTest(lengths, tuple(arguments.variants.split(",")), **{n: getattr(arguments, n) for n in names})
    essay = None if arguments.essay is None else _read_text("--essay", arguments.essay)
    found, folder = load_pretrained(arguments.folder), RunFolder(arguments.folder)
    save, done = folder.record("needle.json", arguments.resume)
    result = run_needle(*found, test, essay, done, save)
    print(table(result))
    print(f"\nthe heat map is {write_heatmap(result, folder.path / 'needle.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
