"""Hostile and damaged input: no code of a folder runs, no link leads out of a source, what is damaged is named."""

from __future__ import annotations

import builtins
import json
import os
import random
import shutil
import socket
import string
import subprocess
import sys
import time

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file

from muonssm.cli import main
from muonssm.lab.core.files import checksum
from muonssm.lab.language import corpora, shards
from muonssm.lab.language.prepare import PrepareConfig, prepare
from muonssm.lab.language.pretrained import load_pretrained
from muonssm.lab.language.shards import open_tokens
from muonssm.lab.language.task import LanguageConfig, LanguageModelConfig, LanguageTask
from muonssm.lab.language.tokenizer import LONG_RUN, MAX_WORD, cut_long_words, encode, load_tokenizer, train_bpe
from muonssm.ops import Muon

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "mixer": {"num_heads": 2}}


def make(root, **model):
    config = LanguageConfig(str(root / "text"), length=40)
    return LanguageTask(config, LanguageModelConfig(**{**SIZES, **model}), Muon())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Prepared tokens in `text`, and in `saved` a model with its tokenizer."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "source").mkdir()
    for i in range(40):
        (folder / "source" / f"{i:02}.txt").write_text(f"page {i}: the memory keeps what it reads.\n" * 3)
    prepare(PrepareConfig(str(folder / "source"), vocab_size=300, validation=0.2), folder / "text", progress=False)
    task = make(folder)
    metadata = task.load_data().metadata
    torch.manual_seed(0)
    task.build_model(metadata).save_pretrained(folder / "saved")
    for file in task.files_to_copy(metadata):
        (folder / "saved" / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def copy(root, tmp_path):
    """A copy of the saved model that a test can damage."""
    return shutil.copytree(root / "saved", tmp_path / "copy")


def change(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# ---- code in a folder


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "config.json"])
def test_code_in_a_folder_is_not_run(copy, tmp_path, monkeypatch, name, known):
    def refuse(*_):
        raise AssertionError("a question was asked")

    monkeypatch.setattr(builtins, "input", refuse)
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\nclass Evil: pass\n")
    change(copy / name, auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"})
    if not known and name == "tokenizer_config.json":
        change(copy / name, tokenizer_class="Evil")
    for load in (load_pretrained, lambda folder: load_tokenizer(str(folder))):
        with pytest.raises(ValueError, match=f"'{copy}' must be a folder without code, got the key auto_map in {name}"):
            load(copy)
    assert main(["generate", str(copy), "x"]) == 2
    assert not (tmp_path / "marker").exists()


def test_pickled_weights_are_not_read(copy):
    torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"RUN must be .* got '{copy}', which cannot be loaded"):
        load_pretrained(copy)


def test_tasks_in_files_need_trust(copy, tmp_path, capsys):
    (tmp_path / "own.yaml").write_text("task: own\ndoc_to_text: !function own.marker\n")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\ndef marker(doc): return ''\n")
    for arguments in (["--tasks", str(tmp_path / "own.yaml")], ["--tasks", "own", "--include", str(tmp_path)]):
        assert main(["eval", str(copy), *arguments]) == 2
        assert "--trust-tasks must be set for tasks in files" in capsys.readouterr().err
    assert not (tmp_path / "marker").exists()


# ---- weights


@pytest.mark.parametrize("word", ["lacks", "has unknown"])
def test_weights_with_missing_or_unknown_tensors_are_refused(root, copy, capsys, word):
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if "norm" in name)
    tensor = weights.pop(name)
    if word == "has unknown":
        weights |= {name: tensor, "extra.weight": tensor.clone()}
        name = "extra.weight"
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    message = f"whose model.safetensors {word} 1 tensors: {name}"
    assert main(["generate", str(copy), "the memory"]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    task = make(root, start=str(copy))
    with pytest.raises(ValueError, match=f"model.start must be .*{message}"):
        task.build_model(task.load_data().metadata)


def test_a_start_without_learned_momentum_is_accepted(root):
    task = make(root, start=str(root / "saved"), momentum="per_head")
    assert task.build_model(task.load_data().metadata).config.momentum == "per_head"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_damaged_settings_of_a_model_are_named(root, copy, name, content):
    (copy / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{copy / name} must be (JSON|a JSON object), got"):
        load_pretrained(copy)
    if name == "config.json":
        with pytest.raises(ValueError, match=r"config\.json must be"):
            make(root).rebuild_model({}, copy)


def test_wrong_types_in_a_models_config_are_named(copy):
    change(copy / "config.json", hidden_size="wide")
    with pytest.raises(ValueError, match=rf"got '{copy}', which cannot be loaded: its config\.json: hidden_size"):
        load_pretrained(copy)


def test_a_damaged_tokenizer_is_named(copy):
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"got '{copy}', which cannot be loaded"):
        load_pretrained(copy)


# ---- the files of a source


@pytest.fixture
def source(tmp_path):
    """A folder with one file, beside a secret one that is not for reading."""
    (tmp_path / "source" / "a").mkdir(parents=True)
    (tmp_path / "source" / "a" / "one.txt").write_text("the memory keeps")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("secret")
    return tmp_path / "source"


def left_out(opened) -> dict[str, str]:
    return dict(opened.left_out)


def texts(opened) -> dict[str, str]:
    return {item.name: item.text for item in opened.items()}


def test_links_out_of_a_source_are_listed_and_followed_only_if_told(source, tmp_path):
    (source / "file.txt").symlink_to(tmp_path / "secret" / "key.txt")
    (source / "a" / "folder").symlink_to("../../secret")
    (source / "chain.txt").symlink_to("file.txt")
    opened = corpora.open_source(str(source))
    assert texts(opened) == {"a/one.txt": "the memory keeps"}
    reason = "a link that leads out of the source (--follow-links reads it)"
    assert left_out(opened) == {"a/folder": reason, "chain.txt": reason, "file.txt": reason}
    opened = corpora.open_source(str(source), follow_links=True)
    assert texts(opened) == {"a/one.txt": "the memory keeps", "chain.txt": "secret"}  # one file, by three names
    assert left_out(opened) == {
        "a/folder/key.txt": "a link to a file that is read already",
        "file.txt": "a link to a file that is read already",
    }


def test_the_command_counts_links_that_lead_out(source, tmp_path, capsys):
    for number in range(3):
        (source / f"{number}.txt").write_text(f"page {number}: the memory keeps what it reads")
        (source / f"link{number}.txt").symlink_to(tmp_path / "secret" / "key.txt")
    os.mkfifo(source / "pipe\n\x1b[31m.txt")
    (source / os.fsdecode(b"\xff.png")).write_bytes(b"")
    command = ["prepare", str(source), "--vocab-size", "300", "--validation", "0.3", "--output"]
    assert main([*command, str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "3 a link that leads out of the source (--follow-links reads it): link0.txt, link1.txt, link2.txt" in printed
    assert "must be a regular file, got a pipe: pipe\\n\\x1b[31m.txt" in printed
    assert "\\udcff.png" in printed
    assert main([*command, str(tmp_path / "more"), "--follow-links"]) == 0
    assert json.loads((tmp_path / "more" / "tokens.json").read_text())["config"]["follow_links"] is True
    assert main([*command, str(tmp_path / "out"), "--follow-links", "--resume"]) == 2
    assert "follow_links must be False" in capsys.readouterr().err


def test_links_inside_a_source_read_no_file_twice_and_no_loop(source):
    (source / ".store").mkdir()
    (source / ".store" / "0123").write_text("of the store")
    (source / "b.txt").symlink_to("a/one.txt")
    (source / "c.txt").symlink_to(".store/0123")
    (source / "again").symlink_to("a")
    (source / "a" / "up").symlink_to("..")
    (source / "loop.txt").symlink_to("loop.txt")
    (source / "one").symlink_to("other")
    (source / "other").symlink_to("one")
    for follow in (False, True):
        opened = corpora.open_source(str(source), follow_links=follow)
        assert texts(opened) == {"a/one.txt": "the memory keeps", "c.txt": "of the store"}
        reasons = left_out(opened)
        assert reasons["b.txt"] == "a link to a file that is read already"
        assert reasons["again"] == reasons["a/up"] == "a link to a folder that is read already"
        assert reasons[".store/0123"] == "hidden"
        for name in ("loop.txt", "one", "other"):
            assert reasons[name].startswith("must be a regular file, got an error: Too many levels")


def test_pipes_devices_and_sockets_are_not_opened(source, monkeypatch):
    os.mkfifo(source / "pipe.txt")
    (source / "zero.txt").symlink_to("/dev/zero")
    monkeypatch.chdir(source)  # the path of a socket has a limit
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jsonl")
        opened = corpora.open_source(str(source), follow_links=True)
    assert texts(opened) == {"a/one.txt": "the memory keeps"}
    assert left_out(opened) == {
        "pipe.txt": "must be a regular file, got a pipe",
        "socket.jsonl": "must be a regular file, got a socket",
        "zero.txt": "must be a regular file, got a device",
    }
    with pytest.raises(ValueError, match=r"pipe\.txt must be a regular file, got a pipe"):
        corpora.open_source(str(source / "pipe.txt"))
    for suffix in (".txt", ".jsonl", ".json", ".parquet"):  # a pipe that has taken the place of a file since
        os.mkfifo(source / f"late{suffix}")
        read = corpora.read_text if suffix == ".txt" else corpora.read_table
        arguments = (None,) if suffix == ".txt" else (corpora.row_converter("text", "text"), ["text"])
        (item,) = read(source, source / f"late{suffix}", *arguments)
        assert item == corpora.Unusable(f"late{suffix}", "must be a regular file, got a pipe")


@pytest.fixture
def deep(source, monkeypatch):
    """The name of a file in the source, in more folders than Python has levels of recursion."""
    monkeypatch.chdir(source)
    try:
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        with open("deep.txt", "w") as file:
            file.write("deep")
        yield "d/" * 1500 + "deep.txt"
    finally:  # not shutil.rmtree, which recurses, here and at the end of pytest
        os.chdir(source)
        subprocess.run(["rm", "-rf", "d"], check=True)


def test_deep_folders_are_read(source, deep):
    assert texts(corpora.open_source(str(source)))[deep] == "deep"


@pytest.mark.parametrize("declared", ["rot13", "idna", "undefined", "hex", "no-such"])
def test_odd_encodings_are_listed(source, declared):
    (source / "odd.py").write_bytes(f"# coding: {declared}\n# \xe9..\n".encode("latin-1"))
    items = list(corpora.open_source(str(source)).items())
    assert items[1].name == "odd.py"
    assert items[1].reason.startswith("wrong encoding")


def test_limits_name_their_setting(source, monkeypatch):
    monkeypatch.setattr(corpora, "MAX_ROW_BYTES", 40)
    monkeypatch.setattr(corpora, "MAX_FILE_BYTES", 100)
    rows = [json.dumps({"text": text}) for text in ("short", "x" * 100, "also", "y" * 3_000_000, "last")]
    (source / "rows.jsonl").write_text("\n".join(rows))
    (source / "large.txt").write_text("x" * 101)
    items = {item.name: item[1] for item in corpora.open_source(str(source)).items()}
    too_long = "a line of more than 40 bytes (muonssm.lab.language.corpora.MAX_ROW_BYTES)"
    assert items["rows.jsonl:2"] == items["rows.jsonl:4"] == too_long
    assert [items[f"rows.jsonl:{n}"] for n in (1, 3, 5)] == ["short", "also", "last"]
    assert items["large.txt"] == "must have 100 bytes or less (muonssm.lab.language.corpora.MAX_FILE_BYTES), got 101"


def test_rows_of_wrong_types_name_line_and_field(source):
    rows = [{"instruction": 3, "output": "x"}, {"instruction": "Go.", "input": 0, "output": ""}, {"instruction": "Go."}]
    (source / "rows.jsonl").write_text(
        "\n".join(map(json.dumps, rows)) + '\n{"instruction": ' + "9" * 5000 + "}\n" + "[" * 9999
    )
    items = corpora.open_source(str(source), "instructions").items()
    assert [tuple(item) for item in items] == [
        ("rows.jsonl:1", "no text in field 'instruction'"),
        ("rows.jsonl:2", "no text in field 'input'"),
        ("rows.jsonl:3", "no text in field 'output'"),
        ("rows.jsonl:4", "not a JSON object"),
        ("rows.jsonl:5", "not a JSON object"),
    ]


def test_a_parquet_column_of_another_type_is_listed(source):
    table = pyarrow.table({"text": pyarrow.array([2**62], pyarrow.timestamp("ms"))})  # a year that Python does not have
    pyarrow.parquet.write_table(table, source / "times.parquet")
    items = list(corpora.open_source(str(source)).items())
    assert isinstance(items[1], corpora.Unusable)
    assert items[1].name == "times.parquet:0"


# ---- prepared folders


@pytest.fixture
def prepared(root, tmp_path):
    """A copy of the prepared tokens that a test can damage."""
    return shutil.copytree(root / "text", tmp_path / "prepared")


def set_field(path, field, value):
    """Change a field such as `train.shards.0.tokens` of a JSON file."""
    content = json.loads(path.read_text())
    *places, last = [int(key) if key.isdigit() else key for key in field.split(".")]
    inner = content
    for place in places:
        inner = inner[place]
    inner[last] = value
    path.write_text(json.dumps(content))


SHARED_FIELDS = [
    ("tokenizer.files", []),
    ("tokenizer.files", {"../../secret": "0" * 64}),
    ("tokenizer.files", {"tokenizer.json": 3}),
    ("vocab_size", "many"),
    ("vocab_size", True),
    ("eos_id", -1),
    ("eos_id", 10**9),
    ("dtype", "float32"),
    ("dtype", []),
    ("train", 3),
    ("train.shards", {}),
    ("train.shards", [3]),
    ("train.shards.0.file", "/etc/passwd"),
    ("train.shards.0.file", "../text/train-00000.bin"),
    ("train.shards.0.tokens", 1.5),
    ("train.shards.0.tokens", -1),
    ("train.shards.0.documents", "3"),
    ("train.shards.0.sha256", None),
    ("left_out", []),
    ("left_out", {"empty": 3}),
    ("left_out", {"empty": {"count": "x", "names": []}}),
    ("left_out", {"empty": {"count": 1, "names": [3]}}),
    ("truncated", None),
]  # fmt: skip
MANIFEST_FIELDS = [("kind", "pictures"), ("source", "x"), ("source", {"name": 3}), ("train.tokens", 1), ("format", "1")]
PROGRESS_FIELDS = [
    ("config", 3), ("source", 3), ("tokenizer", 3), ("number", -1), ("shards", "x"), ("batch", []),
    ("batch.number", 10**6), ("batch.position", "x"), ("batch.position", [0]), ("batch.position", [0, -1]),
    ("batch.position", [10**6, 0]), ("batch.position", {"number": 0}), ("config.cut", []), ("config", {}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), SHARED_FIELDS + MANIFEST_FIELDS)
def test_wrong_fields_of_a_manifest_are_named(prepared, capsys, field, value):
    set_field(prepared / "tokens.json", field, value)
    named = field.replace(".0", "[0]")
    with pytest.raises(ValueError, match=r"tokens\.json is damaged") as caught:
        open_tokens(prepared)
    assert named in str(caught.value)
    assert main(["train", "language-demo", "--set", f"data.source={prepared}", "--output", f"{prepared}-run"]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture(scope="module")
def unfinished(root, tmp_path_factory):
    """A job that stopped after its second shard."""
    folder, close, closed = tmp_path_factory.mktemp("unfinished") / "out", shards.ShardWriter.close, []

    def stop(self):
        if len(closed) == 4:
            raise RuntimeError("stopped")
        closed.append(self.path)
        return close(self)

    config = PrepareConfig(str(root / "source"), tokenizer=str(root / "text"), validation=0.2, shard_tokens=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.ShardWriter, "close", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            prepare(config, folder, progress=False)
    assert (folder / "progress.json").is_file()
    return config, folder


@pytest.mark.parametrize(("field", "value"), SHARED_FIELDS + PROGRESS_FIELDS)
def test_wrong_fields_of_an_unfinished_job_are_named(unfinished, tmp_path, field, value):
    config, folder = unfinished
    copy = shutil.copytree(folder, tmp_path / "copy")
    set_field(copy / "progress.json", field, value)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(ValueError, match=r"progress\.json is damaged") as caught:
        prepare(config, copy, resume=True, progress=False)
    assert field.replace(".0", "[0]") in str(caught.value)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"format": NaN}', b"null"])
def test_damaged_json_of_a_prepared_folder_is_named(unfinished, prepared, tmp_path, content):
    (prepared / "tokens.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokens\.json .*is damaged"):
        open_tokens(prepared)
    config, folder = unfinished
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "progress.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"progress\.json .*is damaged"):
        prepare(config, copy, resume=True, progress=False)


def reseal(folder, name):
    """Give the manifest the checksum of a changed file, as someone would who means harm."""
    key = "documents_sha256" if name.endswith(".npy") else "sha256"
    set_field(folder / "tokens.json", f"train.shards.0.{key}", checksum(folder / name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda listing: listing[::-1], "documents must follow each other"),
        (lambda listing: np.add(listing, [[1, 0]]), "documents must follow each other"),
        (lambda listing: listing * [[10**9, 0]], "documents must follow each other"),
        (lambda listing: np.add(listing, [[0, 10**9]]), "documents must follow each other"),
        (lambda listing: listing - [[0, 1]], "documents must follow each other"),
        (lambda listing: listing.astype(np.float64), "must be int64"),
        (lambda listing: listing.astype(object), "is damaged"),
        (lambda listing: listing[:-1], "documents must be"),
    ],
)
def test_a_listing_is_checked_beyond_its_checksum(prepared, change, message):
    path = prepared / "train-00000.documents.npy"
    with open(path, "r+b") as file:
        listing = change(np.load(file))
        file.seek(0)
        file.truncate()
        np.save(file, np.ascontiguousarray(listing), allow_pickle=True)
    reseal(prepared, path.name)
    with pytest.raises(ValueError, match=rf"train-00000\.documents\.npy is damaged.*{message}|{message}"):
        open_tokens(prepared)


def test_an_archive_is_no_listing(prepared):
    path = prepared / "train-00000.documents.npy"
    with open(path, "wb") as file:
        np.savez(file, listing=np.zeros(3))
    reseal(prepared, path.name)
    for check in (True, False):
        with pytest.raises(ValueError, match=r"train-00000\.documents\.npy is damaged"):
            open_tokens(prepared, check)


def test_ids_outside_of_the_vocabulary_are_refused(prepared):
    path = prepared / "train-00000.bin"
    ids = np.fromfile(path, "<u2")
    ids[3] = 60_000
    ids.tofile(path)
    reseal(prepared, path.name)
    with pytest.raises(ValueError, match=r"train-00000\.bin is damaged: token ids must be < 300, .* got 60000"):
        open_tokens(prepared)


def test_two_jobs_do_not_share_a_folder(root, tmp_path):
    code = (
        "import sys; from muonssm.lab.core.lock import locked\n"
        "with locked(sys.argv[1]): print(1, flush=True); sys.stdin.read()"
    )
    config = PrepareConfig(str(root / "source"), tokenizer=str(root / "text"), validation=0.2)
    arguments, pipe = [sys.executable, "-c", code, str(tmp_path / "out")], subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe) as holder:
        holder.stdout.readline()
        with pytest.raises(ValueError, match=f"not in use, got .* which process {holder.pid} on"):
            prepare(config, tmp_path / "out", progress=False)
        holder.kill()
    (tmp_path / "out" / "progress.json.77-0123abcd.part").write_text("of a killed process")
    prepare(config, tmp_path / "out", resume=True, progress=False)
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name == "lock" or path.suffix == ".part"]


def test_an_essay_is_a_regular_text_file(copy, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["needle", str(copy), "--essay", str(tmp_path / "pipe")]) == 2
    assert "--essay must be a UTF-8 text file, got" in capsys.readouterr().err


# ---- long words


def test_long_words_are_cut_for_training_and_ordinary_text_is_not():
    line = "An ordinary text, with code = [1, 2];\n\n\t# and Größe 😀 漢字\n" * 500
    assert list(cut_long_words(line)) == [line]
    text = line + "a" * (3 * MAX_WORD + 1) + " b" + "-" * 2 * MAX_WORD
    pieces = list(cut_long_words(text))
    assert "".join(pieces) == text
    assert len(pieces) == 5
    assert not any(LONG_RUN.search(piece) for piece in pieces)


def seconds_to_train_and_encode(size: int) -> float:
    word = "".join(random.Random(0).choices(string.ascii_lowercase, k=size))
    start = time.perf_counter()
    tokenizer = train_bpe([word], 500)
    assert tokenizer.decode(encode(tokenizer, [word])[0]) == word
    return time.perf_counter() - start


def test_time_is_linear_in_the_length_of_a_word():
    small, large = seconds_to_train_and_encode(250_000), seconds_to_train_and_encode(1_000_000)
    assert large < 30  # minutes before
    assert large < 10 * small + 1  # 4 if linear, 16 if quadratic
