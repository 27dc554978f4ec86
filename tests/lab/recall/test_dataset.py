"""Tests of memory keep their definitions, checked on the sequences themselves."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from muonssm.lab.recall import passkey
from muonssm.lab.recall.dataset import KINDS, PARTS, RecallConfig, make_recall, score
from muonssm.lab.recall.mqar import distinct, gaps

SMALL = {"train_examples": 60, "test_examples": 40}


def sequences(part="train", **settings):
    """Inputs and labels as lists, to follow a definition word by word."""
    inputs, labels = make_recall(RecallConfig(**{**SMALL, **settings}), part)
    return inputs.tolist(), labels.tolist()


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (512, 64), (16, 4), (17, 4)])
def test_mqar_asks_once_for_every_pair_it_has_shown(length, pairs, noise):
    for tokens, labels in zip(*sequences(kind="mqar", length=length, pairs=pairs, noise=noise), strict=True):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < 4096 for key in keys)
        assert all(4096 <= value < 8192 for value in values)
        shown = dict(zip(keys, values, strict=True))
        asked = [t for t, label in enumerate(labels) if label != -100]
        assert sorted(tokens[t] for t in asked) == sorted(keys)
        assert all(labels[t] == shown[tokens[t]] for t in asked)
        assert all(t >= 2 * pairs and t % 2 == 0 for t in asked)
        between = [tokens[t] for t in range(2 * pairs, length) if t not in asked]
        assert (set(between) == {0}) != noise


def test_mqar_gaps_follow_the_power_law():
    """The first key's place is drawn from all; the second's from the places that the first left."""
    rows, places, power = 200_000, 12, 0.01
    found = gaps(np.random.default_rng(0), rows, 3, places, power)
    p = np.arange(1, places + 1) ** (power - 1)
    p /= p.sum()
    q = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(places) if i != j) for j in range(places)])
    for column, expected in ((0, p), (1, q)):
        share = np.bincount(found[:, column], minlength=places) / rows
        assert np.abs(share - expected).max() < 5 * np.sqrt(0.25 / rows)
    assert all(len(set(row)) == 3 for row in found[:1000].tolist())

    inputs, labels = make_recall(RecallConfig("mqar", 64, pairs=4, train_examples=20_000), "train")
    first = (inputs[:, 8:] == inputs[:, :1]).int().argmax(dim=1)  # how far behind the pairs the first key comes
    assert (labels[torch.arange(20_000), 8 + first] == inputs[:, 1]).all()
    expected = np.arange(1, 29) ** (power - 1)
    share = np.bincount(first // 2, minlength=28) / 20_000
    assert np.abs(share - expected / expected.sum()).max() < 0.015
    uniform, _ = make_recall(RecallConfig("mqar", 64, pairs=4, power=1.0, train_examples=20_000), "train")
    first = (uniform[:, 8:] == uniform[:, :1]).int().argmax(dim=1)
    assert np.abs(np.bincount(first // 2, minlength=28) / 20_000 - 1 / 28).max() < 0.015


def test_draws_without_replacement_are_even():
    """All 20 ordered pairs out of 5 equally often; all of the choices where all are taken."""
    pairs = distinct(np.random.default_rng(0), 40_000, 2, 5)
    counts = np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).reshape(5, 5)
    assert (counts.diagonal() == 0).all()
    assert np.abs(counts[~np.eye(5, dtype=bool)] / 40_000 - 1 / 20).max() < 0.006
    everything = distinct(np.random.default_rng(0), 100, 7, 7)
    assert (np.sort(everything, axis=1) == np.arange(7)).all()


def test_selective_copying_says_the_data_in_order():
    kind = {"kind": "copying", "length": 48, "vocabulary": 10, "tokens": 6}
    places = set()
    for tokens, labels in zip(*sequences(**kind), strict=True):
        data = [token for token in tokens[:42] if token != 0]
        assert len(data) == 6
        assert all(1 <= token <= 8 for token in data)
        assert tokens[42:] == [9] * 6
        assert labels == [-100] * 42 + data
        places |= {t for t in range(42) if tokens[t]}
    assert places == set(range(42))  # random spacing: sooner or later everywhere


def test_induction_is_the_token_after_the_first_special_one():
    places = set()
    for tokens, labels in zip(*sequences(kind="induction", length=12, train_examples=500), strict=True):
        assert tokens.count(15) == 2
        assert tokens[-1] == 15
        assert labels == [-100] * 11 + [tokens[tokens.index(15) + 1]]
        assert 0 <= labels[-1] < 15
        places.add(tokens.index(15))
    assert places == set(range(10))


@pytest.mark.parametrize("digits", [1, 5])
def test_a_passkey_prompt_reads_as_published(digits):
    config = RecallConfig("passkey", 128, digits=digits, **SMALL)
    for part, length in (("train", 128), ("test", 256)):
        inputs, labels = make_recall(config, part, length)
        assert inputs.shape == labels.shape == (len(inputs), length)
        before = set()
        for tokens, answer in zip(inputs.tolist(), labels.tolist(), strict=True):
            assert answer[:-digits] == [-100] * (length - digits)
            key = " ".join(str(digit) for digit in answer[-digits:])
            read = passkey.text(tokens)
            assert read.startswith("There is an important info hidden inside a lot of irrelevant text .")
            line = f" The pass key is {key} . Remember it . {key} is the pass key . "
            assert read.count(line) == 1
            head, tail = read.split(line)
            before.add(head.count("grass"))
            garbage, question = tail.split("What ")
            assert question.split() == f"is the pass key ? The pass key is {key}".split()[:-1]
            assert (f"{passkey.FILLER} " * 20).startswith(garbage)
        assert len(before) >= 3  # the key is now early, now late


def test_the_label_of_a_digit_is_the_digit():
    assert passkey.WORDS[:10] == tuple("0123456789")
    assert max(max(row) for row in sequences(kind="passkey")[0]) < RecallConfig("passkey").vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_draws_depend_on_the_seed_and_the_part_alone(kind):
    config = RecallConfig(kind, 80, train_examples=30, test_examples=30, test_lengths=(80, 96))
    assert RecallConfig(**{**asdict(config), "test_lengths": [80, 96]}) == config
    parts = {part: make_recall(config, part) for part in PARTS}
    for part, (inputs, labels) in parts.items():
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.shape == labels.shape == (30, 80)
        assert 0 <= inputs.min() <= inputs.max() < config.vocabulary
        again = make_recall(config, part)
        assert torch.equal(inputs, again[0])
        assert torch.equal(labels, again[1])
        assert not torch.equal(inputs, make_recall(replace(config, seed=1), part)[0])
    seen = {tuple(row) for row in parts["train"][0].tolist()}
    assert not seen & {tuple(row) for part in ("validation", "test") for row in parts[part][0].tolist()}
    assert make_recall(config, "test", 96)[0].shape == (30, 96)


def test_many_sequences_take_seconds():
    """A loop over rows would need minutes for the usual 100,000; the bound is wide, as machines may be busy."""
    import time

    start = time.perf_counter()
    make_recall(RecallConfig("mqar", 256, train_examples=10_000), "train")
    assert time.perf_counter() - start < 5


def test_scores_worked_out_by_hand():
    labels = torch.tensor([[-100, 3, 4], [5, -100, -100], [-100, -100, -100]])
    predicted = torch.tensor([[9, 3, 1], [5, 7, 7], [0, 0, 0]])
    assert score(predicted, labels) == {"accuracy": pytest.approx(200 / 3), "exact": 50.0}
    assert score(labels.numpy(), labels.numpy()) == {"accuracy": 100.0, "exact": 100.0}
    with pytest.raises(ValueError, match=r"predicted is \(3, 2\) and labels \(3, 3\)"):
        score(predicted[:, :2], labels)
    with pytest.raises(ValueError, match="labels has no label: all 3"):
        score(predicted[2:], labels[2:])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "recall"}, "kind is 'recall'; it may be one of"),
        ({"length": 63, "pairs": 16}, "length is 63 with kind 'mqar' and pairs 16; it may be an integer >= 64"),
        ({"length": True}, "length is True; it may be an integer >= 1"),
        ({"pairs": 16, "vocabulary": 33}, "vocabulary is 33 .* it may be an integer >= 34"),
        ({"pairs": 0}, "pairs is 0; it may be an integer >= 1"),
        ({"power": 0}, r"power is 0; it may be in \(0, 10\]"),
        ({"noise": 1}, "noise is 1; it may be True or False"),
        ({"digits": 4}, "digits is 4 with kind 'mqar'; it may be None: it is for 'passkey'"),
        ({"kind": "copying", "length": 32}, "length is 32 with kind 'copying' and tokens 16; .* >= 33"),
        ({"kind": "copying", "vocabulary": 3}, "vocabulary is 3 .* it may be an integer >= 4"),
        ({"kind": "induction", "length": 2}, "length is 2 with kind 'induction'; it may be an integer >= 3"),
        ({"kind": "passkey", "length": 65}, "length is 65 with kind 'passkey' and digits 5; .* >= 66"),
        ({"kind": "passkey", "vocabulary": 60}, "vocabulary is 60 with kind 'passkey'; it may be None or 53"),
        ({"kind": "passkey", "test_lengths": (512, 8)}, "a length in test_lengths is 8 .* >= 66"),
        ({"test_lengths": ()}, r"test_lengths is \(\); it may be None or one or more lengths"),
        ({"test_lengths": (512, 512)}, "each once"),
        ({"test_lengths": 512}, "test_lengths is 512"),
        ({"train_examples": 0}, "train_examples is 0; it may be an integer >= 1"),
        ({"seed": -1}, "seed is -1; it may be an integer >= 0"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(settings, message):
    with pytest.raises(ValueError, match=message):
        RecallConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 4, "pairs": 1, "vocabulary": 4},
        {"kind": "copying", "length": 3, "tokens": 1, "vocabulary": 4},
        {"kind": "induction", "length": 3, "vocabulary": 3},
        {"kind": "passkey", "length": 66, "test_lengths": (66,)},
    ],
)
def test_the_least_that_is_allowed_works(settings):
    for part in PARTS:
        inputs, labels = make_recall(RecallConfig(**SMALL, **settings), part)
        assert inputs.shape == labels.shape
        assert (labels != -100).any(dim=1).all()


def test_an_unknown_part_or_length_is_refused():
    config = RecallConfig("passkey", **SMALL)
    with pytest.raises(ValueError, match="part is 'dev'; it may be one of"):
        make_recall(config, "dev")
    with pytest.raises(ValueError, match=r"length is 257 with part 'test'; it may be .* \(256, 512, 1024\)"):
        make_recall(config, "test", 257)
