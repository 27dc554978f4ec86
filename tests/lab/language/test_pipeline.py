"""A study in stages: pre-training, zero-shot tasks, tuning and needles for each variant, interrupted and resumed."""

from __future__ import annotations

import json
import os
import random
import re

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when these libraries are imported

import pytest

from muonssm.cli import main
from muonssm.lab.core.registry import study_files
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.language import pipeline as module
from muonssm.lab.language.pipeline import Cell, Pipeline, run_pipeline
from muonssm.lab.language.pipeline_page import text_table, write_pipeline
from muonssm.lab.language.prepare import PrepareConfig, prepare
from muonssm.lab.language.zero_shot_data import TASKS
from tests.lab.language.zero_shot_rows import sample, write

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = [
    "data.length=48", "training.batch_size=4", "training.precision=float32", "training.evaluate_every=2",
]  # fmt: skip
SIZES = ["model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=1", "model.mixer={num_heads=2}"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Prepared text and instructions, instructions with another tokenizer, zero-shot data, and a short essay."""
    folder, generator = tmp_path_factory.mktemp("pipeline"), random.Random(0)
    (folder / "source").mkdir()
    for i in range(30):
        (folder / "source" / f"{i:02}.txt").write_text(f"page {i}: the memory keeps what it reads.\n" * 3)
    config = PrepareConfig(str(folder / "source"), tokenizer="bytes", validation=0.2)
    prepare(config, folder / "text", progress=False)
    rows = [{"instruction": "Go", "input": "", "output": f"{i} steps"} for i in range(24)]
    (folder / "rows.json").write_text(json.dumps(rows))
    kind = {"kind": "instructions", "validation": 0.2}
    prepare(PrepareConfig(str(folder / "rows.json"), tokenizer="bytes", **kind), folder / "rows", progress=False)
    prepare(PrepareConfig(str(folder / "rows.json"), vocab_size=300, **kind), folder / "other", progress=False)
    (folder / "zero-shot").mkdir()
    for name in TASKS:
        write(folder / "zero-shot" / f"{name}.jsonl", [sample(name, generator) for _ in range(2)])
    (folder / "essay.txt").write_text("The memory keeps what it reads. It reads what it keeps. " * 9)
    return folder


def changes(root):
    """Settings of the study `language` that run in seconds."""
    pretrain = [*SMALL, *SIZES, "training.steps=4", f"data.source={root / 'text'}"]
    sft = [*SMALL, "training.epochs=1", f"data.source={root / 'rows'}", "data.length=300"]
    own = [f"pretrain:{change}" for change in pretrain] + [f"sft:{change}" for change in sft]
    own += [f"zero-shot.data={root / 'zero-shot'}", "zero-shot.max_length=200", "needle.answer_tokens=8"]
    return [
        *own,
        'needle.variants=["number"]',
        "needle.lengths=[400]",
        "needle.samples=1",
        f"needle.essay={root / 'essay.txt'}",
    ]


def load(root, *more, **fields):
    return Pipeline.load(
        study_files()["language"], [*changes(root), *more], **{"variants": ["plain", "paper"], **fields}
    )


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.safetensors")}


@pytest.mark.slow
def test_all_stages_run_for_each_variant_and_finished_ones_are_kept(root, tmp_path, monkeypatch):
    """The second variant stops in its zero-shot tasks; the study then goes on from there."""
    calls = []

    def stop(*arguments, **options):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run_harness(*arguments, **options)

    run_harness = module.run_harness
    pipeline, output = load(root), tmp_path / "study"
    with monkeypatch.context() as patch:
        patch.setattr(module, "run_harness", stop)
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(pipeline, output)
    finished = contents(output)
    assert {name.split("/")[0] for name in finished} == {f"gated_deltanet-{v}-seed-0" for v in ("plain", "paper")}
    times = {name: (output / name).stat().st_mtime_ns for name in finished}
    with pytest.raises(ValueError, match="--resume continues it"):
        run_pipeline(pipeline, output)
    result = run_pipeline(pipeline, output, resume=True)
    assert {name: (output / name).stat().st_mtime_ns for name in finished} == times
    for cell in result.cells:
        assert list(cell.runs) == ["pretrain", "sft"]
        assert cell.evaluations["zero-shot"]["tasks"].keys() == set(TASKS)
        assert (cell.runs["pretrain"] / "zero-shot.json").is_file()
        assert (cell.runs["sft"] / "needle.html").is_file()
        recipe = json.loads((cell.runs["sft"] / "recipe.json").read_text())
        assert recipe["model"]["start"] == str(cell.runs["pretrain"])
        assert (recipe["muon"]["gamma"] == 0) == (cell.cell.variant == "plain")
    _check_report(result)


def _check_report(result):
    table = text_table(result)
    for words in ("pretrain perplexity", "standard error", "paper's 170M, muon", "number 400", "gated_deltanet, paper"):
        assert words in table
    page = write_pipeline(result).read_text()
    for words in ("Zero-shot", "Needle in a haystack", "gated_deltanet-paper-seed-0/sft/report.html", "paper, muon"):
        assert words in page
    scores = json.loads((result.path / "study.json").read_text())["scores"]
    assert scores["gated_deltanet-plain-seed-0"]["training"]["pretrain"]["steps"] == 4


@pytest.mark.slow
def test_the_command_runs_a_study_in_stages(root, tmp_path, capsys):
    options = [part for change in changes(root) for part in ("--set", change)]
    command = ["study", "language", "--output", str(tmp_path / "study"), "--variants", "residual", *options]
    (tmp_path / "own.toml").write_text(study_files()["language"].read_text().replace('"zero-shot", "sft", ', ""))
    command[1] = str(tmp_path / "own.toml")
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "gated_deltanet, residual" in out
    assert "report.html" in out
    assert (tmp_path / "study" / "gated_deltanet-residual-seed-0" / "pretrain" / "needle.json").is_file()
    assert main([*command, "--peers", "minirocket"]) == 2
    assert "--peers must be left out for a study in stages" in capsys.readouterr().err


def test_a_task_without_stages_says_so(tmp_path, capsys):
    (tmp_path / "own.toml").write_text('task = "recall"\nstages = ["pretrain"]\n')
    assert main(["study", str(tmp_path / "own.toml")]) == 2
    assert "STUDY must have a task with stages" in capsys.readouterr().err
    (tmp_path / "own.toml").write_text('stages = ["pretrain"]\n')
    assert main(["study", str(tmp_path / "own.toml")]) == 2
    assert "task must be one of" in capsys.readouterr().err


def test_changes_reach_their_stages(root):
    pipeline = load(root, "pretrain:training.steps=7", "needle.samples=3", seeds=2)
    assert pipeline.needle.samples == 3
    cells = list(pipeline.cells())
    assert cells[:2] == [Cell("gated_deltanet", "plain", 0), Cell("gated_deltanet", "plain", 1)]
    recipes = [pipeline.recipe("pretrain", cell, None) for cell in cells]
    assert [recipe.training.seed for recipe in recipes] == [3407, 3408, 3407, 3408]
    assert all(recipe.training.steps == 7 for recipe in recipes)
    assert recipes[0].task.muon != recipes[2].task.muon
    doubled = load(root, variants=["plain", "doubled"])
    recipe = doubled.recipe("sft", Cell("gated_deltanet", "doubled", 0), root / "text")
    assert recipe.task.muon == recipes[0].task.muon


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("decode:training.steps=7", r"--set must be STAGE\.KEY=VALUE or .* got 'decode:training.steps=7'"),
        ("needle", "--set must be"),
        ("needle.sample=3", "a key of needle must be one of .* got 'sample'"),
        ("needle.samples=0", r"needle\.samples must be"),
        ("zero-shot.limit=-1", r"zero-shot\.limit must be"),
        ("needle.samples=3\nseed = 4", r"needle\.samples must be an integer >= 1, got '3\\nseed = 4'"),
        ("needle.samples=3 # three", r"needle\.samples must be an integer >= 1, got '3 # three'"),
        ("needle.essay=5", r"needle\.essay must be a text file, got 5"),
        ("pretrain.recipe=5", r"pretrain\.recipe must be the name of a recipe .* got 5"),
        ("sft.changes=[5]", r"sft\.changes must be a list of texts .* got \(5,\)"),
        ("sft.changes=5", r"sft\.changes must be a list of texts .* got 5"),
    ],
)
def test_wrong_changes_are_named(root, change, message):
    with pytest.raises(ValueError, match=message):
        load(root, change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": ["sft"]}, "stages must begin with 'pretrain', got 'sft'"),
        ({"stages": ["pretrain", "decode"]}, "stages must be .* got 'decode'"),
        ({"stages": []}, "stages must be a list of one or more different names"),
        ({"variants": ["plain", "plain"]}, "variants must be a list of one or more different names"),
        ({"variants": ["best"]}, "--variants must be one or more of"),
        ({"seeds": 0}, "seeds must be"),
        ({"title": 3}, "title must be text, got 3"),
        ({"colour": 3}, "a key must be one of .* got 'colour'"),
    ],
)
def test_wrong_studies_are_named(root, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load(root, **fields)


@pytest.mark.parametrize("key", ["title", "task", "stages", "backbones", "variants", "pretrain"])
def test_keys_that_a_study_needs_are_named(tmp_path, key):
    lines = {
        "title": 'title = "t"', "task": 'task = "language"', "stages": 'stages = ["pretrain"]',
        "backbones": 'backbones = ["mamba"]', "variants": 'variants = ["plain"]',
        "pretrain": '[pretrain]\nrecipe = "language-demo"',
    }  # fmt: skip
    (tmp_path / "own.toml").write_text("\n".join(text for name, text in lines.items() if name != key))
    with pytest.raises(ValueError, match=rf"own\.toml: {key} must be given, got none"):
        Pipeline.load(tmp_path / "own.toml")
    (tmp_path / "own.toml").write_text("\n".join(lines.values()).partition("recipe")[0])
    with pytest.raises(ValueError, match=r"own\.toml: pretrain\.recipe must be given, got none"):
        Pipeline.load(tmp_path / "own.toml")


@pytest.mark.slow
def test_a_variant_that_diverges_has_no_later_stages(root, tmp_path, monkeypatch, capsys):
    """Its scores would mean nothing. The others go on."""

    def train(recipe, folder, resume):
        metrics = own_train(recipe, folder, resume)
        if "plain" not in str(folder):
            return metrics
        RunFolder(folder).write("metrics.json", metrics | {"diverged": "the training loss was not a finite number"})
        return RunFolder(folder).read("metrics.json")

    own_train = module.train
    monkeypatch.setattr(module, "train", train)
    result = run_pipeline(load(root), tmp_path / "study")
    plain, paper = result.cells
    assert (list(plain.runs), plain.evaluations) == (["pretrain"], {})
    assert list(paper.evaluations) == ["zero-shot", "needle"]
    assert "plain-seed-0: pretrain diverged, later stages are left out" in capsys.readouterr().err
    assert re.search(r"gated_deltanet, plain +[\d,]+ +diverged +-\n", text_table(result) + "\n")
    assert "diverged" in write_pipeline(result).read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sft:data.source={root}/other", r"sft\.recipe must have data with the tokenizer of .* got .*other"),
        ("sft:data.source={root}/none", "source must be a folder with prepared tokens"),
        ("zero-shot.data={root}/text", "--data must have a file for every task"),
        ("needle.essay={root}/none", r"needle\.essay must be a UTF-8 text file"),
        ("needle.lengths=[40]", "length must be"),
        ("pretrain.recipe=watch-small", "must be"),
    ],
)
def test_data_is_checked_before_training(root, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run_pipeline(load(root, change.format(root=root)), tmp_path / "study")
    assert not list(tmp_path.rglob("pretrain"))
