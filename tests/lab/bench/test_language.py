"""`muonssm bench --language`: equal models, wrong results are refused, and every time is there and finite."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from tqdm import tqdm

from muonssm.lab.bench import language, limits
from muonssm.lab.bench.language import Bound, Sizes, TrainedModel
from muonssm.layers import BACKBONES

TINY = Sizes(hidden=32, layers=2, vocabulary=50, batch=2, length=12, prompt=8, new=4, early=3, late=9)
TRAINED = TrainedModel("small", hidden=32, intermediate=48, layers=2, vocabulary=50, batch=2, length=12)
OURS, ALL_MODELS = ["plain", "muon"], ["plain", "muon", "transformers"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "new"
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "TOKENS_PER_RUN", 2)
        patch.setattr(language, "COMPILED_PEER", False)
        assert language.run(output, 1, 1, TINY, (TRAINED,)) == 0
    assert torch.get_num_threads() == before
    return json.loads((output / "language.json").read_text())


def test_every_time_is_there_and_finite(record):
    sections: dict[str, list[str]] = {}
    for row in record["rows"]:
        sections.setdefault(row["section"], []).append(row["name"])
        numbers = [row[name] for name in ("milliseconds", "times", "tokens_per_second")]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert row["milliseconds"] * row["tokens_per_second"] == pytest.approx(1000)
    expected = {}
    for backbone in BACKBONES:
        names = ALL_MODELS if backbone == "mamba" else OURS
        expected[f"{backbone}, decoding 4 tokens after 8"] = names
        expected[f"{backbone}, training step, 2 x 12 tokens"] = names
        for name in OURS:
            expected[f"{backbone}, {name}, one token"] = ["at position 3", "at position 9"]
    precisions = limits.fast_precisions()
    expected["small, training step, 2 x 12 tokens"] = [f"small, {v}, {p}" for p in precisions for v in OURS]
    assert sections == expected


def test_shares_of_the_matmul_limit(record):
    """6 N flops per token over the rate of a large product, in the same run."""
    summary, model = record["summary"], TRAINED.build(False)
    parameters = sum(p.numel() for p in model.parameters())
    rows = [row for row in record["rows"] if row["section"].startswith("small")]
    assert rows
    for row in rows:
        rate = 1e9 * summary[f"matmul limit, small, {row['name'].split(', ')[-1]}, GFLOP/s"]
        share = 6 * parameters * row["tokens_per_second"] / rate
        assert summary[f"share of the matmul limit, {row['name']}"] == pytest.approx(share)
    assert 1e9 * summary["peak memory, small, float32, GB"] > 4 * 4 * parameters


def test_ratios_agree_with_the_times(record):
    summary = record["summary"]
    assert all(math.isfinite(value) for value in summary.values())
    speed = {(row["section"], row["name"]): row["tokens_per_second"] for row in record["rows"]}
    for job, section in (("training", "training step, 2 x 12 tokens"), ("decoding", "decoding 4 tokens after 8")):
        for name in OURS:
            ratio = speed[f"mamba, {section}", name] / speed[f"mamba, {section}", "transformers"]
            assert summary[f"transformers over {name}, {job}"] == pytest.approx(ratio)
    for backbone in BACKBONES:
        assert {f"muon over plain, {backbone}, {job}" for job in ("training", "decoding")} <= summary.keys()
        section = f"{backbone}, muon, one token"
        ratio = speed[section, "at position 3"] / speed[section, "at position 9"]
        assert summary[f"position 9 over 3, {backbone}, muon"] == pytest.approx(ratio)
    assert summary["size, hidden"] == 32


def test_the_peer_has_the_shapes_and_logits_of_our_model():
    models = language.contenders("mamba", TINY)
    assert list(models) == ALL_MODELS
    shapes = [sorted(tuple(p.shape) for p in model.parameters()) for model in models.values()]
    assert shapes[0] == shapes[1] == shapes[2]
    ids = language.random_tokens(2, 10, TINY.vocabulary)
    language.check(models, ids, new=3)
    with torch.no_grad():
        plain, muon, peer = (model(ids).logits for model in models.values())
    torch.testing.assert_close(plain, peer, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(muon, peer, rtol=1e-2)


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.mixer.A_log",
        pytest.param("embed_tokens.weight", marks=pytest.mark.full),
        pytest.param("layers.0.mixer.x_proj.weight", marks=pytest.mark.full),
    ],
)
def test_other_weights_are_refused(name):
    models = language.contenders("mamba", TINY)
    with torch.no_grad():
        models["plain"].model.get_parameter(name).add_(0.5)
    with pytest.raises(RuntimeError, match=r"^plain must have a relative error <= 0.0001"):
        language.check(models, language.random_tokens(2, 10, TINY.vocabulary), new=3)


def test_a_wrong_cache_is_refused(monkeypatch):
    models = language.contenders("gated_deltanet", TINY)
    whole = models["plain"].forward
    monkeypatch.setattr(models["plain"], "forward", lambda *a, **k: whole(*a, **{**k, "past_key_values": None}))
    with pytest.raises(RuntimeError, match=r"^plain, token by token, must have a relative error"):
        language.check(models, language.random_tokens(1, 10, TINY.vocabulary), new=3)


def test_a_wrong_kernel_is_refused(monkeypatch):
    models = language.contenders("longhorn", TINY)
    ids = language.random_tokens(1, 10, TINY.vocabulary)
    correct = language.reference_logits
    monkeypatch.setattr(language, "reference_logits", lambda model, ids: correct(model, ids) / 0.9)
    with pytest.raises(RuntimeError, match=r"^plain must have a relative error .*, got 1\.00e-01"):
        language.check(models, ids, new=1)


def test_single_tokens_are_read_from_the_given_position(monkeypatch):
    model = language.build("mamba", TINY, muon=True)
    positions = []
    whole = model.forward
    read = language.tokens_at(model, 5, TINY.vocabulary)
    monkeypatch.setattr(model, "forward", lambda *a, **k: positions.append(k["past_key_values"].seen) or whole(*a, **k))
    first, second = read(), read()
    assert positions == 2 * [5 + i for i in range(language.TOKENS_PER_RUN)]
    assert torch.equal(first, second)
    assert not first.requires_grad


def test_the_first_contender_is_the_baseline(monkeypatch):
    """Whatever the order in which `best_seconds` returns the contenders."""
    monkeypatch.setattr(language, "best_seconds", lambda functions, rounds, budget: {"slow": 4.0, "quick": 2.0})
    suite = language.LanguageSuite(1, tqdm(disable=True))
    seconds = suite.section("a job", {"quick": int, "slow": int}, tokens=10, budget=1.0)
    assert list(seconds.items()) == [("quick", 2.0), ("slow", 4.0)]
    rows = [(row.name, row.milliseconds, row.times, row.tokens_per_second) for row in suite.rows]
    assert rows == [("quick", 200.0, 1.0, 5.0), ("slow", 400.0, 2.0, 2.5)]


def test_verdicts_of_bounds():
    assert Bound(least=4.0).verdict(3.99) == "(target: 4 or more; missed)"
    assert Bound(least=4.0).verdict(4.0) == "(target: 4 or more; met)"
    assert Bound(most=1.2).verdict(1.1) == "(target: 1.2 or less; met)"
    assert Bound(most=1.2).verdict(math.nan) == "(target: 1.2 or less; missed)"


def test_arguments_are_checked(tmp_path):
    for change, error, message in (
        ({"hidden": 0}, ValueError, "hidden must be an integer >= 1"),
        ({"layers": True}, TypeError, "layers must be an integer"),
        ({"length": 1}, ValueError, "length must be an integer >= 2"),
        ({"early": 50, "late": 50}, ValueError, "late must be an integer >= 51"),
    ):
        with pytest.raises(error, match=message):
            Sizes(**change)
    with pytest.raises(ValueError, match="--rounds must be"):
        language.run(tmp_path, 0, 1, TINY)
    with pytest.raises(ValueError, match="--threads must be"):
        language.run(tmp_path, 1, 0, TINY)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        language.run(tmp_path / "file", 1, 1, TINY)


def test_the_peer_needs_mambapy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mambapy.pscan", None)
    with pytest.raises(ImportError, match="mambapy"):
        language.build_peer(TINY)
