"""The sequences of each problem follow its definition, token by token."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from muonssm.lab.recall import passkey
from muonssm.lab.recall.dataset import PROBLEMS, SPLITS, RecallConfig, make_sequences, score_predictions
from muonssm.lab.recall.mqar import draw_distinct, draw_gaps

SMALL = {"train_examples": 60, "test_examples": 40}


def sequences(split="train", **settings):
    """Inputs and labels as lists."""
    inputs, labels = make_sequences(RecallConfig(**{**SMALL, **settings}), split)
    return inputs.tolist(), labels.tolist()


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize(("length", "pairs"), [(64, 4), (512, 64), (16, 4), (17, 4)])
def test_mqar_queries_every_pair_once(length, pairs, noise):
    for tokens, labels in zip(*sequences(problem="mqar", length=length, pairs=pairs, noise=noise), strict=True):
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


@pytest.mark.parametrize("noise", [False, True])
def test_mqar_trains_with_fewer_pairs_and_tests_with_all(noise):
    settings = {"problem": "mqar", "length": 64, "pairs": 4, "fewest_pairs": 2, "noise": noise}
    counts = []
    for tokens, labels in zip(*sequences(train_examples=300, **settings), strict=True):
        asked = [t for t, label in enumerate(labels) if label != -100]
        counts.append(len(asked))
        keys, values = tokens[0 : 2 * len(asked) : 2], tokens[1 : 2 * len(asked) : 2]
        shown = dict(zip(keys, values, strict=True))
        assert sorted(tokens[t] for t in asked) == sorted(keys)
        assert all(labels[t] == shown[tokens[t]] for t in asked)
        free = [token for t, token in enumerate(tokens) if t >= 2 * len(asked) and t not in asked]
        assert (set(free) == {0}) != noise
    assert set(counts) == {2, 3, 4}
    for split in ("validation", "test"):
        _, labels = sequences(split, **settings)
        assert all(sum(label != -100 for label in row) == 4 for row in labels)
    assert sequences(**{**settings, "fewest_pairs": 4}) == sequences(**{**settings, "fewest_pairs": None})


def test_mqar_gaps_follow_the_power_law():
    """The first key's position is drawn from all, the second's from the remaining ones."""
    rows, count, power = 200_000, 12, 0.01
    positions = draw_gaps(np.random.default_rng(0), rows, 3, count, power)
    p = np.arange(1, count + 1) ** (power - 1)
    p /= p.sum()
    q = np.array([sum(p[i] * p[j] / (1 - p[i]) for i in range(count) if i != j) for j in range(count)])
    for column, expected in ((0, p), (1, q)):
        share = np.bincount(positions[:, column], minlength=count) / rows
        assert np.abs(share - expected).max() < 5 * np.sqrt(0.25 / rows)
    assert all(len(set(row)) == 3 for row in positions[:1000].tolist())

    inputs, labels = make_sequences(RecallConfig("mqar", 64, pairs=4, train_examples=20_000), "train")
    first = (inputs[:, 8:] == inputs[:, :1]).int().argmax(dim=1)  # distance of the first key's query from the pairs
    assert (labels[torch.arange(20_000), 8 + first] == inputs[:, 1]).all()
    expected = np.arange(1, 29) ** (power - 1)
    share = np.bincount(first // 2, minlength=28) / 20_000
    assert np.abs(share - expected / expected.sum()).max() < 0.015
    uniform, _ = make_sequences(RecallConfig("mqar", 64, pairs=4, power=1.0, train_examples=20_000), "train")
    first = (uniform[:, 8:] == uniform[:, :1]).int().argmax(dim=1)
    assert np.abs(np.bincount(first // 2, minlength=28) / 20_000 - 1 / 28).max() < 0.015


def test_draws_without_replacement_are_uniform():
    """All 20 ordered pairs of 5 numbers are equally likely; drawing all numbers gives a permutation."""
    pairs = draw_distinct(np.random.default_rng(0), 40_000, 2, 5)
    counts = np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25).reshape(5, 5)
    assert (counts.diagonal() == 0).all()
    assert np.abs(counts[~np.eye(5, dtype=bool)] / 40_000 - 1 / 20).max() < 0.006
    everything = draw_distinct(np.random.default_rng(0), 100, 7, 7)
    assert (np.sort(everything, axis=1) == np.arange(7)).all()


def test_copying_labels_are_the_data_in_order():
    settings = {"problem": "copying", "length": 48, "vocabulary": 10, "tokens": 6}
    places = set()
    for tokens, labels in zip(*sequences(**settings), strict=True):
        data = [token for token in tokens[:42] if token != 0]
        assert len(data) == 6
        assert all(1 <= token <= 8 for token in data)
        assert tokens[42:] == [9] * 6
        assert labels == [-100] * 42 + data
        places |= {t for t in range(42) if tokens[t]}
    assert places == set(range(42))  # every position occurs


def test_induction_label_follows_the_first_special_token():
    places = set()
    for tokens, labels in zip(*sequences(problem="induction", length=12, train_examples=500), strict=True):
        assert tokens.count(15) == 2
        assert tokens[-1] == 15
        assert labels == [-100] * 11 + [tokens[tokens.index(15) + 1]]
        assert 0 <= labels[-1] < 15
        places.add(tokens.index(15))
    assert places == set(range(10))


@pytest.mark.parametrize("digits", [1, 5])
def test_a_passkey_prompt_has_the_published_text(digits):
    config = RecallConfig("passkey", 128, digits=digits, **SMALL)
    for split, length in (("train", 128), ("test", 256)):
        inputs, labels = make_sequences(config, split, length)
        assert inputs.shape == labels.shape == (len(inputs), length)
        before = set()
        for tokens, answer in zip(inputs.tolist(), labels.tolist(), strict=True):
            assert answer[:-digits] == [-100] * (length - digits)
            key = " ".join(str(digit) for digit in answer[-digits:])
            read = passkey.decode(tokens)
            assert read.startswith("There is an important info hidden inside a lot of irrelevant text .")
            line = f" The pass key is {key} . Remember it . {key} is the pass key . "
            assert read.count(line) == 1
            head, tail = read.split(line)
            before.add(head.count("grass"))
            filler, question = tail.split("What ")
            assert question.split() == f"is the pass key ? The pass key is {key}".split()[:-1]
            assert (f"{passkey.FILLER} " * 20).startswith(filler)
        assert len(before) >= 3  # the position of the key varies


def test_the_label_of_a_digit_is_the_digit():
    assert passkey.WORDS[:10] == tuple("0123456789")
    assert max(max(row) for row in sequences(problem="passkey")[0]) < RecallConfig("passkey").vocabulary


@pytest.mark.parametrize("problem", PROBLEMS)
def test_draws_depend_only_on_seed_and_split(problem):
    config = RecallConfig(problem, 80, train_examples=30, test_examples=30, test_lengths=(80, 96))
    assert RecallConfig(**{**asdict(config), "test_lengths": [80, 96]}) == config
    splits = {split: make_sequences(config, split) for split in SPLITS}
    for split, (inputs, labels) in splits.items():
        assert inputs.dtype == labels.dtype == torch.int64
        assert inputs.shape == labels.shape == (30, 80)
        assert 0 <= inputs.min() <= inputs.max() < config.vocabulary
        again = make_sequences(config, split)
        assert torch.equal(inputs, again[0])
        assert torch.equal(labels, again[1])
        assert not torch.equal(inputs, make_sequences(replace(config, seed=1), split)[0])
    seen = {tuple(row) for row in splits["train"][0].tolist()}
    assert not seen & {tuple(row) for split in ("validation", "test") for row in splits[split][0].tolist()}
    assert make_sequences(config, "test", 96)[0].shape == (30, 96)


def test_generation_is_vectorized():
    """A loop over sequences would take minutes for the default 100,000; the bound is wide for busy machines."""
    import time

    start = time.perf_counter()
    make_sequences(RecallConfig("mqar", 256, train_examples=10_000), "train")
    assert time.perf_counter() - start < 5


def test_scores_worked_out_by_hand():
    labels = torch.tensor([[-100, 3, 4], [5, -100, -100], [-100, -100, -100]])
    predictions = torch.tensor([[9, 3, 1], [5, 7, 7], [0, 0, 0]])
    assert score_predictions(predictions, labels) == {"accuracy": pytest.approx(200 / 3), "exact": 50.0}
    assert score_predictions(labels.numpy(), labels.numpy()) == {"accuracy": 100.0, "exact": 100.0}
    with pytest.raises(ValueError, match=r"predictions .* \(3, 2\) and \(3, 3\)"):
        score_predictions(predictions[:, :2], labels)
    with pytest.raises(ValueError, match="labels must have"):
        score_predictions(predictions[2:], labels[2:])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"problem": "recall"}, ValueError, "problem"),
        ({"length": 63, "pairs": 16}, ValueError, "length must be >= 64 for problem 'mqar', pairs 16"),
        ({"length": True}, TypeError, "length"),
        ({"pairs": 16, "vocabulary": 33}, ValueError, "vocabulary must be >= 34"),
        ({"pairs": 0}, ValueError, "pairs"),
        ({"fewest_pairs": 0}, ValueError, "fewest_pairs"),
        ({"pairs": 4, "fewest_pairs": 5}, ValueError, "fewest_pairs must be <= pairs = 4, got 5"),
        ({"problem": "copying", "fewest_pairs": 1}, ValueError, "fewest_pairs must be None for problem 'copying'"),
        ({"power": 0}, ValueError, "power"),
        ({"power": "low"}, TypeError, "power"),
        ({"noise": 1}, TypeError, "noise"),
        ({"digits": 4}, ValueError, "digits must be None for problem 'mqar'"),
        ({"problem": "copying", "length": 32}, ValueError, "length must be >= 33"),
        ({"problem": "copying", "vocabulary": 3}, ValueError, "vocabulary must be >= 4"),
        ({"problem": "induction", "length": 2}, ValueError, "length must be >= 3"),
        ({"problem": "passkey", "length": 65}, ValueError, "length must be >= 66"),
        ({"problem": "passkey", "vocabulary": 60}, ValueError, "vocabulary must be None or 53"),
        ({"problem": "passkey", "test_lengths": (512, 8)}, ValueError, "test_lengths must be >= 66"),
        ({"test_lengths": ()}, ValueError, "test_lengths"),
        ({"test_lengths": (512, 512)}, ValueError, "test_lengths"),
        ({"test_lengths": 512}, TypeError, "test_lengths"),
        ({"train_examples": 0}, ValueError, "train_examples"),
        ({"seed": -1}, ValueError, "seed"),
    ],
)
def test_impossible_settings_are_refused(settings, error, message):
    with pytest.raises(error, match=f"^{message}"):
        RecallConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"length": 4, "pairs": 1, "vocabulary": 4},
        {"problem": "copying", "length": 3, "tokens": 1, "vocabulary": 4},
        {"problem": "induction", "length": 3, "vocabulary": 3},
        {"problem": "passkey", "length": 66, "test_lengths": (66,)},
    ],
)
def test_the_smallest_allowed_sizes_work(settings):
    for split in SPLITS:
        inputs, labels = make_sequences(RecallConfig(**SMALL, **settings), split)
        assert inputs.shape == labels.shape
        assert (labels != -100).any(dim=1).all()


def test_an_unknown_split_or_length_is_refused():
    config = RecallConfig("passkey", **SMALL)
    with pytest.raises(ValueError, match=r"split .* got 'dev'"):
        make_sequences(config, "dev")
    with pytest.raises(ValueError, match=r"length .* \(256, 512, 1024\) .* got 257"):
        make_sequences(config, "test", 257)
