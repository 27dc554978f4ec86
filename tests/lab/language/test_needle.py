"""Needle runs: scores of right and wrong answers, resuming, and the heat map."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from muonssm.lab.language.needle import NeedleTest, run_needle, table
from muonssm.lab.language.needle_page import needle_file, needle_page, write_heatmap
from muonssm.lab.language.needle_prompts import NEEDLE, NOISE, QUESTION, TASK, NeedleConfig, default_essay, make_needle

SVG = "{http://www.w3.org/2000/svg}"
SMALL = {"lengths": (400, 520), "samples": 12, "answer_tokens": 60, "batch_size": 5}


@pytest.fixture(scope="module")
def words():
    """A byte-level BPE of 800 tokens trained on prompts and the essay, without special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [default_essay()[:20_000], (TASK + NOISE + NEEDLE + QUESTION) * 100]
    backend.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def one_thread():
    """Run on one thread: for a tiny model, synchronizing threads takes longer than computing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Reader:
    """Answers with the value in the prompt; wrong where `fails(depth)`."""

    def __init__(self, words, fails=lambda depth: False):
        self.words, self.fails, self.batches = words, fails, []

    def answer(self, prompt):
        key = re.search(r"What is the special magic \w+ for (\S+) mentioned", prompt)[1]
        needle = re.search(rf"One of the special magic \w+ for {key} is: (\S+)\.", prompt)
        depth = needle.start() / prompt.index("\nWhat is")
        return " nothing" if self.fails(depth) else f" {needle[1].upper()}, as it says."

    def generate(self, input_ids, attention_mask, max_new_tokens, do_sample, num_beams):
        assert attention_mask.all()
        assert (do_sample, num_beams) == (False, 1)
        self.batches.append(tuple(input_ids.shape))
        answers = [self.words(self.answer(self.words.decode(ids)))["input_ids"] for ids in input_ids.tolist()]
        space = self.words(" ")["input_ids"]
        longest = max(len(answer) for answer in answers)
        assert longest <= max_new_tokens
        new = torch.tensor([answer + space * (longest - len(answer)) for answer in answers])
        return torch.cat([input_ids, new], dim=1)


def test_a_perfect_reader_scores_100_and_a_blind_one_0(words):
    reader = Reader(words)
    result = run_needle(reader, words, NeedleTest(**SMALL), progress=False)
    assert [(cell["variant"], cell["length"]) for cell in result["cells"]] == [
        (variant, length) for variant in ("pk", "number", "uuid") for length in (400, 520)
    ]
    for cell in result["cells"]:
        assert cell["score"] == 100.0
        assert cell["wrong"] == []
        assert sum(one["samples"] for one in cell["depths"]) == cell["samples"] == 12
        assert {one["score"] for one in cell["depths"]} <= {100.0, None}
        assert cell["tokens"] + 60 <= cell["length"]
    assert max(rows for rows, _ in reader.batches) <= 5
    assert any(rows > 1 for rows, _ in reader.batches)
    assert sum(rows for rows, _ in reader.batches) == 6 * 12

    blind = run_needle(Reader(words, fails=lambda depth: True), words, NeedleTest(**SMALL), progress=False)
    for cell in blind["cells"]:
        assert cell["score"] == 0.0
        assert len(cell["wrong"]) == 3
        assert {one["answer"].strip() for one in cell["wrong"]} == {"nothing"}
    assert json.loads(json.dumps(blind)) == blind


def test_scores_are_split_by_depth(words):
    """A reader that forgets the first half of the prompt."""
    test = NeedleTest((1500,), ("number",), samples=40, answer_tokens=60)
    (cell,) = run_needle(Reader(words, fails=lambda depth: depth < 0.5), words, test, progress=False)["cells"]
    assert [one["from"] for one in cell["depths"]] == pytest.approx([i / 10 for i in range(10)])
    assert all(one["samples"] for one in cell["depths"])
    assert [one["score"] for one in cell["depths"][:4]] == [0.0] * 4
    assert [one["score"] for one in cell["depths"][6:]] == [100.0] * 4
    assert cell["score"] == pytest.approx(50, abs=15)
    assert all(one["depth"] < 0.6 for one in cell["wrong"])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "special",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"eos_token": "!"}, marks=pytest.mark.full),
        {"eos_token": "!", "pad_token": "#"},
    ],
)
def test_a_transformers_model_answers_greedily(words, special):
    """An untrained model finds nothing; its mode is restored, and answers are the most likely tokens."""
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words.backend_tokenizer, **special)
    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    ends = {"eos_token_id": None, "pad_token_id": None, "bos_token_id": None}
    model = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), **sizes, **ends)).train()
    test = NeedleTest((160,), ("pk",), samples=3, answer_tokens=8, batch_size=2)
    (cell,) = run_needle(model, tokenizer, test, progress=False)["cells"]
    assert cell["score"] == 0.0
    assert model.training
    model.eval()
    sample = make_needle(NeedleConfig("pk", 160, 3, 8), tokenizer)[0]
    ids = tokenizer(sample.prompt, return_tensors="pt")["input_ids"]
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    said = tokenizer.decode(ids[0, sample.tokens :].tolist(), skip_special_tokens=True)
    assert cell["wrong"][0]["value"] == sample.answer
    assert cell["wrong"][0]["answer"] == said


def test_an_interrupted_run_is_resumed(words):
    test = NeedleTest(**{**SMALL, "samples": 4})
    whole = run_needle(Reader(words), words, test, progress=False)
    saved = []

    def stop_at_third(result):
        saved.append(json.loads(json.dumps(result)))
        if len(saved) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_needle(Reader(words), words, test, save=stop_at_third, progress=False)
    assert [len(result["cells"]) for result in saved] == [1, 2, 3]
    rest = Reader(words)
    again = run_needle(rest, words, test, earlier_result=saved[-1], progress=False)
    assert again == whole
    assert sum(rows for rows, _ in rest.batches) == 3 * 4
    nothing = Reader(words)
    assert run_needle(nothing, words, test, earlier_result=whole, progress=False) == whole
    assert not nothing.batches
    more = run_needle(rest, words, NeedleTest((640,), ("pk",), 4, 60), earlier_result=whole, progress=False)
    assert len(more["cells"]) == 7  # other lengths are added; earlier cells stay


def test_cells_with_other_settings_are_not_mixed(words):
    test = NeedleTest((400,), ("pk",), 3, 60)
    earlier = run_needle(Reader(words), words, test, progress=False)
    with pytest.raises(ValueError, match=r"samples must be 3, .* got 4"):
        run_needle(Reader(words), words, NeedleTest((400,), ("pk",), 4, 60), earlier_result=earlier)
    with pytest.raises(ValueError, match="essay must be"):
        run_needle(Reader(words), words, test, essay="Another essay.", earlier_result=earlier)
    with pytest.raises(ValueError, match="earlier_result must have the keys settings and cells"):
        run_needle(Reader(words), words, test, earlier_result={"cells": []})


def test_invalid_settings_are_rejected_before_anything_runs(words):
    reader = Reader(words)
    with pytest.raises(ValueError, match=r"length must be .* for variant 'uuid'"):
        run_needle(reader, words, NeedleTest((2000, 150), ("uuid",), 3, 60))
    with pytest.raises(ValueError, match=r"answer_tokens must be .* for variant 'uuid'"):
        run_needle(reader, words, NeedleTest((400,), ("pk", "uuid"), 3, 9))
    assert not reader.batches
    for name, value, error in (
        ("lengths", (), ValueError),
        ("lengths", (400, 400), ValueError),
        ("lengths", 400, TypeError),
        ("variants", ("pk", "word"), ValueError),
        ("variants", "pk", TypeError),
        ("samples", 0, ValueError),
        ("batch_size", 0, ValueError),
    ):
        with pytest.raises(error, match="variant must be" if value == ("pk", "word") else f"{name} must be"):
            NeedleTest(**{name: value})


def test_the_table_notes_a_short_essay(words):
    test = NeedleTest((400, 520), ("pk", "number"), 4, 60)
    result = run_needle(Reader(words), words, test, essay="A short one. It ends.", progress=False)
    title, head, pk, number, *notes = table(result).splitlines()
    assert title == "needles found, % of 4 samples"
    assert head.split() == ["tokens", "400", "520"]
    assert pk.split() == ["pk", "100.0", "100.0"]
    assert number.split() == ["number", "100.0", "100.0"]
    assert [note.split(":")[0] for note in notes] == ["number 400", "number 520"]
    assert "the essay is shorter than the haystack in 4 of 4 samples" in notes[0]
    del result["cells"][1]
    assert table(result).splitlines()[2].split() == ["pk", "100.0", "-"]


def example_result():
    """A result with scores from 0 to 100, a bin without samples, and a cell that was not run."""
    cells = []
    for variant, length in (("pk", 8192), ("pk", 2048), ("uuid", 2048)):
        shares = [10.0 * i for i in range(9)] + [None]
        depths = [
            {"from": i / 10, "to": (i + 1) / 10, "samples": 0 if share is None else 10, "score": share}
            for i, share in enumerate(shares)
        ]
        wrong = [{"key": "a-b", "value": "1234567", "depth": 0.25, "answer": "<script>alert(1)</script>"}]
        cell = {"variant": variant, "length": length, "samples": 900, "score": 99.8, "depths": depths}
        cells.append({**cell, "tokens": 1.0, "repeated": 900 if length == 8192 else 0, "wrong": wrong})
    return {"settings": {"samples": 900, "answer_tokens": 128, "seed": 0, "essay": "-"}, "cells": cells}


def marks(tree, name):
    """The groups of one class, each with its tooltip and the style of its shape."""
    groups = [group for group in tree.iter(f"{SVG}g") if group.get("class") == name]
    return [(group.findtext(f"{SVG}title"), group.find(f"{SVG}path").get("style")) for group in groups]


def test_the_figure_has_a_cell_for_every_depth_and_length():
    tree = ElementTree.fromstring(needle_file(example_result()))
    cells = marks(tree, "cell")
    assert len(cells) == 3 * 10  # nine depths with samples, and the whole cell
    assert len(marks(tree, "none")) == 3 + 11  # a depth without samples in each cell, and the cell that was not run
    steps = [int(re.search(r"--s(\d+)", style)[1]) for tooltip, style in cells if tooltip.startswith("pk, 2048")]
    assert steps == [2 * i for i in range(9)] + [20]
    texts = [element.text for element in tree.iter(f"{SVG}text")]
    assert texts.count("30") == texts.count("99.8") == 3
    tooltips = [tooltip for tooltip, _ in cells + marks(tree, "none")]
    assert "pk, 2048 tokens, depth 30% to 40%: 3 of 10 found" in tooltips
    assert "uuid, 8192 tokens: no sample" in tooltips
    assert [text for text in texts if text in ("2048", "8192")] == ["2048", "8192"] * 2


def test_the_page_needs_no_other_file_and_escapes_answers(tmp_path):
    path = write_heatmap(example_result(), tmp_path / "needle.html")
    text = path.read_text()
    assert text == needle_page(example_result())
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script" not in text
    assert not re.search(r'(src|href)="', text)
    assert text.count("<figure") == 2
    assert "pk, 8192 tokens: the essay is shorter than the haystack in 900 of 900 samples" in text
    assert ElementTree.parse(write_heatmap(example_result(), str(tmp_path / "needle.svg")))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["needle.html", "needle.svg"]
    with pytest.raises(ValueError, match=r"path must end in .*\.png"):
        write_heatmap(example_result(), tmp_path / "needle.png")
    empty = {**example_result(), "cells": []}
    assert "No cell was run." in needle_page(empty)
    assert ElementTree.fromstring(needle_file(empty)) is not None
