"""Bytes as tokens: the published splits of enwik8, their tokenizer, and runs that are scored in bits per byte."""

from __future__ import annotations

import gzip
import hashlib
import json
import math

import numpy as np
import pytest

from muonssm.cli import main
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train
from muonssm.lab.core.untrusted import UntrustedFileError
from muonssm.lab.language import enwik8
from muonssm.lab.language.enwik8 import prepare_enwik8, read_enwik8
from muonssm.lab.language.prepare import PrepareConfig, prepare
from muonssm.lab.language.pretrained import load_pretrained
from muonssm.lab.language.shards import open_tokens
from muonssm.lab.language.tokenizer import byte_tokenizer, encode, load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
CONTENT = "".join(f"  <page>{i}: Ærø, naïve \u4e2d\U0001f600</page>\n\t" for i in range(150)).encode()
SMALL = [
    "data.length=24", "model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=2",
    "model.mixer={num_heads=2}", "training.steps=4", "training.evaluate_every=2", "training.batch_size=4",
    "training.precision=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small file that stands for enwik8."""
    path = tmp_path_factory.mktemp("enwik8") / "enwik8.gz"
    path.write_bytes(gzip.compress(CONTENT))
    return path


@pytest.fixture(scope="module")
def tokens(file):
    prepare_enwik8(file, file.parent / "tokens", other_file=True)
    return file.parent / "tokens"


@pytest.fixture(scope="module")
def run(tokens):
    train(Recipe.load("enwik8-small", [*SMALL, f"data.source={tokens}"]), tokens.parent / "run")
    return tokens.parent / "run"


# ---- the data


def test_the_splits_are_consecutive_shares_of_the_bytes(tokens):
    data = open_tokens(tokens)
    assert data.test is not None
    size = len(CONTENT)
    bounds = {"train": (0, size * 90 // 100), "validation": (size * 90 // 100, size * 95 // 100)}
    bounds["test"] = (size * 95 // 100, size)
    for name, (low, high) in bounds.items():
        split = getattr(data, name)
        assert (split.documents, split.tokens) == (1, high - low)
        assert split.read(0, split.tokens).astype(np.uint8).tobytes() == CONTENT[low:high]
    source = data.manifest["source"]
    assert (source["bytes"], source["published"]) == (size, False)
    assert source["md5"] == hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()


def test_a_plain_file_gives_the_tokens_of_the_packed_one(file, tokens, tmp_path):
    (tmp_path / "enwik8").write_bytes(CONTENT)
    prepare_enwik8(tmp_path / "enwik8", tmp_path / "tokens", other_file=True)
    for shard in tokens.glob("*.bin"):
        assert (tmp_path / "tokens" / shard.name).read_bytes() == shard.read_bytes()


def test_another_file_is_refused_unless_allowed(file, tmp_path):
    with pytest.raises(ValueError, match=f"--from must be enwik8, .* got .* with {len(CONTENT)} bytes .*--other-file"):
        prepare_enwik8(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_published_file_is_accepted_by_its_checksum(file, monkeypatch):
    monkeypatch.setattr(enwik8, "MD5", hashlib.md5(CONTENT, usedforsecurity=False).hexdigest())
    assert read_enwik8(file)[0] == CONTENT


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.gz", gzip.compress(CONTENT)[:200], "must be a gzip file, got a damaged one"),
        ("a.gz", b"plain", "must be a gzip file, got a damaged one"),
        ("a.gz", gzip.compress(bytes(3000)), "must decompress to 2000 bytes or less .*MAX_BYTES"),
        ("a.bin", bytes(3000), "must have 2000 bytes or less .*MAX_BYTES"),
        ("a.bin", b"x" * 99, "--from must have 100 bytes or more, got .* with 99"),
    ],
    ids=["cut", "not packed", "long when unpacked", "long", "short"],
)
def test_damaged_long_and_short_files_are_named(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(enwik8, "MAX_BYTES", 2000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises((UntrustedFileError, ValueError), match=message):
        read_enwik8(tmp_path / name, other_file=True)


def test_a_finished_folder_is_kept_and_an_interrupted_one_filled(file, tokens, tmp_path):
    out = tmp_path / "out"
    manifest = prepare_enwik8(file, out, other_file=True)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(ValueError, match="output must be a new or empty folder"):
        prepare_enwik8(file, out, other_file=True)
    assert prepare_enwik8(file, out, resume=True, other_file=True) == manifest
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    (out / "tokens.json").unlink()
    (out / "test-00000.bin").unlink()
    assert prepare_enwik8(file, out, resume=True, other_file=True) == manifest
    (tmp_path / "other").write_bytes(CONTENT[::-1])
    with pytest.raises(ValueError, match="--from must be the file of the job"):
        prepare_enwik8(tmp_path / "other", out, resume=True, other_file=True)


@pytest.mark.parametrize("name", ["notes.txt", "train.csv", "test-results.txt", "tokenizer.md", "train-00001.bin"])
def test_a_folder_with_other_files_is_not_touched(file, tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=rf"output must have a job of enwik8 .* got .* {name}"):
        prepare_enwik8(file, tmp_path, resume=True, other_file=True)
    assert (tmp_path / name).read_text() == "mine"


def test_a_damaged_test_split_is_named(tokens, tmp_path):
    for path in tokens.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = (tmp_path / "test-00000.bin").read_bytes()
    (tmp_path / "test-00000.bin").write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"test-00000\.bin must have"):
        open_tokens(tmp_path)
    (tmp_path / "test-00000.bin").write_bytes(content[:-2] + b"ab")
    with pytest.raises(ValueError, match=r"test-00000\.bin is damaged"):
        open_tokens(tmp_path)


# ---- the tokenizer


def test_ids_are_bytes():
    tokenizer = byte_tokenizer()
    text = CONTENT.decode()
    assert bytes(encode(tokenizer, [text])[0].astype(np.uint8)) == CONTENT
    assert tokenizer.decode(list(CONTENT)) == text
    every = [tokenizer.convert_ids_to_tokens(i) for i in range(256)]
    assert len(set(every)) == 256
    assert tokenizer.decode([0xE4, 0xB8]) == "\N{REPLACEMENT CHARACTER}"
    assert (tokenizer.eos_token_id, len(tokenizer)) == (256, 257)
    assert load_tokenizer("bytes").get_vocab() == tokenizer.get_vocab()


def test_other_texts_can_be_bytes_too(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(9):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"Ærø {i}")
    config = PrepareConfig(str(tmp_path / "texts"), tokenizer="bytes", validation=0.2)
    prepare(config, tmp_path / "out", progress=False)
    data = open_tokens(tmp_path / "out")
    assert data.test is None
    assert bytes(data.train.document(0)[0][:-1].astype(np.uint8)).decode().startswith("Ærø")


# ---- runs


def test_a_run_is_scored_in_bits_per_byte_of_the_test_split(run, tokens):
    metrics = RunFolder(run).read("metrics.json")
    for split in ("validation", "test"):
        assert metrics[split]["bits_per_byte"] == pytest.approx(metrics[split]["loss"] / math.log(2))
    assert metrics["test"] != metrics["validation"]
    assert 4 < metrics["test"]["bits_per_byte"] < math.log2(257) + 0.5
    model, tokenizer = load_pretrained(run)
    assert (model.config.vocab_size, len(tokenizer)) == (257, 257)


def test_other_tokens_have_no_bits_per_byte(tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(9):
        (tmp_path / "texts" / f"{i}.txt").write_text("the memory keeps what it reads and reads what it keeps")
    config = PrepareConfig(str(tmp_path / "texts"), vocab_size=280, validation=0.2)
    prepare(config, tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match=r"data\.source must have 257 tokens, .* got .* with 280"):
        Recipe.load("enwik8-small", [f"data.source={tmp_path / 'out'}", "data.length=8"]).task.load_data()


def test_commands_on_bytes(file, run, tmp_path, capsys):
    source = ["prepare", "enwik8", "--from", str(file), "--output", str(tmp_path / "tokens")]
    assert main(source) == 2
    assert "--other-file" in capsys.readouterr().err
    assert main([*source, "--other-file"]) == 0
    assert "test" in capsys.readouterr().out
    assert main([*source, "--other-file", "--resume", "--limit", "3"]) == 2
    assert "--limit must be left out" in capsys.readouterr().err
    assert main([*source, "--other-file", "--resume", "--vocab-size", "300"]) == 2
    assert "--vocab-size must be left out" in capsys.readouterr().err
    assert main(["prepare", "enwik8", "--output", str(tmp_path / "none")]) == 2
    assert "--from must be the file" in capsys.readouterr().err
    assert main(["generate", str(run), "naïve ", "--max-new-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("naïve ")
    assert main(["eval", str(run)]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert main(["report", str(run)]) == 0
    assert "bits per byte" in (run / "report.html").read_text()


@pytest.mark.slow
def test_variants_are_compared_by_bits_per_byte(tokens, tmp_path, capsys):
    changes = [part for change in [*SMALL, f"data.source={tokens}"] for part in ("--set", change)]
    options = ["--seeds", "1", "--variants", "plain,residual", "--workers", "1", "--output", str(tmp_path / "c")]
    assert main(["compare", "enwik8-small", *changes, *options]) == 0
    assert "bits per byte" in capsys.readouterr().out
    runs = json.loads((tmp_path / "c" / "comparison.json").read_text())["runs"]
    assert [run["variant"] for run in runs] == ["plain", "residual"]
    assert all(run["scores"]["bits_per_byte"] > 4 for run in runs)
