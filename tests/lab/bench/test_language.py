"""The language benchmark: equal models, refused when they are not, and every row there and finite."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from tqdm import tqdm

from muonssm.lab.bench import language
from muonssm.lab.bench.language import Bound, Sizes
from muonssm.layers import BACKBONES

TINY = Sizes(hidden=32, layers=2, vocabulary=50, batch=2, length=12, prompt=8, new=4, early=3, late=9)
OURS, EVERYONE = ["plain", "muon"], ["plain", "muon", "transformers"]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench") / "new"
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "PER_RUN", 2)
        assert language.run(output, 1, 1, TINY) == 0
    assert torch.get_num_threads() == before
    return json.loads((output / "language.json").read_text())


def test_every_row_is_there_and_finite(record):
    sections: dict[str, list[str]] = {}
    for row in record["rows"]:
        sections.setdefault(row["section"], []).append(row["name"])
        numbers = [row[name] for name in ("milliseconds", "times", "tokens_per_second")]
        assert all(math.isfinite(number) and number > 0 for number in numbers)
        assert row["milliseconds"] * row["tokens_per_second"] == pytest.approx(1000)
    wanted = {}
    for backbone in BACKBONES:
        names = EVERYONE if backbone == "mamba" else OURS
        wanted[f"{backbone}, decoding 4 tokens after 8"] = names
        wanted[f"{backbone}, training step, 2 x 12 tokens"] = names
        for name in OURS:
            wanted[f"{backbone}, {name}, one token"] = ["at position 3", "at position 9"]
    assert sections == wanted


def test_ratios_are_those_of_the_rows(record):
    metadata = record["metadata"]
    assert all(math.isfinite(value) for value in metadata.values())
    speed = {(row["section"], row["name"]): row["tokens_per_second"] for row in record["rows"]}
    for job, section in (("training", "training step, 2 x 12 tokens"), ("decoding", "decoding 4 tokens after 8")):
        for name in OURS:
            ratio = speed[f"mamba, {section}", name] / speed[f"mamba, {section}", "transformers"]
            assert metadata[f"transformers over {name}, {job}"] == pytest.approx(ratio)
    for backbone in BACKBONES:
        assert {f"muon over plain, {backbone}, {job}" for job in ("training", "decoding")} <= metadata.keys()
        place = f"{backbone}, muon, one token"
        ratio = speed[place, "at position 3"] / speed[place, "at position 9"]
        assert metadata[f"position 9 over 3, {backbone}, muon"] == pytest.approx(ratio)
    assert metadata["size, hidden"] == 32


def test_the_peer_has_our_shape_and_our_logits():
    models = language.contenders("mamba", TINY)
    assert list(models) == EVERYONE
    shapes = [sorted(tuple(p.shape) for p in model.parameters()) for model in models.values()]
    assert shapes[0] == shapes[1] == shapes[2]
    ids = language.random_tokens(2, 10, TINY.vocabulary)
    language.check(models, ids, new=3)
    with torch.no_grad():
        plain, muon, theirs = (model(ids).logits for model in models.values())
    torch.testing.assert_close(plain, theirs, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(muon, theirs, rtol=1e-2)


@pytest.mark.parametrize("place", ["embed_tokens.weight", "layers.1.mixer.A_log", "layers.0.mixer.x_proj.weight"])
def test_no_speed_for_other_weights(place):
    models = language.contenders("mamba", TINY)
    with torch.no_grad():
        models["plain"].model.get_parameter(place).add_(0.5)
    with pytest.raises(RuntimeError, match=r"^plain is off by .* \(it may be 0.0001\): no speed is reported"):
        language.check(models, language.random_tokens(2, 10, TINY.vocabulary), new=3)


def test_no_speed_for_a_wrong_cache(monkeypatch):
    models = language.contenders("gated_deltanet", TINY)
    whole = models["plain"].forward
    monkeypatch.setattr(models["plain"], "forward", lambda *a, **k: whole(*a, **{**k, "past_key_values": None}))
    with pytest.raises(RuntimeError, match=r"^plain, token by token, is off by"):
        language.check(models, language.random_tokens(1, 10, TINY.vocabulary), new=3)


def test_no_speed_for_a_wrong_kernel_or_nan(monkeypatch):
    models = language.contenders("longhorn", TINY)
    ids = language.random_tokens(1, 10, TINY.vocabulary)
    right = language.by_steps
    monkeypatch.setattr(language, "by_steps", lambda model, ids: right(model, ids) / 0.9)
    with pytest.raises(RuntimeError, match=r"^plain is off by 1\.00e-01"):
        language.check(models, ids, new=1)
    logits = torch.ones(1, 2, 3)
    with pytest.raises(RuntimeError, match="off by nan"):
        language.compare("plain", logits * math.nan, logits)
    with pytest.raises(RuntimeError, match=r"plain has shape \[1, 1, 3\], not \[1, 2, 3\]"):
        language.compare("plain", logits[:, :1], logits)


def test_single_tokens_start_where_they_should(monkeypatch):
    model = language.build("mamba", TINY, muon=True)
    seen = []
    whole = model.forward
    read = language.tokens_at(model, 5, TINY.vocabulary)
    monkeypatch.setattr(model, "forward", lambda *a, **k: seen.append(k["past_key_values"].seen) or whole(*a, **k))
    first, second = read(), read()
    assert seen == 2 * [5 + i for i in range(language.PER_RUN)]
    assert torch.equal(first, second)
    assert not first.requires_grad


def test_a_slow_contender_keeps_its_place(monkeypatch):
    """`best_seconds` has one that overruns its budget at once before the others."""
    monkeypatch.setattr(language, "best_seconds", lambda functions, rounds, budget: {"slow": 4.0, "quick": 2.0})
    report = language.Report(1, tqdm(disable=True))
    seconds = report.section("a job", {"quick": int, "slow": int}, tokens=10, budget=1.0)
    assert list(seconds.items()) == [("quick", 2.0), ("slow", 4.0)]
    found = [(row.name, row.milliseconds, row.times, row.tokens_per_second) for row in report.rows]
    assert found == [("quick", 200.0, 1.0, 5.0), ("slow", 400.0, 2.0, 2.5)]


def test_bounds_in_words():
    assert Bound(least=4.0).verdict(3.99) == "(bound: 4 or more; missed)"
    assert Bound(least=4.0).verdict(4.0) == "(bound: 4 or more; met)"
    assert Bound(most=1.2).verdict(1.1) == "(bound: 1.2 or less; met)"
    assert Bound(most=1.2).verdict(math.nan) == "(bound: 1.2 or less; missed)"


def test_arguments_are_refused(tmp_path):
    for change, message in (
        ({"hidden": 0}, "hidden is 0; it may be an integer >= 1"),
        ({"layers": True}, "layers is True; it may be an integer >= 1"),
        ({"length": 1}, "length is 1; it may be an integer >= 2"),
        ({"early": 50, "late": 50}, "late is 50; it may be an integer >= 51"),
    ):
        with pytest.raises(ValueError, match=message):
            Sizes(**change)
    with pytest.raises(ValueError, match="rounds is 0; it may be an integer >= 1"):
        language.run(tmp_path, 0, 1, TINY)
    with pytest.raises(ValueError, match="threads is 0; it may be an integer >= 1"):
        language.run(tmp_path, 1, 0, TINY)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        language.run(tmp_path / "file", 1, 1, TINY)


def test_the_peer_needs_mambapy(monkeypatch):
    monkeypatch.setitem(sys.modules, "mambapy.pscan", None)
    with pytest.raises(ImportError, match="mambapy"):
        language.build_peer(TINY)
