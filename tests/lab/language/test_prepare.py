"""From a source to a folder of tokens: what is in it, what is left out, and jobs that are stopped on the way."""

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

from muonssm.lab.language import corpora
from muonssm.lab.language import prepare as preparing
from muonssm.lab.language import shards as tokens
from muonssm.lab.language.corpora import Document, open_source, pieces
from muonssm.lab.language.instructions import prompt
from muonssm.lab.language.prepare import PrepareConfig, cache_folder, embedded, prepare
from muonssm.lab.language.shards import Blocks, open_tokens
from muonssm.lab.language.tokenizer import encode, load_tokenizer, spread, train_bpe

WORDS = ("the", "grass", "is", "green", "and", "sky", "blue", "here", "we", "go", "there", "back", "again")


def text(number: int, words: int = 30) -> str:
    random = np.random.default_rng(number)
    return f"{number}: " + " ".join(random.choice(WORDS, words)) + ".\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder of 60 text files, in folders; one is empty, one is no UTF-8, and three are something else."""
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
    """A folder with a tokenizer of 280 tokens, so that most jobs here need not train one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe([text(number) for number in range(20)], 280).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def job(texts, tokenizer):
    """A configuration of small shards."""

    def make(**changes):
        settings = {"source": str(texts), "tokenizer": tokenizer, "validation": 0.1, "shard_tokens": 700, **changes}
        return PrepareConfig(**settings)

    return make


def run(config, output, **changes):
    return prepare(config, output, progress=False, **changes)


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def decoded(folder) -> dict[str, list[str]]:
    """The texts of both parts, EOS taken off."""
    data = open_tokens(folder)
    tokenizer, eos = data.load_tokenizer(), data.manifest["eos_id"]
    found = {}
    for part in (data.train, data.validation):
        documents = [part.document(i)[0] for i in range(part.documents)]
        assert all(document[-1] == eos and eos not in document[:-1] for document in documents)
        found[part.name.split("(")[1].strip(")")] = [tokenizer.decode(document[:-1]) for document in documents]
    return found


# the folder


def test_a_folder_becomes_documents_in_two_parts(tmp_path, job):
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


def test_what_is_left_out_is_counted_and_named(tmp_path, job):
    left_out = run(job(), tmp_path / "out")["left_out"]
    by_name = {record["names"][0]: (reason, record["count"]) for reason, record in left_out.items()}
    assert by_name["0/blank.txt"] == ("is empty", 1)
    assert by_name["1/latin.txt"][0].startswith("is not in the encoding it should have")
    assert by_name["2/picture.png"] == ("is no .txt, .md, .py, .jsonl, .parquet file", 1)
    assert by_name[".git/log.txt"] == ("is hidden", 1)
    assert by_name["2/link.txt"] == ("is no file, or a link to none", 1)
    assert len(by_name) == 5


def test_shards_and_parts_do_not_depend_on_each_other(tmp_path, job):
    small, large = (run(job(shard_tokens=size), tmp_path / str(size)) for size in (200, 10**9))
    assert len(small["train"]["shards"]) > 5
    assert len(large["train"]["shards"]) == len(large["validation"]["shards"]) == 1
    assert decoded(tmp_path / "200") == decoded(tmp_path / str(10**9))
    for part in ("train", "validation"):
        one, other = (getattr(open_tokens(tmp_path / name), part) for name in ("200", str(10**9)))
        assert np.array_equal(one.read(0, one.tokens), other.read(0, other.tokens))
        assert small[part]["tokens"] == large[part]["tokens"] == one.tokens
    totals = [shard["tokens"] for shard in small["train"]["shards"]]
    assert all(total < 200 + 100 for total in totals)
    assert len(Blocks(one, 5)) == (one.tokens - 1) // 5


def test_the_validation_part_is_the_share_asked_for(tmp_path, job):
    assert run(job(validation=0), tmp_path / "none")["validation"] == {"documents": 0, "tokens": 0, "shards": []}
    assert run(job(validation=1e-9), tmp_path / "least")["validation"]["documents"] == 1
    assert 20 <= run(job(validation=0.5), tmp_path / "half")["validation"]["documents"] <= 41
    shares = [preparing._share(number, "part") for number in range(4000)]
    assert 0.045 < np.mean(np.array(shares) < 0.05) < 0.055
    assert abs(np.corrcoef(shares, [preparing._share(number, "tokenizer") for number in range(4000)])[0, 1]) < 0.05


def test_a_limit_takes_the_first_documents(tmp_path, job):
    manifest = run(job(limit=7), tmp_path / "out")
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == 7
    assert "0/blank.txt" not in str(manifest["left_out"])


def test_a_long_text_file_can_be_cut_into_documents(tmp_path, job):
    whole = "".join(text(number) for number in range(40))
    (tmp_path / "one.txt").write_text(whole)
    with pytest.raises(ValueError, match=r"has 1 documents, none of which is left .* cut may make several"):
        run(job(source=str(tmp_path / "one.txt")), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    manifest = run(job(source=str(tmp_path / "one.txt"), cut=500), tmp_path / "out")
    assert manifest["train"]["documents"] > 10
    assert all(line.endswith(".\n") for line in decoded(tmp_path / "out")["train"])
    assert run(job(source=str(tmp_path / "one.txt"), validation=0), tmp_path / "whole")["train"]["documents"] == 1
    for cut in (1, 7, 500, len(whole) - 1, len(whole), None):
        parts = list(pieces(whole, cut))
        assert "".join(parts) == whole
        assert all(0 < len(part) <= (cut or len(whole)) for part in parts)


# stopping and resuming


def stop(config, output, name, count, error=RuntimeError):
    """Runs a job in which a method of ShardWriter raises on its `count`-th call."""
    real, calls = getattr(tokens.ShardWriter, name), []

    def method(self, *arguments):
        calls.append(name)
        if len(calls) == count:
            raise error("stopped")
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens.ShardWriter, name, method)
        with pytest.raises(error, match="stopped"):
            run(config, output)


@pytest.mark.parametrize(("name", "count"), [("add", 30), ("add", 60), ("close", 3), ("close", 4), ("close", 7)])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stopped_job_goes_on_to_the_same_bytes(tmp_path, job, monkeypatch, name, count, error):
    monkeypatch.setattr(preparing, "BATCH_ROWS", 8)
    run(job(), tmp_path / "whole")
    stop(job(), tmp_path / "out", name, count, error)
    assert (tmp_path / "out" / "progress.json").is_file()
    assert not list((tmp_path / "out").glob("*.bin.part"))
    with pytest.raises(ValueError, match="did not finish"):
        open_tokens(tmp_path / "out")
    run(job(), tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_resumed_job_reads_only_what_is_left(tmp_path, job, monkeypatch):
    monkeypatch.setattr(preparing, "BATCH_ROWS", 8)
    stop(job(), tmp_path / "out", "add", 55)
    read = []
    real = corpora.read_text
    monkeypatch.setattr(corpora, "read_text", lambda root, path, cut: read.append(path) or real(root, path, cut))
    run(job(), tmp_path / "out", resume=True)
    assert 5 < len(read) < 35


def test_a_job_stopped_after_its_last_shard_is_finished(tmp_path, job, monkeypatch):
    run(job(), tmp_path / "whole")
    real = preparing.write_json

    def write(path, content):
        if path.name == "tokens.json":
            raise RuntimeError("stopped")
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(preparing, "write_json", write)
        with pytest.raises(RuntimeError, match="stopped"):
            run(job(), tmp_path / "out")
    run(job(), tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


# Kills itself when it has closed the second training shard, and not yet that of the validation part.
KILLED = """
import os, signal, sys
from pathlib import Path
from muonssm.lab.language import shards as tokens
from muonssm.lab.language.prepare import PrepareConfig, prepare
close = tokens.ShardWriter.close
def closed(self):
    record = close(self)
    if self.path.name == "train-00001.bin":
        os.kill(os.getpid(), signal.SIGKILL)
    return record
tokens.ShardWriter.close = closed
prepare(PrepareConfig(sys.argv[1], vocab_size=300, validation=0.1, shard_tokens=700), Path(sys.argv[2]), progress=False)
"""


def test_a_killed_job_goes_on_to_the_same_bytes(tmp_path, texts):
    config = PrepareConfig(str(texts), vocab_size=300, validation=0.1, shard_tokens=700)
    run(config, tmp_path / "whole")
    arguments = [sys.executable, "-c", KILLED, str(texts), str(tmp_path / "out")]
    assert subprocess.run(arguments, capture_output=True).returncode == -signal.SIGKILL
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["shards"] == 1
    assert (tmp_path / "out" / "train-00001.bin").is_file()
    assert (tmp_path / "out" / "validation-00001.bin.part").is_file()
    run(config, tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, job):
    config, out = job(), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"out has notes.txt already; resume takes up a job, output may name another"):
        run(config, out)
    with pytest.raises(ValueError, match=r"out has notes.txt, and no job to resume"):
        run(config, out, resume=True)
    with pytest.raises(ValueError, match=r"notes.txt', which is a file; it may be a folder"):
        run(config, out / "notes.txt", resume=True)
    assert content(out) == {"notes.txt": b"mine"}


def test_a_finished_folder_is_taken_as_it_is_by_the_same_settings_only(tmp_path, job):
    manifest = run(job(), tmp_path / "out", resume=True)
    before = content(tmp_path / "out")
    assert run(job(), tmp_path / "out", resume=True) == manifest
    with pytest.raises(ValueError, match=r"out has .* already"):
        run(job(), tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"out has a job with validation 0.1, and here it is 0.2; resume takes the same"
    ):
        run(job(validation=0.2), tmp_path / "out", resume=True)
    assert content(tmp_path / "out") == before


def test_another_source_or_a_lost_shard_is_noticed_by_resume(tmp_path, job):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(60)))
    stop(job(source=str(source)), tmp_path / "out", "add", 50)
    source.write_text(source.read_text() + '{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"was begun when source '.*rows.jsonl' was another"):
        run(job(source=str(source)), tmp_path / "out", resume=True)
    source.write_text("".join(json.dumps({"text": text(number)}) + "\n" for number in range(60)))
    (tmp_path / "out" / "train-00000.bin").unlink()
    with pytest.raises(ValueError, match=r"train-00000.bin is missing"):
        run(job(source=str(source)), tmp_path / "out", resume=True)
    (tmp_path / "out" / "progress.json").write_text("{}")
    with pytest.raises(ValueError, match=r"progress.json is damaged; remove the folder"):
        run(job(source=str(source)), tmp_path / "out", resume=True)


# sources


def jsonl(path, lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def test_rows_of_jsonl_that_cannot_be_used_are_named(tmp_path, job):
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
        "is no JSON object": ["a.jsonl:6", "a.jsonl:7", "a.jsonl:8"],
        "is empty": ["a.jsonl:9", "a.jsonl:13"],
        "has no text in the field 'body'": ["a.jsonl:10", "a.jsonl:11"],
        "has half of a surrogate pair, which is no Unicode text": ["a.jsonl:12"],
    }


def test_a_wrong_field_is_noticed_early(tmp_path, job, monkeypatch):
    monkeypatch.setattr(preparing, "TRIED", 10)
    source = jsonl(tmp_path / "a.jsonl", [{"body": text(number)} for number in range(100)])
    for config in (job(source=source), job(source=source, tokenizer=None, vocab_size=300)):
        with pytest.raises(ValueError, match=r"none of the first 10 documents can be used \(a.jsonl:11 has no text in"):
            run(config, tmp_path / "made" / "out")
        assert not (tmp_path / "made").exists()


def test_parquet_is_read_as_jsonl_is(tmp_path, job):
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
    with pytest.raises(ValueError, match=r"00.parquet has no field 'body'; it has text, id"):
        run(job(source=str(tmp_path / "rows"), field="body"), tmp_path / "no")
    (tmp_path / "rows" / "99.parquet").write_bytes(b"PAR1 no")
    left_out = run(job(source=str(tmp_path / "rows")), tmp_path / "more")["left_out"]
    assert left_out.pop("is no whole Parquet file: nothing is read from here on")["names"] == ["99.parquet:0"]
    assert not left_out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"which has no .txt, .md, .py, .jsonl, .parquet file for kind 'text'"),
        ({"a.json": "[]"}, r"which has no .txt, .md, .py, .jsonl, .parquet file for kind 'text'"),
        ({"a.txt": ""}, r"none of 1 documents can be used \(1 is empty\)"),
        ({"a.jsonl": ""}, r"none of 0 documents can be used \(empty\)"),
        ({"a.jsonl": "{}\n{}"}, r"none of 2 documents can be used \(2 has no text in the field 'text'\)"),
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
    """Puts a stream of three local files in place of the hub's; the calls it got."""
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


def test_a_data_set_of_the_hub_is_streamed_and_resumed(tmp_path, job, monkeypatch):
    rows = [{"text": text(number), "id": number} for number in range(60)]
    calls = hub(monkeypatch, tmp_path, rows)
    monkeypatch.setattr(preparing, "BATCH_ROWS", 7)
    config = job(source="fineweb-edu", tokenizer=None, vocab_size=300)
    manifest = run(config, tmp_path / "whole")
    assert manifest["source"]["name"] == "fineweb-edu"
    settings = {"revision": None, "split": "train", "streaming": True}
    assert calls == [(("HuggingFaceFW/fineweb-edu", "sample-10BT"), settings)]
    found = decoded(tmp_path / "whole")
    assert sorted(found["train"] + found["validation"]) == sorted(row["text"] for row in rows)
    for count in (30, 45, 58):
        stop(config, tmp_path / f"out{count}", "add", count)
        assert json.loads((tmp_path / f"out{count}" / "progress.json").read_text())["number"] > 0
        run(config, tmp_path / f"out{count}", resume=True)
        assert content(tmp_path / f"out{count}") == content(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"source 'a/b' has no field 'body'; it has text, id"):
        run(job(source="a/b", field="body"), tmp_path / "no")
    run(job(source="a/b", revision="v1"), tmp_path / "b")
    assert calls[-1] == (("a/b", None), {**settings, "revision": "v1"})


def test_a_source_that_is_nowhere(tmp_path, job, monkeypatch):
    import datasets

    def unreachable(*arguments, **settings):
        raise ConnectionError("Couldn't reach it\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"'a/b', which is no file here, and .* cannot be opened: Couldn't reach it$"):
        run(job(source="a/b"), tmp_path / "out")
    for name in ("missing.txt", "/no/such/folder", "a/b/c", "x y/z"):
        with pytest.raises(
            ValueError, match=r"which is no file and no folder; it may be 'stdlib', .*owner/name:config"
        ):
            run(job(source=name), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# instructions


def test_instructions_keep_the_length_of_their_prompt(tmp_path, job):
    rows = [{"instruction": f"Say {n}.", "input": "" if n % 2 else f"x{n}", "output": text(n, 3)} for n in range(20)]
    (tmp_path / "alpaca.json").write_text(json.dumps(rows))
    manifest = run(job(source=str(tmp_path / "alpaca.json"), kind="instructions"), tmp_path / "out")
    data = open_tokens(tmp_path / "out")
    tokenizer = data.load_tokenizer()
    found = {}
    for part in (data.train, data.validation):
        for i in range(part.documents):
            ids, size = part.document(i)
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
        "has a prompt of 200 tokens or more": ["a.jsonl:3"],
        "is empty": ["a.jsonl:5"],
        "has no text in the fields instruction, input, output": ["a.jsonl:6"],
    }
    size = len(encode(load_tokenizer(tokenizer), [prompt("Go.")])[0])
    assert [train.document(i)[1] for i in range(3)] == [size] * 3
    assert len(train.document(1)[0]) == 200
    assert train.document(1)[0][-1] != manifest["eos_id"]
    assert len(train.document(2)[0]) == size + 1


def test_what_instructions_are_is_known_or_said(tmp_path, job, monkeypatch):
    assert PrepareConfig("alpaca").kind == PrepareConfig("tatsu-lab/alpaca").kind == "instructions"
    row = {"instruction": "Say hi.", "input": "", "output": "hi", "other": "x"}
    calls = hub(monkeypatch, tmp_path, [row] * 9)
    assert run(job(source="alpaca", kind=None), tmp_path / "out")["train"]["documents"] > 0
    assert calls[0][0] == ("tatsu-lab/alpaca", None)
    with pytest.raises(ValueError, match=r"has no field 'text'; it has .*; kind may be 'instructions'"):
        run(job(source="some/instructions"), tmp_path / "no")


# tokenizers


def test_a_trained_tokenizer_is_the_same_each_time_and_reads_back(tmp_path, texts):
    from transformers import AutoTokenizer

    config = PrepareConfig(str(texts), vocab_size=290, validation=0.1)
    for name in ("one", "other"):
        assert run(config, tmp_path / name)["vocab_size"] == 290
    assert content(tmp_path / "one") == content(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == "<|endoftext|>"
    line = "  Größe\t\n\x00 😀 <|endoftext|> 1234"
    assert tokenizer.decode(encode(tokenizer, [line])[0]) == line


def test_special_tokens_in_a_text_are_text(tokenizer):
    loaded = load_tokenizer(tokenizer)
    ids = encode(loaded, ["a<|endoftext|>b"])[0]
    assert loaded.eos_token_id not in ids
    assert loaded.decode(ids) == "a<|endoftext|>b"
    assert loaded("a<|endoftext|>b")["input_ids"].count(loaded.eos_token_id) == 1
    lines = [text(number) for number in range(9)]
    assert [ids.tolist() for ids in encode(loaded, lines)] == loaded(lines)["input_ids"]


def test_a_tokenizer_may_be_a_file(tmp_path, job, tokenizer):
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    fast.enable_truncation(4)
    fast.enable_padding(length=64)
    fast.save(str(tmp_path / "own.json"))
    alone = run(job(tokenizer=str(tmp_path / "own.json")), tmp_path / "out")
    beside = run(job(tokenizer=f"{tokenizer}/tokenizer.json"), tmp_path / "other")
    assert alone["train"]["tokens"] == beside["train"]["tokens"] > 1000
    assert decoded(tmp_path / "out") == decoded(tmp_path / "other")


def test_a_large_vocabulary_takes_four_bytes(tmp_path, job):
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


def test_tokenizers_that_cannot_be_used(tmp_path, job, monkeypatch):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "bare.json"))
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, message in {
        str(tmp_path / "bare.json"): "which has no EOS token; it may be one that has, or None",
        str(tmp_path / "broken.json"): "which cannot be loaded: .*; it may be None, a tokenizer.json",
        str(tmp_path / "empty"): "which cannot be loaded: ",
        str(tmp_path / "missing"): "which is not there; it may be None, a tokenizer.json, a folder",
        "missing.json": "which is not there",
        "nobody/has-this-one": "which cannot be loaded: .*; it may be .* a name on the hub",
    }.items():
        with pytest.raises(ValueError, match=f"tokenizer is '{name}', {message}"):
            run(job(tokenizer=name), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_characters_for_the_tokenizer_are_spread_over_the_source():
    lines = [(preparing._share(number, "tokenizer"), f"{number:04d}" * 5) for number in range(2000)]
    chosen = spread(lines, 4000)
    assert 1500 < sum(map(len, chosen)) <= 4000
    numbers = [int(line[:4]) for line in chosen]
    assert numbers == sorted(numbers)
    assert max(np.diff([0, *numbers, 2000])) < 200
    assert spread(lines, 10**9) == [line for _, line in lines]
    assert [len(line) for line in spread([(0.3, "x" * 50), (0.2, "y" * 70)], 20)] == [20]
    assert spread([], 20) == []


# Python's library, and the cache


def test_the_library_is_python_files_without_tests_in_order():
    source = open_source("stdlib")
    names = [path.relative_to(source.root).as_posix() for path in source.files]
    assert len(names) == source.total > 400
    assert names == sorted(names)
    assert {"os.py", "json/decoder.py", "encodings/utf_8.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert not [name for name in names if "sysconfigdata" in name or name.startswith("config-")]
    assert source.metadata["python"] == platform.python_version()
    row = next(row for row in source.rows([names.index("bisect.py"), 0]))
    assert row == Document("bisect.py", (source.root / "bisect.py").read_text())


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small library in place of Python's own, and a cache of its own."""
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


def test_the_embedded_source_is_prepared_once(library, tmp_path, monkeypatch):
    folder = embedded(290)
    manifest = open_tokens(folder).manifest
    assert folder.parent == tmp_path / "cache"
    assert platform.python_version() in folder.name
    assert manifest["source"]["python"] == platform.python_version()
    assert manifest["vocab_size"] == 290
    assert manifest["train"]["documents"] + manifest["validation"]["documents"] == 30
    monkeypatch.setattr(preparing, "prepare", None)
    assert embedded(290) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    with pytest.raises(ValueError, match="vocab_size is 200; it may be an integer >= 257"):
        embedded(200)
    next(folder.glob("train-*.bin")).unlink()
    with pytest.raises(ValueError, match=r"train-00000.bin is missing"):
        embedded(290)


def test_two_processes_may_make_the_cache_at_once(library, monkeypatch):
    real = preparing.prepare
    calls = []

    def slow(*arguments, **settings):
        calls.append(arguments)
        if len(calls) == 1:
            assert embedded(280)  # another one is faster
        return real(*arguments, **settings)

    monkeypatch.setattr(preparing, "prepare", slow)
    folder = embedded(280)
    assert len(calls) == 2
    assert open_tokens(folder).train.documents > 20
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("MUONSSM_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("MUONSSM_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "muonssm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "muonssm"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ""}, "source is ''; it may be a name"),
        ({"field": None}, "field is None; it may be a name"),
        ({"kind": "images"}, "kind is 'images' with source 'stdlib'; it may be one of"),
        ({"kind": "instructions"}, "kind is 'instructions' with source 'stdlib'"),
        ({"tokenizer": ""}, "tokenizer is ''; it may be None or a name"),
        ({"vocab_size": 256}, "vocab_size is 256; it may be an integer >= 257"),
        ({"validation": 1.0}, r"validation is 1.0; it may be None or in \[0, 1\)"),
        ({"validation": True}, "validation is True"),
        ({"validation": float("nan")}, "validation is nan"),
        ({"shard_tokens": 0}, "shard_tokens is 0; it may be an integer >= 1"),
        ({"shard_tokens": None}, "shard_tokens is None; it may be an integer >= 1"),
        ({"limit": 0}, "limit is 0; it may be None or an integer >= 1"),
        ({"cut": 2.5}, "cut is 2.5; it may be None or an integer >= 1"),
        ({"max_length": 1}, "max_length is 1; it may be an integer >= 2"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        PrepareConfig(**changes)
