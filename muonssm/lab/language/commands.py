"""The commands `prepare`, `generate` and `needle`, and the modes `eval --tasks` and `eval --weights`."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from muonssm.lab.core.command_table import CommandTable, add_run_argument


def add_commands(table: CommandTable) -> None:
    """Add `prepare`, `generate`, `needle`, `eval --tasks` and `eval --weights`."""
    _add_prepare(table)
    _add_generate(table)
    _add_needle(table)
    _add_zero_shot(table)
    _add_packed(table)


# ---- prepare


def _add_prepare(table: CommandTable) -> None:
    parser = table.add("prepare", _prepare, "language", "turn text into token shards for training language models")
    sources = "stdlib, enwik8, enwik8-text, fineweb-edu, alpaca, a file, a folder, or owner/name on the hub"
    parser.add_argument("source", metavar="SOURCE", help=sources)
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the tokens")
    parser.add_argument("--from", dest="file", metavar="FILE", help="enwik8 or enwik8.gz, for enwik8 and enwik8-text")
    other = "accept another file for --from; it is split in the same proportions as enwik8"
    parser.add_argument("--other-file", action="store_true", help=other)
    parser.add_argument("--tokenizer", help="name on the hub, folder, tokenizer.json or bytes (default: train one)")
    parser.add_argument("--vocab-size", type=int, default=32000, help="size of a trained tokenizer (default: 32000)")
    parser.add_argument("--kind", help="text or instructions (default: by the source)")
    parser.add_argument("--field", default="text", help="field of a row that has the text (default: text)")
    parser.add_argument(
        "--validation", type=float, help="share of documents for validation (default: 0.01; stdlib: 0.05)"
    )
    parser.add_argument("--limit", type=int, help="use only the first LIMIT documents")
    parser.add_argument("--cut", type=int, help="split text files of more than CUT characters into documents")
    parser.add_argument("--revision", help="commit, branch or tag of a data set on the hub")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens per shard (default: 100 million)")
    lengths = "most tokens of an instruction with its response (default: 2048)"
    parser.add_argument("--max-length", type=int, default=2048, help=lengths)
    links = "follow links that lead out of the source folder"
    parser.add_argument("--follow-links", action="store_true", help=links)
    parser.add_argument("--resume", action="store_true", help="continue an interrupted job")


def _prepare(arguments: argparse.Namespace) -> int:
    from dataclasses import fields

    from muonssm.lab.core.untrusted import printable

    from .enwik8 import NAME, prepare_enwik8
    from .manifest import splits_of
    from .prepare import PrepareConfig, prepare

    settings: dict[str, Any] = {f.name: getattr(arguments, f.name, f.default) for f in fields(PrepareConfig)}
    output, resume = Path(arguments.output), arguments.resume
    if arguments.source == NAME:
        manifest = prepare_enwik8(_enwik8_file(arguments), output, resume, arguments.other_file)
    else:
        manifest = prepare(PrepareConfig(**settings), output, resume)
    for split in splits_of(manifest):
        print(f"{split:<11}{manifest[split]['documents']:>12,} documents{manifest[split]['tokens']:>16,} tokens")
    for reason, left_out in manifest["left_out"].items():
        names = printable(", ".join(left_out["names"][:3]))
        print(f"left out   {left_out['count']:>12,} {printable(reason)}: {names}")
    print(f"tokens: {arguments.output}; train on them with --set data.source={arguments.output}")
    return 0


def _enwik8_file(arguments: argparse.Namespace) -> Path:
    """The file of --from; raise without one, or for options that the splits and tokens of enwik8 leave no room for."""
    from dataclasses import fields

    from .prepare import PrepareConfig

    if arguments.file is None:
        raise ValueError("--from must be the file enwik8 or enwik8.gz for the source 'enwik8', got none")
    for setting in fields(PrepareConfig):
        value = getattr(arguments, setting.name, setting.default)
        if setting.name not in ("source", "file", "other_file") and value != setting.default:
            wanted = "left out for the source 'enwik8', whose tokens are bytes in published splits"
            raise ValueError(f"--{setting.name.replace('_', '-')} must be {wanted}, got {value!r}")
    return Path(arguments.file)


# ---- generate


def _add_generate(table: CommandTable) -> None:
    parser = table.add("generate", _generate, "language", "generate text with a language model")
    add_run_argument(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="most tokens to generate (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="divides the logits (default: 0.8)")
    parser.add_argument("--top-p", type=float, default=0.95, help="total probability to sample from (default: 0.95)")
    parser.add_argument("--top-k", type=int, default=0, help="number of tokens to sample from; 0 for all (default)")
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    parser.add_argument("--seed", type=int, help="seed of the samples (default: another text each time)")
    parser.add_argument("--beyond", action="store_true", help="allow a prompt longer than the training length")
    weights = "weights to decode with: float32 (default), bfloat16 or int8, which are faster and less exact"
    parser.add_argument("--weights", default="float32", help=weights)


def _generate(arguments: argparse.Namespace) -> int:
    from .generate import check_prompt, generate_text
    from .pretrained import load_pretrained

    model, tokenizer = load_pretrained(arguments.folder)
    if arguments.weights != "float32":
        model.prepare_decoding(arguments.weights)
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "greedy", "seed")
    settings = {name: getattr(arguments, name) for name in names}
    if not arguments.beyond:
        check_prompt(model, tokenizer, arguments.prompt)
    pending = [arguments.prompt]  # printed with the first piece, when all arguments are known to be valid

    def show(piece: str) -> None:
        print("".join(pending) + piece, end="", flush=True)
        pending.clear()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a long prompt, which --beyond asked for
        generate_text(model, tokenizer, arguments.prompt, **settings, stream=show)
    print("".join(pending))
    return 0


# ---- needle


def _add_needle(table: CommandTable) -> None:
    parser = table.add("needle", _needle, "language", "test a language model with needles in haystacks (RULER)")
    add_run_argument(parser)
    lengths = "tokens of prompt and answer, separated by commas (default: 2048,4096,8192)"
    parser.add_argument("--lengths", default="2048,4096,8192", help=lengths)
    variants = (
        "pk hides a number in repeated sentences, number a number in an essay, uuid a UUID (default: pk,number,uuid)"
    )
    parser.add_argument("--variants", metavar="NAMES", default="pk,number,uuid", help=variants)
    parser.add_argument("--samples", type=int, default=500, help="samples per variant and length (default: 500)")
    parser.add_argument("--answer-tokens", type=int, default=128, help="most tokens of an answer (default: 128)")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts per batch (default: 8)")
    parser.add_argument("--essay", metavar="FILE", help="text to hide needles in (default: Python's reference)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples (default: 0)")
    parser.add_argument("--resume", action="store_true", help="keep the scores in needle.json and add the missing ones")


def _needle(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.lock import locked
    from muonssm.lab.core.run_folder import RunFolder

    from .needle import NeedleTest, run_needle, table
    from .needle_page import write_heatmap
    from .pretrained import load_pretrained
    from .result_files import check_needle

    names = ("samples", "answer_tokens", "seed", "batch_size")
    settings = {name: getattr(arguments, name) for name in names}
    test = NeedleTest(_parse_lengths(arguments.lengths), tuple(arguments.variants.split(",")), **settings)
    essay = None if arguments.essay is None else _read_essay(arguments.essay)
    pretrained, folder = load_pretrained(arguments.folder), RunFolder(arguments.folder)
    with locked(folder.path, "RUN"):
        save, earlier_result = folder.record("needle.json", arguments.resume, check_needle)
        result = run_needle(*pretrained, test, essay, earlier_result, save)
    print(table(result))
    print(f"\nheat map: {write_heatmap(result, folder.path / 'needle.html')}")
    return 0


def _parse_lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(length) for length in text.split(","))
    except ValueError as error:
        raise ValueError(f"--lengths must be integers separated by commas, got {text!r}") from error


def _read_essay(path: str) -> str:
    from muonssm.lab.core.untrusted import UntrustedFileError, read_text

    try:
        return read_text(path)
    except UntrustedFileError as error:
        raise ValueError(f"--essay must be a UTF-8 text file, got {path!r}, which {error.reason}") from error


# ---- eval --tasks


def _add_zero_shot(table: CommandTable) -> None:
    parser = table.add_mode("eval", "tasks", _zero_shot, "language")
    group = parser.add_argument_group("zero-shot tasks of lm-eval, for language models")
    tasks = "`paper`, lm-eval's task names or .yaml files, separated by commas"
    group.add_argument("--tasks", help=tasks)
    group.add_argument("--include", metavar="DIR", help="folder of further lm-eval tasks")
    trust = "allow tasks in files (.yaml, --include), which can run any Python code"
    group.add_argument("--trust-tasks", action="store_true", help=trust)
    group.add_argument("--limit", type=int, help="score only the first LIMIT samples of each task")
    group.add_argument("--max-length", type=int, help="most tokens of context (default: the training length)")
    group.add_argument("--resume", action="store_true", help="keep the scores in zero-shot.json and add missing tasks")
    data = "folder of images for --robustness, or of one file per task for --tasks paper (default: data from the hub)"
    parser.add_argument("--data", metavar="DIR", help=data)
    parser.add_argument("--batch-size", type=int, default=8, help="texts or images per batch (default: 8)")


def _zero_shot(arguments: argparse.Namespace) -> int:
    from muonssm.lab.core.lock import locked
    from muonssm.lab.core.run_folder import RunFolder

    from .lm_eval import TaskDataError, check_trusted, run_harness
    from .pretrained import load_pretrained
    from .result_files import check_zero_shot
    from .zero_shot import paper_zero_shot, table

    check_trusted(arguments.tasks.split(","), arguments.include, arguments.trust_tasks)
    pretrained, folder = load_pretrained(arguments.folder), RunFolder(arguments.folder)
    settings = (arguments.include, arguments.batch_size, arguments.limit, arguments.max_length)
    paper = paper_zero_shot(pretrained.backbone)
    try:
        with locked(folder.path, "RUN"):
            save, earlier_result = folder.record("zero-shot.json", arguments.resume, check_zero_shot)
            names = arguments.tasks.split(",")
            result = run_harness(*pretrained, names, *settings, save, earlier_result, data=arguments.data)
    except TaskDataError as error:  # print the scores of the other tasks
        print(table(error.result, paper))
        raise
    print(table(result, paper))
    return 0


# ---- eval --weights


def _add_packed(table: CommandTable) -> None:
    parser = table.add_mode("eval", "weights", _packed, "language")
    weights = "print the perplexity with packed weights, bfloat16,int8, beside that with float32 (language models)"
    parser.add_argument("--weights", metavar="NAMES", help=weights)


def _packed(arguments: argparse.Namespace) -> int:
    from .packed_weights import packed_perplexities

    result = packed_perplexities(arguments.folder, arguments.weights.split(","), arguments.limit)
    for name, value in result.items():
        print(f"{name:<10} perplexity {value:.4f}  {100 * (value / result['float32'] - 1):+.3f}%")
    return 0
