"""lm-eval's own nine tasks on local files: the scores of lm-eval called directly, and rows and files that are wrong."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import random
import socket
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when these libraries are imported

import datasets
import huggingface_hub.constants
import pytest
import torch
import yaml

from muonssm.cli import main
from muonssm.lab.core.untrusted import UntrustedFileError
from muonssm.lab.language import zero_shot_data
from muonssm.lab.language.lm_eval import original_yaml, run_harness
from muonssm.lab.language.tokenizer import byte_tokenizer
from muonssm.lab.language.zero_shot import AVERAGE, PAPER_TASKS, split_scores, table
from muonssm.lab.language.zero_shot_data import TASKS, find_files, local_tasks, read_rows, split_pages
from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM
from tests.lab.language.zero_shot_rows import ROWS, sample, write

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No connection and an empty cache, also for libraries that were imported before."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def refuse(*_):
        raise AssertionError("a test used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A file per task."""
    folder, generator = tmp_path_factory.mktemp("zero-shot"), random.Random(0)
    for name in TASKS:
        write(folder / f"{name}.jsonl", [sample(name, generator) for _ in range(12)])
    return folder


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "mixer": {"num_heads": 2}}
    model = MuonSSMForCausalLM(MuonSSMConfig(vocab_size=257, max_position_embeddings=256, eos_token_id=256, **sizes))
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.3)  # so that choices differ
    return model.eval()


def call_lm_eval(model, folder, files, split_of):
    """Scores of lm-eval itself, on a YAML written here."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    for name, file in files.items():
        split = split_of[name]
        own = {"include": str(original_yaml(name)), "task": f"own_{name}", "dataset_path": "json", "dataset_name": None}
        own["dataset_kwargs"] = {"data_files": {split: str(file)}}
        own |= {"training_split": None, "validation_split": None, "test_split": None, f"{split}_split": split}
        (folder / f"own_{name}.yaml").write_text(yaml.safe_dump(own))
    lm = HFLM(model, "causal", tokenizer=byte_tokenizer(), batch_size=3, max_length=256)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    names = [f"own_{name}" for name in files]
    return simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0, num_fewshot=0)["results"]


@pytest.mark.slow
def test_scores_are_those_of_lm_eval_called_directly(model, folder, tmp_path):
    result = run_harness(model, byte_tokenizer(), ["paper"], data=folder, progress=False)
    assert not (tmp_path / "cache" / "json").exists()  # nothing piles up
    (tmp_path / "own").mkdir()
    files = {name: folder / f"{name}.jsonl" for name in TASKS}
    splits = {name: task.split for name, task in TASKS.items()}
    direct = call_lm_eval(model, tmp_path / "own", files, splits)
    assert result["tasks"].keys() == set(TASKS)
    for column in PAPER_TASKS:
        own, theirs = result["tasks"][column.task], direct[f"own_{column.task}"]
        assert own["metrics"][column.metric] == pytest.approx(theirs[f"{column.metric},none"], rel=1e-6)
        assert own["samples"] == 12
    scores, _ = split_scores(result)
    accuracies = [scores[column.key] for column in PAPER_TASKS if column.is_accuracy]
    assert scores[AVERAGE] == pytest.approx(sum(accuracies) / 8)
    assert len(set(accuracies)) > 3  # the model does not answer at random alone
    assert "split was scored" not in table(result)


def test_files_split_and_digests_are_settings(model, folder, tmp_path):
    for name in ("piqa", "arc_easy"):
        (tmp_path / f"{name}.jsonl").write_bytes((folder / f"{name}.jsonl").read_bytes())
    (tmp_path / "arc_easy.jsonl").rename(tmp_path / "ARC-Easy_validation.jsonl")
    names = ["piqa", "arc_easy"]
    result = run_harness(model, byte_tokenizer(), names, data=tmp_path, limit=3, progress=False)
    data = result["settings"]["data"]
    assert data["arc_easy"]["file"] == "ARC-Easy_validation.jsonl"
    assert data["arc_easy"]["split"] == "validation"
    assert len(data["piqa"]["sha256"]) == 64
    assert "arc_easy: the validation split was scored (ARC-Easy_validation.jsonl), not the test split" in table(result)
    write(tmp_path / "piqa.jsonl", [ROWS["piqa"]])
    with pytest.raises(ValueError, match=r"data must be .* as in the earlier result"):
        run_harness(model, byte_tokenizer(), names, data=tmp_path, limit=3, earlier_result=result, progress=False)


def test_packed_and_plain_files_have_the_same_rows(folder, tmp_path):
    content = (folder / "piqa.jsonl").read_bytes()
    (tmp_path / "piqa.json.gz").write_bytes(gzip.compress(content))
    (tmp_path / "piqa_b.jsonl.xz").write_bytes(lzma.compress(content))
    rows = list(read_rows("piqa", folder / "piqa.jsonl"))
    assert len(rows) == 12
    assert list(read_rows("piqa", tmp_path / "piqa.json.gz")) == rows
    assert list(read_rows("piqa", tmp_path / "piqa_b.jsonl.xz")) == rows


def test_boolq_of_its_authors_is_mapped(tmp_path):
    row = {"question": "is rain wet", "answer": True, "passage": "Rain is wet.", "title": "Rain"}
    write(tmp_path / "boolq.jsonl", [row, {**row, "answer": False}])
    found = list(read_rows("boolq", tmp_path / "boolq.jsonl"))
    assert [each["label"] for each in found] == [1, 0]
    assert found[0].keys() == {"question", "passage", "label"}


def test_wikitext_is_cut_at_top_level_headings(tmp_path):
    text = " \n = One = \n \n Text . \n = = Part = = \n More . \n = Two = \n Text . \n"
    pages = list(split_pages(text))
    assert pages == [" = One = \n \n Text . \n = = Part = = \n More . ", " = Two = \n Text . \n"]
    (tmp_path / "wikitext-2_test.txt.xz").write_bytes(lzma.compress(text.encode()))
    assert [row["page"] for row in read_rows("wikitext", tmp_path / "wikitext-2_test.txt.xz")] == pages


@pytest.mark.parametrize("name", TASKS)
def test_wrong_rows_name_file_line_and_column(tmp_path, name):
    path = tmp_path / f"{name}.jsonl"
    write(path, [ROWS[name]])
    assert len(list(read_rows(name, path))) == 1
    for column in TASKS[name].columns:
        write(path, [ROWS[name], {key: value for key, value in ROWS[name].items() if key != column}])
        with pytest.raises(UntrustedFileError, match=rf"{name}\.jsonl must have the column '{column}' in line 2"):
            list(read_rows(name, path))
        for value in (None, True, 7.5, [], {}, ["x"], {"text": ["a"]}):
            write(path, [ROWS[name], {**ROWS[name], column: value}])
            with pytest.raises(
                UntrustedFileError, match=rf"{name}\.jsonl must have .* in column '{column}', .* line 2"
            ):
                list(read_rows(name, path))


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("lambada_openai", "text", "word"),
        ("lambada_openai", "text", "ends with a space "),
        ("piqa", "label", 2),
        ("hellaswag", "label", "4"),
        ("hellaswag", "endings", ["a", "b", "c", 4]),
        ("winogrande", "sentence", "no blank"),
        ("winogrande", "answer", "3"),
        ("arc_easy", "answerKey", "C"),
        ("arc_easy", "choices", {"text": ["a", "b"], "label": ["A", "A"]}),
        ("arc_challenge", "choices", {"text": ["a", "b"], "label": ["A"]}),
        ("social_iqa", "label", "0"),
        ("boolq", "label", 2),
        ("boolq", "passage", "half of a pair: \ud800"),
        ("hellaswag", "ctx_b", "\ud800"),
        ("lambada_openai", "text", "two \ud800"),
    ],
)
def test_values_out_of_range_are_named(tmp_path, name, column, value):
    write(tmp_path / "a.jsonl", [{**ROWS[name], column: value}])
    with pytest.raises(UntrustedFileError, match=rf"must have .* in column '{column}', got .* in line 1"):
        list(read_rows(name, tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "a b"}\n[1]\n', "must have a JSON object per line, got none in line 2"),
        ("a.jsonl", b'{"text": \n', "must have a JSON object per line, got none in line 1"),
        ("a.jsonl", b'\n\xff{"text": 1}', "must be UTF-8 text, got other bytes in line 2"),
        ("a.jsonl", b'{"text": "a %s"}' % (b"b" * 300), "must have lines of 200 bytes or less .*MAX_ROW_BYTES"),
        ("a.txt", b"\xff", "must be UTF-8 text"),
        ("a.jsonl.xz", lzma.compress(b"x" * 300)[:40], "must be an xz file, got a damaged one"),
        ("a.jsonl.gz", b"plain", "must be a gzip file, got a damaged one"),
        ("a.jsonl.gz", gzip.compress(b"\n" * 5000), "must decompress to 1000 bytes or less .*MAX_BYTES"),
        ("a.txt.xz", lzma.compress(b"\n" * 5000), "must decompress to 1000 bytes or less .*MAX_BYTES"),
    ],
    ids=["list", "cut", "bytes", "long", "text", "cut xz", "not packed", "long when unpacked", "long xz"],
)
def test_damaged_and_long_files_are_named(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(zero_shot_data, "MAX_BYTES", 1000)
    monkeypatch.setattr(zero_shot_data, "MAX_ROW_BYTES", 200)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UntrustedFileError, match=message):
        list(read_rows("wikitext" if ".txt" in name else "lambada_openai", tmp_path / name))


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_what_is_no_regular_file_is_never_opened(tmp_path, kind):
    path = tmp_path / "piqa.jsonl"
    {"a pipe": os.mkfifo, "a folder": os.mkdir, "a device": lambda path: path.symlink_to("/dev/zero")}[kind](path)
    with (
        pytest.raises(UntrustedFileError, match=rf"piqa\.jsonl must be a regular file, got {kind}"),
        local_tasks(tmp_path, ["piqa"], Path),
    ):
        pass


def test_missing_and_ambiguous_files_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"--data must be a folder .* which is no folder"):
        find_files(tmp_path / "none", ["piqa"])
    write(tmp_path / "siqa_dev.jsonl", [ROWS["social_iqa"]])
    (tmp_path / "piqa.md").write_text("notes")
    wanted = r"without piqa \(piqa\*\.jsonl, .*\), wikitext \(wikitext\*\.jsonl or \.txt, "
    with pytest.raises(ValueError, match=wanted):
        find_files(tmp_path, ["social_iqa", "piqa", "wikitext"])
    assert find_files(tmp_path, ["social_iqa"]) == {"social_iqa": tmp_path / "siqa_dev.jsonl"}
    write(tmp_path / "social_i_qa.jsonl", [ROWS["social_iqa"]])
    with pytest.raises(
        ValueError, match=r"one file for social_iqa, got .* with siqa_dev\.jsonl and social_i_qa\.jsonl"
    ):
        find_files(tmp_path, ["social_iqa"])
    with pytest.raises(ValueError, match=r"--tasks must be paper or some of .* got 'copa'"):
        find_files(folder, ["copa"])


def test_an_empty_file_is_named_and_temporary_files_are_removed(folder, tmp_path):
    with local_tasks(folder, ["piqa"], lambda name: Path(name)) as local:
        path = local.files["piqa"]
        assert (
            json.loads((path.parent / "piqa.jsonl").read_text().splitlines()[0]).keys() == TASKS["piqa"].columns.keys()
        )
    assert not path.parent.exists()
    (tmp_path / "piqa.jsonl").write_text("\n")
    with (
        pytest.raises(UntrustedFileError, match=r"piqa\.jsonl must have rows of piqa, got none"),
        local_tasks(tmp_path, ["piqa"], Path),
    ):
        pass


def test_the_command_scores_local_files_and_resumes(model, folder, tmp_path, capsys):
    model.save_pretrained(tmp_path / "run")
    byte_tokenizer().save_pretrained(tmp_path / "run")
    command = ["eval", str(tmp_path / "run"), "--data", str(folder), "--limit", "4"]
    assert main([*command, "--tasks", "piqa,boolq"]) == 0
    first = json.loads((tmp_path / "run" / "zero-shot.json").read_text())
    assert main([*command, "--tasks", "paper", "--resume"]) == 0
    out = capsys.readouterr().out
    assert "standard error" in out
    assert "paper, plain" in out
    both = json.loads((tmp_path / "run" / "zero-shot.json").read_text())
    assert both["tasks"].keys() == set(TASKS)
    assert {name: both["tasks"][name] for name in first["tasks"]} == first["tasks"]
    assert main([*command, "--tasks", "paper", "--resume", "--include", str(tmp_path), "--trust-tasks"]) == 2
    assert "--include must be left out with --data" in capsys.readouterr().err
