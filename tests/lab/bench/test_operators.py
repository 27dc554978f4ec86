"""The benchmark: it measures what it says, refuses wrong results, and the command runs from end to end."""

from __future__ import annotations

import json
import time

import pytest
import torch

from muonssm.cli import main
from muonssm.lab.bench import mixers, training
from muonssm.lab.bench import operators as suite
from muonssm.lab.bench.measure import best_seconds, exponent, peak_bytes, repeated
from muonssm.lab.bench.workloads import Contender, DecodeWorkload, MemoryWorkload, SelectiveWorkload, check


def test_every_contender_computes_what_it_claims():
    memory, selective = MemoryWorkload.make(1, 100, 2, 8, 8), SelectiveWorkload.make(2, 40, 6, 4)
    contenders = [memory.contender(name) for name in ("native", "chunked", "scan", "reference")]
    contenders += [memory.plain("native"), memory.gated_delta_rule("chunk"), memory.gated_delta_rule("recurrent")]
    check(memory, [*contenders, memory.attention()])
    check(selective, [selective.contender("native"), selective.plain("native"), selective.mambapy()])
    decode = DecodeWorkload.make(1, 2, 8, 8)
    check(decode, [decode.contender("native"), decode.contender("reference"), decode.transformers()])


def test_no_speed_for_a_wrong_result():
    work = MemoryWorkload.make(1, 20, 2, 4, 4)
    good = work.contender("native")
    bad = Contender("wrong", lambda: 1.01 * good.run())
    with pytest.raises(RuntimeError, match=r"wrong is off by 1.00e-02 .*: no speed is reported"):
        check(work, [good, bad])


def test_measurements():
    seconds = best_seconds({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.01)}, rounds=3)
    assert 0.001 <= seconds["short"] < seconds["long"]
    calls = []
    repeated(lambda: calls.append(1), 7)()
    assert len(calls) == 7
    assert exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert peak_bytes(lambda: torch.empty(1000) + torch.empty(1000)) == 12000


@pytest.mark.slow
def test_the_command_prints_ratios_and_writes_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "LENGTHS", (64, 128, 256))
    assert main(["bench", "--rounds", "1", "--output", str(tmp_path), "--longest", "256"]) == 0
    text = capsys.readouterr().out
    assert "transformers chunk" in text
    assert "mambapy pscan" in text
    record = json.loads((tmp_path / "bench.json").read_text())
    assert {row["section"] for row in record["rows"]} >= {"memory, L 2048, forward", "one decoding step, H 12"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="--longest is 64; it may be 128 or more"):
        main(["bench", "--longest", "64"])


@pytest.mark.slow
def test_the_mixers_bench_compares_with_the_real_modules(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(mixers, "LENGTH", 32)
    assert main(["bench", "--mixers", "--rounds", "1", "--output", str(tmp_path)]) == 0
    metadata = json.loads((tmp_path / "mixers.json").read_text())["metadata"]
    assert {name.split(", ", 1)[1] for name in metadata if name.startswith("muon over plain")} == set(mixers.BACKBONES)
    assert {name.split(", ")[1] for name in metadata if name.startswith("transformers")} == set(mixers.originals())
    text = capsys.readouterr().out
    assert all(name in text for name in metadata)
    everyone = mixers.contenders("mamba", mixers.originals()["mamba"])
    layer, call = everyone["plain"]
    with pytest.raises(RuntimeError, match=r"mamba is off by 1.00e-02 .*: no speed is reported"):
        mixers.check("mamba", {**everyone, "plain": (layer, lambda x: 1.01 * call(x))}, torch.randn(1, 20, 256))


@pytest.mark.slow
def test_the_training_bench_has_one_network_three_times(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "LENGTH", 64)
    assert main(["bench", "--training", "--rounds", "1", "--output", str(tmp_path)]) == 0
    assert "transformers over plain" in capsys.readouterr().out
    models = training.networks()
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert len(set(sizes.values())) == 1
    models["plain"].head.weight.data *= 1.01
    with pytest.raises(RuntimeError, match="plain is off by"):
        training.check(models, torch.randn(2, 20, 6))
