"""Preparing tokens: sources, tokenizers, what is left out, and interrupted jobs."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from muonssm.lab.language import corpora, shards
from muonssm.lab.language import prepare as prepare_module
from muonssm.lab.language.corpora import Document, cut_text, open_source
from muonssm.lab.language.instructions import prompt
from muonssm.lab.language.prepare import PrepareConfig, cache_folder, prepare, prepare_stdlib
from muonssm.lab.language.shards import Blocks, open_tokens
from muonssm.lab.language.tokenizer import encode, load_tokenizer, sample_texts, train_bpe

WORDS = ("the", "grass", "is", "green", "and", "sky", "blue", "here", "we", "go", "there", "back", "again")


def text(number: int, words: int = 30) -> str:
    random = np.random.default_rng(number)
    return f"{number}: " + " ".join(random.choice(WORDS, words)) + ".\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """60 text files in subfolders, and files that are empty, not UTF-8, hidden, broken links or of another type."""
    root = tmp_path_factory.mktemp("source") / "texts"
    for number in range(60):
        path = root / f"{number % 3}" / f"{number:02d}.{('txt', 'md', 'py')[number % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(number))
    (root / "0" / "blank.txt").write_text(" \n")
    (root / "1" / "latin.txt").write_bytes("é".encode("latin-1"))
    (root / "2" / "declared.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1"))
    (root / "2" / "picture.png").write_bytes(b"\0")
    (root / "2" / "link.txt").symlink_to("nowhere")
    (root / ".git").mkdir()
    (root / ".git" / "log.txt").write_text("hidden")
    return root


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer of 280 tokens, so that most jobs do not train one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([text(number) for number in range(20)], 280).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def job(texts, tokenizer):
    """A configuration with small shards."""

    def make(**changes):
        settings = {"source": str(texts), "tokenizer": tokenizer, "validation": 0.1, "shard_tokens": 700, **changes}
        return PrepareConfig(**settings)

    return make


def run(config, output, **changes):
    return prepare(config, output, progress=False, **changes)


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(folder) -> dict[str, list[str]]:
    """The texts of both splits, without EOS."""
    data = open_tokens(folder)
    tokenizer, eos = data.load_tokenizer(), data.manifest["eos_id"]
    texts = {}
    for name, split in (("train", data.train), ("validation", data.validation)):
        documents = [split.document(i)[0] for i in range(split.documents)]
        assert all(document[-1] == eos and eos not in document[:-1] for document in documents)
        texts[name] = [tokenizer.decode(document[:-1]) for document in documents]
    return texts


# ---- the folder


def test_a_folder_becomes_documents_in_two_splits(tmp_path, job):
    manifest = run(job(), tmp_path / "out")
    found = decoded(tmp_path / "out")
    everything = [text(number) for number in range(60)] + ["# coding: latin-1\n# é\n"]
    assert sorted(found["train"] + found["validation"]) == sorted(everything)
    assert len(found["train"]) == manifest["train"]["documents"] == 61 - manifest["validation"]["documents"]
    assert 2 <= len(found["validation"]) <= 15
    in_order = sorted(everything[:60], key=lambda line: (int(line.split(":")[0]) % 3, int(line.split(":")[0])))
    assert found["train"] == [line for line in [*in_order, everything[60]] if line in found["train"]]
    assert open_tokens(tmp_path / "out").manifest == manifest
    assert [manifest[key] for key in ("kind", "dtype", "vocab_size", "eos_id")] == ["text", "uint16", 280, 0]
    assert not (tmp_path / "out" / "progress.json").exists()


def test_left_out_files_are_counted_and_named(tmp_path, job):
    left_out = run(job(), tmp_path / "out")["left_out"]
    by_name = {record["names"][0]: (reason, record["count"]) for reason, record in left_out.items()}
    assert by_name["0/blank.txt"] == ("empty", 1)
    assert by_name["1/latin.txt"][0].startswith("wrong encoding")
    assert by_name["2/picture.png"] == ("not a .txt, .md, .py, .jsonl, .parquet file", 1)
    assert by_name[".git/log.txt"] == ("hidden", 1)
    assert by_name["2/link.txt"] == ("a broken link", 1)
    assert len(by_name) == 5


def test_splits_do_not_depend_on_the_shard_size(tmp_path, job):
    small, large = (run(job(shard_tokens=size), tmp_path / str(size)) for size in (200, 10**9))
    assert len(small["train"]["shards"]) > 5
    assert len(large["train"]["shards"]) == len(large["validation"]["shards"]) == 1
    assert decoded(tmp_path / "200") == decoded(tmp_path / str(10**9))
    for split in ("train", "validation"):
        one, other = (getattr(open_tokens(tmp_path / name), split) for name in ("200", str(10**9)))
        assert np.array_equal(one.read(0, one.tokens), other.read(0, other.tokens))
        assert small[split]["tokens"] == large[split]["tokens"] == one.tokens
    totals = [shard["tokens"] for shard in small["train"]["shards"]]
    assert all(total < 200 + 100 for total in totals)
    assert len(Blocks(one, 5)) == (one.tokens - 1) // 5


def test_the_validation_split_has_the_configured_share(tmp_path, job):
    assert run(job(validation=0), tmp_path / "none")["validation"] == {"documents": 0, "tokens": 0, "shards": []}
    assert run(job(validation=1e-9), tmp_path / "least")["validation"]["documents"] == 1
    assert 20 <= run(job(validation=0.5), tmp_path / "half")["validation"]["documents"] <= 41
    shares = [prepare_module._hash(number, "part") for number in range(4000)]
    assert 0.045 < np.mean(np.array(shares) < 0.05) < 0.055
    assert abs(np.corrcoef(shares, [prepare_module._hash(number, "tokenizer") for number in range(4000)])[0, 1]) < 0.05


def test_a_limit_takes_the_first_documents(tmp_path, job):
    manifest = run(job(limit=7), tmp_path / "out")
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == 7
    assert "0/blank.txt" not in str(manifest["left_out"])


def test_a_long_text_file_can_be_cut_into_documents(tmp_path, job):
    whole = "".join(text(number) for number in range(40))
    (tmp_path / "one.txt").write_text(whole)
    with pytest.raises(
        ValueError, match=r"source must have documents for training, got .* whose 1 documents are all for validation"
    ):
        run(job(source=str(tmp_path / "one.txt")), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = run(job(source=str(tmp_path / "one.txt"), cut=500), tmp_path / "out")
    assert manifest["train"]["documents"] > 10
    assert all(line.endswith(".\n") for line in decoded(tmp_path / "out")["train"])
    assert run(job(source=str(tmp_path / "one.txt"), validation=0), tmp_path / "whole")["train"]["documents"] == 1
    for cut in (1, 7, 500, len(whole) - 1, len(whole), None):
        parts = list(cut_text(whole, cut))
        assert "".join(parts) == whole
        assert all(0 < len(part) <= (cut or len(whole)) for part in parts)


# ---- interrupted jobs


def interrupt(config, output, name, count, error=RuntimeError):
    """Run a job in which a method of ShardWriter raises on its `count`-th call."""
    real, calls = getattr(shards.ShardWriter, name), []

    def method(self, *arguments):
        calls.append(name)
        if len(calls) == count:
            raise error("stopped")
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.ShardWriter, name, method)
        with pytest.raises(error, match="stopped"):
            run(config, output)


@pytest.mark.parametrize(
    ("name", "count", "error"),
    [
        ("add", 30, RuntimeError),
        ("close", 4, KeyboardInterrupt),
        *(
            pytest.param(name, count, error, marks=pytest.mark.full)
            for name, count in (("add", 30), ("add", 60), ("close", 3), ("close", 4), ("close", 7))
            for error in (RuntimeError, KeyboardInterrupt)
            if (name, count, error) not in (("add", 30, RuntimeError), ("close", 4, KeyboardInterrupt))
        ),
    ],
)
def test_a_resumed_job_writes_the_same_bytes(tmp_path, job, monkeypatch, name, count, error):
    monkeypatch.setattr(prepare_module, "BATCH_ITEMS", 8)
    run(job(), tmp_path / "whole")
    interrupt(job(), tmp_path / "out", name, count, error)
    assert (tmp_path / "out" / "progress.json").is_file()
    assert not list((tmp_path / "out").glob("*.bin.part"))
    with pytest.raises(ValueError, match="unfinished; use --resume"):
        open_tokens(tmp_path / "out")
    run(job(), tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_resumed_job_reads_only_the_rest(tmp_path, job, monkeypatch):
    monkeypatch.setattr(prepare_module, "BATCH_ITEMS", 8)
    interrupt(job(), tmp_path / "out", "add", 55)
    read = []
    real = corpora.read_text
    monkeypatch.setattr(corpora, "read_text", lambda root, path, cut: read.append(path) or real(root, path, cut))
    run(job(), tmp_path / "out", resume=True)
    assert 5 < len(read) < 35


def test_a_job_interrupted_after_its_last_shard_is_resumed(tmp_path, job, monkeypatch):
    run(job(), tmp_path / "whole")
    real = prepare_module.write_json

    def write(path, content):
        if path.name == "tokens.json":
            raise RuntimeError("stopped")
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "write_json", write)
        with pytest.raises(RuntimeError, match="stopped"):
            run(job(), tmp_path / "out")
    run(job(), tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


# Kills itself after closing the second training shard, before the validation shard.
KILLED = """
import os, signal, sys
from pathlib import Path
from muonssm.lab.language import shards
from muonssm.lab.language.prepare import PrepareConfig, prepare
close = shards.ShardWriter.close
def closed(self):
    record = close(self)
    if self.path.name == "train-00001.bin":
        os.kill(os.getpid(), signal.SIGKILL)
    return record
shards.ShardWriter.close = closed
prepare(PrepareConfig(sys.argv[1], vocab_size=300, validation=0.1, shard_tokens=700), Path(sys.argv[2]), progress=False)
"""


@pytest.mark.slow
def test_a_killed_job_resumes_to_the_same_bytes(tmp_path, texts):
    config = PrepareConfig(str(texts), vocab_size=300, validation=0.1, shard_tokens=700)
    run(config, tmp_path / "whole")
    arguments = [sys.executable, "-c", KILLED, str(texts), str(tmp_path / "out")]
    assert subprocess.run(arguments, capture_output=True).returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["shards"] == 1
    assert (tmp_path / "out" / "train-00001.bin").is_file()
    assert (tmp_path / "out" / "validation-00001.bin.part").is_file()
    run(config, tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_folder_with_other_files_is_not_touched(tmp_path, job):
    config, out = job(), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"output must be a new or empty folder, got .* which has notes\.txt"):
        run(config, out)
    with pytest.raises(ValueError, match="output must have a job to resume"):
        run(config, out, resume=True)
    with pytest.raises(ValueError, match=r"output must be a new or empty folder, got .*notes\.txt', which is a file"):
        run(config, out / "notes.txt", resume=True)
    assert content(out) == {"notes.txt": b"mine"}
    (out / "notes.txt").rename(out / "film.part")
    with pytest.raises(ValueError, match=r"output must have a job to resume, got .* which has film\.part and no job"):
        run(config, out, resume=True)
    assert (out / "film.part").read_text() == "mine"


def test_a_finished_folder_is_reused_only_with_the_same_settings(tmp_path, job):
    manifest = run(job(), tmp_path / "out", resume=True)
    before = content(tmp_path / "out")
    assert run(job(), tmp_path / "out", resume=True) == manifest
    with pytest.raises(ValueError, match="output must be a new or empty folder"):
        run(job(), tmp_path / "out")
    with pytest.raises(ValueError, match=r"validation must be 0\.1, .* got 0\.2"):
        run(job(validation=0.2), tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == before


def test_resume_detects_a_changed_source_and_damaged_files(tmp_path, job):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(60)))
    interrupt(job(source=str(source)), tmp_path / "out", "add", 50)
    source.write_text(source.read_text() + '{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"source must be as it was when the job began, got .*rows\.jsonl"):
        run(job(source=str(source)), tmp_path / "out", resume=True)
    source.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(60)))
    (tmp_path / "out" / "train-00000.bin").unlink()
    with pytest.raises(ValueError, match=r"train-00000\.bin is missing"):
        run(job(source=str(source)), tmp_path / "out", resume=True)
    (tmp_path / "out" / "progress.json").write_text("{}")
    with pytest.raises(ValueError, match=r"progress\.json is damaged"):
        run(job(source=str(source)), tmp_path / "out", resume=True)


# ---- sources


def jsonl(path, lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def test_unusable_rows_of_jsonl_are_named(tmp_path, job):
    good = [{"body": text(number), "text": 1} for number in range(5)]
    bad = [
        b"{",
        b"[1]",
        b"\xff",
        {"body": None},
        {"body": 3},
        {"other": ""},
        {"body": "half \ud800"},
        {"body": " "},
        b"",
    ]
    manifest = run(job(source=jsonl(tmp_path / "a.jsonl", good + bad), field="body"), tmp_path / "out")
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == 5
    assert {reason: record["names"] for reason, record in manifest["left_out"].items()} == {
        "not a JSON object": ["a.jsonl:6", "a.jsonl:7", "a.jsonl:8"],
        "empty": ["a.jsonl:9", "a.jsonl:13"],
        "no text in field 'body'": ["a.jsonl:10", "a.jsonl:11"],
        "not valid Unicode (half of a surrogate pair)": ["a.jsonl:12"],
    }


def test_a_wrong_field_is_detected_early(tmp_path, job, monkeypatch):
    monkeypatch.setattr(prepare_module, "MAX_UNUSABLE", 10)
    source = jsonl(tmp_path / "a.jsonl", [{"body": text(number)} for number in range(100)])
    for config in (job(source=source), job(source=source, tokenizer=None, vocab_size=300)):
        with pytest.raises(
            ValueError, match=r"source .* whose first 10 are unusable \(a\.jsonl:11: no text in field 'text'"
        ):
            run(config, tmp_path / "made" / "out")
        assert not (tmp_path / "made").exists()


def test_parquet_and_jsonl_give_the_same_documents(tmp_path, job):
    rows = [{"text": text(number), "id": number} for number in range(50)]
    (tmp_path / "rows").mkdir()
    (tmp_path / "lines").mkdir()
    for start in (0, 30):
        table = pyarrow.Table.from_pylist(rows[start : start + 30])
        pyarrow.parquet.write_table(table, tmp_path / "rows" / f"{start:02d}.parquet", row_group_size=7)
        jsonl(tmp_path / "lines" / f"{start:02d}.jsonl", rows[start : start + 30])
    run(job(source=str(tmp_path / "rows")), tmp_path / "out")
    run(job(source=str(tmp_path / "lines")), tmp_path / "other")
    assert decoded(tmp_path / "out") == decoded(tmp_path / "other")
    with pytest.raises(ValueError, match=r"field must be one of text, id in .*00\.parquet, got 'body'"):
        run(job(source=str(tmp_path / "rows"), field="body"), tmp_path / "no")
    (tmp_path / "rows" / "99.parquet").write_bytes(b"PAR1 no")
    left_out = run(job(source=str(tmp_path / "rows")), tmp_path / "more")["left_out"]
    assert left_out.pop("not a complete Parquet file; the rest of it is not read")["names"] == ["99.parquet:0"]
    assert not left_out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"source must have a \.txt, .* file for kind 'text'"),
        ({"a.json": "[]"}, r"source must have a \.txt, .* file for kind 'text'"),
        ({"a.txt": ""}, r"source .* with none among 1 \(1: empty\)"),
        ({"a.jsonl": ""}, r"source .* with none among 0 \(empty\)"),
        ({"a.jsonl": "{}\n{}"}, r"source .* with none among 2 \(2: no text in field 'text'\)"),
    ],
)
def test_an_empty_source_is_an_error_and_leaves_nothing(tmp_path, job, files, message):
    (tmp_path / "source").mkdir()
    for name, body in files.items():
        (tmp_path / "source" / name).write_text(body)
    for config in (job(source=str(tmp_path / "source")), PrepareConfig(str(tmp_path / "source"))):
        with pytest.raises(ValueError, match=message):
            run(config, tmp_path / "a" / "b")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


def hub(monkeypatch, tmp_path, rows):
    """Replace the hub by a stream of three local files; return the list of its calls."""
    import datasets

    calls, real = [], datasets.load_dataset
    files = []
    for number in range(3):
        files.append(str(tmp_path / f"hub{number}.parquet"))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[number::3]), files[-1], row_group_size=4)

    def load(*arguments, **settings):
        calls.append((arguments, settings))
        return real("parquet", data_files=files, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_a_data_set_on_the_hub_is_streamed_and_resumed(tmp_path, job, monkeypatch):
    rows = [{"text": text(number), "id": number} for number in range(60)]
    calls = hub(monkeypatch, tmp_path, rows)
    monkeypatch.setattr(prepare_module, "BATCH_ITEMS", 7)
    config = job(source="fineweb-edu", tokenizer=None, vocab_size=300)
    manifest = run(config, tmp_path / "whole")
    assert manifest["source"]["name"] == "fineweb-edu"
    settings = {"revision": None, "split": "train", "streaming": True}
    assert calls == [(("HuggingFaceFW/fineweb-edu", "sample-10BT"), settings)]
    found = decoded(tmp_path / "whole")
    assert sorted(found["train"] + found["validation"]) == sorted(row["text"] for row in rows)
    for count in (30, 45, 58):
        interrupt(config, tmp_path / f"out{count}", "add", count)
        assert json.loads((tmp_path / f"out{count}" / "progress.json").read_text())["number"] > 0
        run(config, tmp_path / f"out{count}", resume=True)
        assert content(tmp_path / f"out{count}") == content(tmp_path / "whole")
    with pytest.raises(ValueError, match="field must be one of text, id in source 'a/b', got 'body'"):
        run(job(source="a/b", field="body"), tmp_path / "no")
    run(job(source="a/b", revision="v1"), tmp_path / "b")
    assert calls[-1] == (("a/b", None), {**settings, "revision": "v1"})


def test_a_source_that_does_not_exist_is_rejected(tmp_path, job, monkeypatch):
    import datasets

    def unreachable(*arguments, **settings):
        raise ConnectionError("Couldn't reach it\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        ValueError, match=r"source must be .* got 'a/b', .* cannot be opened on the hub: Couldn't reach it$"
    ):
        run(job(source="a/b"), tmp_path / "out")
    for name in ("missing.txt", "/no/such/folder", "a/b/c", "x y/z"):
        with pytest.raises(ValueError, match=r"source must be 'stdlib', .* which does not exist"):
            run(job(source=name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- instructions


def test_instructions_record_the_length_of_their_prompt(tmp_path, job):
    rows = [{"instruction": f"Say {n}.", "input": "" if n % 2 else f"x{n}", "output": text(n, 3)} for n in range(20)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    manifest = run(job(source=str(tmp_path / "alpaca.json"), kind="instructions"), tmp_path / "out")
    data = open_tokens(tmp_path / "out")
    tokenizer = data.load_tokenizer()
    found = {}
    for split in (data.train, data.validation):
        for i in range(split.documents):
            ids, size = split.document(i)
            assert ids[-1] == manifest["eos_id"]
            found[tokenizer.decode(ids[:size])] = tokenizer.decode(ids[size:-1])
    assert found == {prompt(row["instruction"], row["input"]): row["output"] for row in rows}
    assert manifest["kind"] == "instructions"


def test_long_instructions_are_cut_and_counted(tmp_path, job, tokenizer):
    rows = [
        {"instruction": "Go.", "output": "yes"},
        {"instruction": "Go.", "input": None, "output": text(0, 300)},
        {"instruction": text(1, 400), "input": "", "output": "never"},
        {"instruction": "Go.", "output": ""},
        {"instruction": " ", "output": "what"},
        {"instruction": "Go.", "output": 7},
    ]
    source = jsonl(tmp_path / "a.jsonl", rows)
    manifest = run(job(source=source, kind="instructions", max_length=200, validation=0), tmp_path / "out")
    train = open_tokens(tmp_path / "out").train
    assert manifest["truncated"] == 1
    assert {reason: record["names"] for reason, record in manifest["left_out"].items()} == {
        "prompt of 200 tokens or more": ["a.jsonl:3"],
        "empty": ["a.jsonl:5"],
        "no text in field 'output'": ["a.jsonl:6"],
    }
    size = len(encode(load_tokenizer(tokenizer), [prompt("Go.")])[0])
    assert [train.document(i)[1] for i in range(3)] == [size] * 3
    assert len(train.document(1)[0]) == 200
    assert train.document(1)[0][-1] != manifest["eos_id"]
    assert len(train.document(2)[0]) == size + 1


def test_alpaca_is_instructions_and_errors_suggest_the_kind(tmp_path, job, monkeypatch):
    assert PrepareConfig("alpaca").kind == PrepareConfig("tatsu-lab/alpaca").kind == "instructions"
    row = {"instruction": "Say hi.", "input": "", "output": "hi", "other": "x"}
    calls = hub(monkeypatch, tmp_path, [row] * 9)
    assert run(job(source="alpaca", kind=None), tmp_path / "out")["train"]["documents"] > 0
    assert calls[0][0] == ("tatsu-lab/alpaca", None)
    with pytest.raises(ValueError, match=r"field must be .* got 'text'; set kind to 'instructions'"):
        run(job(source="some/instructions"), tmp_path / "no")


# ---- tokenizers


def test_a_trained_tokenizer_is_deterministic_and_loads_again(tmp_path, texts):
    from transformers import AutoTokenizer

    config = PrepareConfig(str(texts), vocab_size=290, validation=0.1)
    for name in ("one", "other"):
        assert run(config, tmp_path / name)["vocab_size"] == 290
    assert content(tmp_path / "one") == content(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == "<|endoftext|>"
    line = "  Größe\t\n\x00 😀 <|endoftext|> 1234"
    assert tokenizer.decode(encode(tokenizer, [line])[0]) == line


def test_names_of_special_tokens_in_a_text_are_text(tokenizer):
    loaded = load_tokenizer(tokenizer)
    ids = encode(loaded, ["a<|endoftext|>b"])[0]
    assert loaded.eos_token_id not in ids
    assert loaded.decode(ids) == "a<|endoftext|>b"
    assert loaded("a<|endoftext|>b")["input_ids"].count(loaded.eos_token_id) == 1
    lines = [text(number) for number in range(9)]
    assert [ids.tolist() for ids in encode(loaded, lines)] == loaded(lines)["input_ids"]


def test_a_tokenizer_can_be_a_file(tmp_path, job, tokenizer):
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "own.json"))
    alone = run(job(tokenizer=str(tmp_path / "own.json")), tmp_path / "out")
    beside = run(job(tokenizer=f"{tokenizer}/tokenizer.json"), tmp_path / "other")
    assert alone["train"]["tokens"] == beside["train"]["tokens"] > 1000
    assert decoded(tmp_path / "out") == decoded(tmp_path / "other")


def test_a_large_vocabulary_uses_uint32(tmp_path, job):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 69999, **{f"w{n}": n for n in range(69999)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(tmp_path / "words.json"))
    source = jsonl(tmp_path / "a.jsonl", [{"text": f"w{n} w69998"} for n in range(1, 9)])
    manifest = run(job(source=source, tokenizer=str(tmp_path / "words.json"), validation=0), tmp_path / "out")
    assert (manifest["dtype"], manifest["vocab_size"], manifest["eos_id"]) == ("uint32", 70000, 69999)
    assert open_tokens(tmp_path / "out").train.read(0, 6).tolist() == [1, 69998, 69999, 2, 69998, 69999]


def test_unusable_tokenizers_are_rejected(tmp_path, job, monkeypatch):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "bare.json"))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, message in {
        str(tmp_path / "bare.json"): "must have an EOS token, got {}",
        str(tmp_path / "broken.json"): "must be None, .* got {}, which cannot be loaded",
        str(tmp_path / "empty"): "must be None, .* got {}, which cannot be loaded",
        str(tmp_path / "missing"): "must be None, .* got {}, which does not exist",
        "missing.json": "must be None, .* got {}, which does not exist",
        "nobody/has-this-one": "must be None, .* got {}, which cannot be loaded",
    }.items():
        with pytest.raises(ValueError, match="tokenizer " + message.format(f"'{name}'")):
            run(job(tokenizer=name), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_texts_for_the_tokenizer_are_sampled_evenly():
    lines = [(prepare_module._hash(number, "tokenizer"), f"{number:04d}" * 5) for number in range(2000)]
    chosen = sample_texts(lines, 4000)
    assert 1500 < sum(map(len, chosen)) <= 4000
    numbers = [int(line[:4]) for line in chosen]
    assert numbers == sorted(numbers)
    assert max(np.diff([0, *numbers, 2000])) < 200
    assert sample_texts(lines, 10**9) == [line for _, line in lines]
    assert [len(line) for line in sample_texts([(0.3, "x" * 50), (0.2, "y" * 70)], 20)] == [20]
    assert sample_texts([], 20) == []


# ---- Python's standard library, and the cache


def test_stdlib_has_sorted_python_files_without_tests():
    source = open_source("stdlib")
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert len(names) == source.total > 400
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "encodings/utf_8.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert not [name for name in names if "sysconfigdata" in name or name.startswith("config-")]
    assert source.metadata["python"] == platform.python_version()
    item = next(item for item in source.items([names.index("bisect.py"), 0]))
    assert item == Document("bisect.py", (source.root / "bisect.py").read_text())


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small library in place of Python's, and an empty cache."""
    root = tmp_path / "lib"
    for number in range(30):
        path = root / f"package{number % 2}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(number))
    for name in ("site-packages/a.py", "package0/test/b.py", "_sysconfigdata_x.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("never")
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setenv("MUONSSM_CACHE", str(tmp_path / "cache"))
    return root


def test_stdlib_is_prepared_once(library, tmp_path, monkeypatch):
    folder = prepare_stdlib(290)
    manifest = open_tokens(folder).manifest
    assert folder.parent == tmp_path / "cache"
    assert platform.python_version() in folder.name
    assert manifest["source"]["python"] == platform.python_version()
    assert manifest["vocab_size"] == 290
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == 30
    monkeypatch.setattr(prepare_module, "prepare", None)
    assert prepare_stdlib(290) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with pytest.raises(ValueError, match="vocab_size must be an integer >= 257, got 200"):
        prepare_stdlib(200)
    next(folder.glob("train-*.bin")).unlink()
    with pytest.raises(ValueError, match=r"train-00000\.bin is missing"):
        prepare_stdlib(290)


def test_two_processes_can_fill_the_cache_at_once(library, monkeypatch):
    real = prepare_module.prepare
    calls = []

    def slow(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == 1:
            assert prepare_stdlib(280)  # another process is faster
        return real(*arguments, **settings)

    monkeypatch.setattr(prepare_module, "prepare", slow)
    folder = prepare_stdlib(280)
    assert len(calls) == 2
    assert open_tokens(folder).train.documents > 20
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MUONSSM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("MUONSSM_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "muonssm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "muonssm"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"source": ""}, ValueError),
        ({"field": None}, TypeError),
        ({"kind": "images"}, ValueError),
        ({"kind": "instructions"}, ValueError),  # stdlib is text
        ({"tokenizer": ""}, ValueError),
        ({"vocab_size": 256}, ValueError),
        ({"validation": 1.0}, ValueError),
        ({"validation": -0.1}, ValueError),
        ({"validation": True}, TypeError),
        ({"validation": float("nan")}, ValueError),
        ({"shard_tokens": 0}, ValueError),
        ({"shard_tokens": None}, TypeError),
        ({"limit": 0}, ValueError),
        ({"cut": 2.5}, TypeError),
        ({"max_length": 1}, ValueError),
    ],
    ids=str,
)
def test_invalid_settings_are_rejected(changes, error):
    (name,) = changes
    with pytest.raises(error, match=f"^{name} must be"):
        PrepareConfig(**changes)
