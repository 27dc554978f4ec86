"""The operator, mixer and training benchmarks: contenders, checks, measurements, and the whole command."""

from __future__ import annotations

import json
import time

import pytest
import torch

from muonssm.lab.bench import mixers, operators, training
from muonssm.lab.bench.measure import check_close, peak_bytes, repeated
from muonssm.lab.bench.workloads import Contender, DecodeWorkload, MemoryWorkload, SelectiveWorkload, check
from muonssm.lab.core.timing import best_seconds, fit_exponent

from .commands import run_command


def test_every_contender_gives_the_right_result():
    memory, selective = MemoryWorkload.make(1, 100, 2, 8, 8), SelectiveWorkload.make(2, 40, 6, 4)
    contenders = [memory.contender(name) for name in ("native", "chunked", "scan", "reference")]
    contenders += [memory.plain("native"), memory.gated_delta_rule("chunk"), memory.gated_delta_rule("recurrent")]
    check(memory, [*contenders, memory.attention()])
    check(selective, [selective.contender("native"), selective.plain("native"), selective.mambapy()])
    decode = DecodeWorkload.make(1, 2, 8, 8)
    check(decode, [decode.contender("native"), decode.contender("reference"), decode.transformers()])


def test_a_wrong_result_is_refused():
    work = MemoryWorkload.make(1, 20, 2, 4, 4)
    good = work.contender("native")
    bad = Contender("wrong", lambda: 1.01 * good.run())
    with pytest.raises(RuntimeError, match=r"wrong must have a relative error .*, got 1.00e-02"):
        check(work, [good, bad])
    ones = torch.ones(1, 2, 3)
    with pytest.raises(RuntimeError, match=r"plain must have a relative error .*, got nan"):
        check_close("plain", ones * torch.nan, ones)
    with pytest.raises(RuntimeError, match=r"plain must have shape \[1, 2, 3\], got \[1, 1, 3\]"):
        check_close("plain", ones[:, :1], ones)


def test_measurements():
    seconds = best_seconds({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.01)}, rounds=3)
    assert 0.001 <= seconds["short"] < seconds["long"]
    waits = iter([0.2, 0.001, 0.001])  # one that compiles itself at its first call
    assert best_seconds({"compiled": lambda: time.sleep(next(waits))}, rounds=2, budget=0.1)["compiled"] < 0.1
    calls = []
    repeated(lambda: calls.append(1), 7)()
    assert len(calls) == 7
    assert fit_exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert peak_bytes(lambda: torch.empty(1000) + torch.empty(1000)) == 12000


@pytest.mark.slow
def test_the_command_prints_ratios_and_writes_a_record_and_a_figure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(operators, "LENGTHS", (64, 128, 256))
    monkeypatch.setattr(operators, "ONE_HEAD_LENGTH", 256)
    monkeypatch.setattr(operators, "COMPILED_PEER", False)
    assert run_command("--rounds", "1", "--output", str(tmp_path), "--longest", "256") == 0
    text = capsys.readouterr().out
    assert "transformers chunk" in text
    assert "mambapy pscan" in text
    record = json.loads((tmp_path / "bench.json").read_text())
    assert {row["section"] for row in record["rows"]} >= {"memory, L 2048, forward", "one decoding step, H 12"}
    assert (tmp_path / "bench.svg").read_text().startswith("<svg xmlns")


def test_the_sweep_needs_two_lengths(tmp_path):
    with pytest.raises(ValueError, match=r"--longest must be 2048 or more.*, got 64"):
        run_command("--longest", "64", "--output", str(tmp_path))


@pytest.mark.slow
def test_mixers_are_compared_with_the_modules_of_transformers(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixers, "LENGTH", 32)
    assert run_command("--mixers", "--rounds", "1", "--output", str(tmp_path)) == 0
    modules = mixers.transformers_modules()
    summary = json.loads((tmp_path / "mixers.json").read_text())["summary"]
    assert {name.split(", ", 1)[1] for name in summary if name.startswith("muon over plain")} == set(mixers.BACKBONES)
    assert {name.split(", ")[1] for name in summary if name.startswith("transformers")} == set(modules)
    text = capsys.readouterr().out
    assert all(name in text for name in summary)
    everyone = mixers.contenders("mamba", modules["mamba"])
    layer, call = everyone["plain"]
    with pytest.raises(RuntimeError, match=r"mamba must have a relative error .*, got 1.00e-02"):
        mixers.check("mamba", {**everyone, "plain": (layer, lambda x: 1.01 * call(x))}, torch.randn(1, 20, 256))


@pytest.mark.slow
def test_training_is_timed_on_three_networks_with_equal_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "LENGTH", 64)
    monkeypatch.setattr(training, "COMPILED_PEER", False)
    assert run_command("--training", "--rounds", "1", "--output", str(tmp_path)) == 0
    assert "transformers over plain" in capsys.readouterr().out
    summary = json.loads((tmp_path / "training.json").read_text())["summary"]
    assert 0 < summary["share of the matmul limit, muon, float32"] < 1.5
    assert summary["step beside a busy core over a quiet step"] > 0
    models = training.networks()
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert len(set(sizes.values())) == 1
    models["plain"].head.weight.data *= 1.01
    with pytest.raises(RuntimeError, match="plain must have a relative error"):
        training.check(models, torch.randn(2, 20, 6))
