"""Shards on disk: reading across shards, blocks and examples, and damaged folders."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonssm.lab.core.files import checksum, write_json
from muonssm.lab.language.instructions import Examples, pad_examples, prompt
from muonssm.lab.language.shards import Blocks, ShardWriter, dtype_for, open_tokens

EOS = 0
SHARDS = [[5, 3], [9], [2, 2, 7]]  # tokens of the documents of each training shard


def documents(sizes: list[int], first: int = 1) -> list[np.ndarray]:
    """Documents of these sizes: consecutive token ids, then EOS."""
    arrays = []
    for size in sizes:
        arrays.append(np.array([*range(first, first + size - 1), EOS]))
        first += size - 1
    return arrays


def write(folder, shards, dtype="uint16", validation=((4,),), prompts=0):
    """Write a prepared folder with documents of these sizes; return the manifest."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    manifest = {"format": 1, "kind": "text", "vocab_size": 20_000, "eos_id": EOS, "dtype": dtype}
    manifest |= {"source": {"name": "source"}, "left_out": {}, "truncated": 0}
    manifest["tokenizer"] = {"name": None, "files": {"tokenizer.json": checksum(folder / "tokenizer.json")}}
    for split, groups in (("train", shards), ("validation", validation)):
        records, first = [], 1
        for number, sizes in enumerate(groups):
            writer = ShardWriter(folder, split, number, dtype)
            for tokens in documents(list(sizes), first):
                writer.add(tokens, min(prompts, len(tokens) - 1))
                first += len(tokens) - 1
            records.append(writer.close())
        totals = {key: sum(record[key] for record in records) for key in ("tokens", "documents")}
        manifest[split] = {**totals, "shards": records}
    write_json(folder / "tokens.json", manifest)
    return manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "prepared"
    write(path, SHARDS)
    return path


def everything() -> np.ndarray:
    return np.concatenate(documents([size for shard in SHARDS for size in shard]))


# ---- reading


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 28), st.integers(0, 28))
def test_tokens_are_read_across_shards(folder, one, other):
    split = open_tokens(folder, check=False).train
    start, stop = min(one, other), max(one, other)
    assert split.tokens == 28
    assert np.array_equal(split.read(start, stop), everything()[start:stop])
    assert split.read(start, stop).dtype == np.uint16


def test_documents_read_back_as_written(folder):
    split = open_tokens(folder).train
    expected = documents([size for shard in SHARDS for size in shard])
    assert split.documents == len(expected) == 6
    assert all(np.array_equal(split.document(i)[0], tokens) for i, tokens in enumerate(expected))
    assert split.sizes()[0].tolist() == [5, 3, 9, 2, 2, 7]
    assert split.starts(0, 28).tolist() == [0, 5, 8, 17, 19, 21]
    assert split.starts(5, 17).tolist() == [5, 8]
    assert split.starts(6, 8).tolist() == []


def test_reading_beyond_the_end_is_an_error(folder):
    split = open_tokens(folder).train
    with pytest.raises(ValueError, match="start and stop must be in order"):
        split.read(5, 29)
    with pytest.raises(ValueError, match="start and stop must be in order"):
        split.read(5, 4)
    with pytest.raises(IndexError, match="document must be in 0 to 5, got 6"):
        split.document(6)


def test_a_split_without_shards_is_empty(tmp_path):
    write(tmp_path / "new", SHARDS, validation=())
    split = open_tokens(tmp_path / "new").validation
    assert (split.tokens, split.documents) == (0, 0)
    assert len(split.read(0, 0)) == len(split.starts(0, 0)) == len(split.sizes()[0]) == 0
    with pytest.raises(ValueError, match=r"split must have tokens, got .*new \(validation\)"):
        Blocks(split, 4)


def test_the_dtype_fits_the_vocabulary(tmp_path):
    assert [dtype_for(size) for size in (300, 65535, 65536, 200_000)] == ["uint16", "uint16", "uint32", "uint32"]
    write(tmp_path / "new", SHARDS, dtype="uint32")
    assert (tmp_path / "new" / "train-00000.bin").stat().st_size == 4 * sum(SHARDS[0])
    assert np.array_equal(open_tokens(tmp_path / "new").train.read(0, 28), everything())


def test_a_pickled_split_does_not_copy_its_tokens(tmp_path):
    write(tmp_path / "new", [[4000, 4000], [5000]])
    split = open_tokens(tmp_path / "new").train
    split.read(0, split.tokens)
    split.sizes()
    content = pickle.dumps(Blocks(split, 100))
    assert len(content) < 2500
    assert torch.equal(pickle.loads(content)[79]["input_ids"], Blocks(split, 100)[79]["input_ids"])


# ---- blocks


def test_blocks_overlap_by_one_token_and_labels_are_the_next_token(folder):
    blocks = Blocks(open_tokens(folder).train, 9)
    assert len(blocks) == 3
    tokens = everything()
    for i, block in enumerate(blocks):
        assert set(block) == {"input_ids", "labels"}
        assert block["input_ids"].dtype == block["labels"].dtype == torch.int64
        assert block["input_ids"].tolist() == tokens[9 * i : 9 * i + 9].tolist()
        assert block["labels"].tolist() == tokens[9 * i + 1 : 9 * i + 10].tolist()
    assert torch.equal(blocks[-1]["labels"], blocks[2]["labels"])
    assert [len(Blocks(blocks.split, length)) for length in (1, 13, 14, 26, 27)] == [27, 2, 1, 1, 1]


def test_document_ids_and_labels_separate_the_documents_of_a_block(folder):
    block = Blocks(open_tokens(folder).train, 20, keep_apart=True)[0]
    assert block["input_ids"].tolist() == [1, 2, 3, 4, 0, 5, 6, 0, 7, 8, 9, 10, 11, 12, 13, 14, 0, 15, 0, 16]
    assert block["labels"].tolist() == [2, 3, 4, 0, -100, 6, 0, -100, 8, 9, 10, 11, 12, 13, 14, 0, -100, 0, -100, 0]
    assert block["document_ids"].tolist() == [0] * 5 + [1] * 3 + [2] * 9 + [3] * 2 + [4]


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 27))
def test_document_ids_start_at_0_in_every_block(folder, length):
    split = open_tokens(folder, check=False).train
    owner = np.repeat(np.arange(6), split.sizes()[0])
    for i, block in enumerate(Blocks(split, length, keep_apart=True)):
        mine = owner[i * length : i * length + length + 1]
        assert block["document_ids"].tolist() == (mine[:-1] - mine[0]).tolist()
        assert (block["labels"] == -100).tolist() == (mine[1:] != mine[:-1]).tolist()


@pytest.mark.parametrize(("length", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_an_invalid_length_is_rejected(folder, length, error):
    with pytest.raises(error, match="length"):
        Blocks(open_tokens(folder).train, length)


def test_a_block_needs_enough_tokens(folder):
    assert len(Blocks(open_tokens(folder).train, 27)) == 1
    with pytest.raises(ValueError, match=r"length must be <= 27 for .*\(train\)"):
        Blocks(open_tokens(folder).train, 28)
    with pytest.raises(IndexError, match="block must be in 0 to 2, got 3"):
        Blocks(open_tokens(folder).train, 9)[3]


# ---- instructions


def test_the_prompt_is_alpacas():
    assert prompt("Say hi.") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay hi.\n\n### Response:"
    )
    assert prompt("Sum {x}.", "1, 2") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSum {x}.\n\n### Input:\n1, 2\n\n### Response:"
    )


def test_labels_cover_the_response_only(tmp_path):
    write(tmp_path / "new", SHARDS, prompts=4)
    examples = Examples(open_tokens(tmp_path / "new").train, 8)
    assert (len(examples), examples.truncated, examples.left_out) == (6, 0, 0)
    assert examples[2]["input_ids"].tolist() == [7, 8, 9, 10, 11, 12, 13, 14]
    assert examples[2]["labels"].tolist() == [-100, -100, -100, 11, 12, 13, 14, EOS]
    assert examples[3]["input_ids"].tolist() == [15]
    assert examples[3]["labels"].tolist() == [EOS]


def test_long_examples_are_cut_and_long_prompts_are_left_out(tmp_path):
    write(tmp_path / "new", SHARDS, prompts=4)
    split = open_tokens(tmp_path / "new").train
    examples = Examples(split, 5)
    assert (len(examples), examples.truncated, examples.left_out) == (6, 2, 0)
    assert examples[2]["labels"].tolist() == [-100, -100, -100, 11, 12]
    examples = Examples(split, 3)
    assert (len(examples), examples.truncated, examples.left_out) == (3, 0, 3)
    assert all((example["labels"] != -100).any() for example in examples)
    write(tmp_path / "long", [[9]], prompts=4)
    with pytest.raises(ValueError, match="length must be >= 4, the shortest prompt"):
        Examples(open_tokens(tmp_path / "long").train, 3)


def test_padding_is_on_the_right_to_a_multiple_of_8(tmp_path):
    write(tmp_path / "new", [[5, 10]], prompts=2)
    examples = Examples(open_tokens(tmp_path / "new").train, 2048)
    batch = pad_examples(list(examples), pad_id=77)
    assert all(value.shape == (2, 16) and value.dtype == torch.int64 for value in batch.values())
    assert batch["input_ids"][0].tolist() == [1, 2, 3, 4] + [77] * 12
    assert batch["labels"][0].tolist() == [-100, 3, 4, EOS] + [-100] * 12
    assert batch["attention_mask"].sum(1).tolist() == [4, 9]
    assert batch["attention_mask"][1].tolist() == [1] * 9 + [0] * 7
    assert pad_examples([examples[0]], 77)["input_ids"].shape == (1, 8)
    with pytest.raises(ValueError, match="items"):
        pad_examples([], 77)


# ---- damaged folders


def test_checksums_detect_a_changed_byte(tmp_path):
    for number, name in enumerate(("train-00001.bin", "validation-00000.documents.npy", "tokenizer.json")):
        folder = tmp_path / str(number)
        write(folder, SHARDS)
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is damaged: its checksum"):
            open_tokens(folder)
    assert open_tokens(tmp_path / "0", check=False).train.tokens == 28


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", ["train-00001.bin", "train-00002.documents.npy", "tokenizer.json"])
def test_a_missing_file_is_named(tmp_path, name, check):
    write(tmp_path / "new", SHARDS)
    (tmp_path / "new" / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        open_tokens(tmp_path / "new", check)


def test_a_short_file_is_named_with_its_size(tmp_path):
    write(tmp_path / "new", SHARDS)
    path = tmp_path / "new" / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train-00001\.bin must have 18 bytes, got 16"):
        open_tokens(tmp_path / "new", check=False)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-00001\.bin must have 18 bytes, got 0"):
        open_tokens(tmp_path / "new", check=False)


@pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY"])
def test_a_damaged_listing_is_named_without_checksums(tmp_path, content):
    write(tmp_path / "new", SHARDS)
    (tmp_path / "new" / "train-00000.documents.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"train-00000\.documents\.npy is damaged"):
        open_tokens(tmp_path / "new", check=False)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"format": 1}', '{"format": 1, "train": []', b"\xff\xfe"])
def test_a_damaged_manifest_is_named(tmp_path, content):
    write(tmp_path / "new", SHARDS)
    path = tmp_path / "new" / "tokens.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"tokens\.json .*is damaged"):
        open_tokens(tmp_path / "new")


def test_every_key_of_the_manifest_is_required(tmp_path):
    manifest = write(tmp_path / "new", SHARDS)
    for key in manifest:
        write_json(tmp_path / "new" / "tokens.json", {k: v for k, v in manifest.items() if k != key})
        with pytest.raises(ValueError, match=r"tokens\.json .*is damaged"):
            open_tokens(tmp_path / "new")
    write_json(tmp_path / "new" / "tokens.json", {**manifest, "format": 2})
    with pytest.raises(ValueError, match="format must be 1"):
        open_tokens(tmp_path / "new")


def test_a_folder_without_finished_tokens_is_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"source must be a folder with prepared tokens, got .*nowhere"):
        open_tokens(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"source must be .*without tokens\.json"):
        open_tokens(tmp_path)
    (tmp_path / "progress.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"source must be .*unfinished; use --resume"):
        open_tokens(tmp_path)
