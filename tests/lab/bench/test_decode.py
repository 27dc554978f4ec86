"""`muonssm bench --decode`: llama.cpp gets the same model, wrong results are refused, every speed is there."""

from __future__ import annotations

import json
import math

import pytest
import torch

from muonssm.lab.bench import decode, llama_cpp
from muonssm.lab.bench.decode import Sizes, build_mamba, check_llama
from muonssm.layers import BACKBONES

TINY = Sizes(hidden=32, layers=2, vocabulary=70, preset=None, prompt=20, tokens=3)


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    output = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "read_bandwidth", lambda threads: 1e10)  # the real one reads 256 MB each time
        assert decode.run(output, 1, 1, TINY) == 0
    return json.loads((output / "decode.json").read_text())


def test_every_speed_is_there_and_finite(record):
    sections: dict[str, list[str]] = {}
    for row in record["rows"]:
        sections.setdefault(row["section"].split(": ")[-1], []).append(row["name"])
        assert row["milliseconds"] * row["tokens_per_second"] == pytest.approx(1000)
        assert 0 < row["slowest"] <= row["tokens_per_second"] < math.inf
    ours = [f"{rule}, {weights}" for weights in decode.WEIGHTS for rule in ("plain", "muon")]
    llama = ["llama.cpp, float32", "llama.cpp, q8_0"]
    assert sections["prompt of 20 tokens"] == [llama[0], "plain, float32", "muon, float32"]
    assert sections["decoding"] == [*llama, *ours, "transformers, float32", *BACKBONES]
    assert all(math.isfinite(value) for value in record["summary"].values())


def test_packed_weights_read_fewer_bytes(record):
    rows = {row["name"]: row for row in record["rows"] if "prompt" not in row["section"]}
    read = {name: rows[f"muon, {name}"]["bandwidth"] * rows[f"muon, {name}"]["milliseconds"] for name in decode.WEIGHTS}
    assert read["int8"] < read["bfloat16"] < read["float32"]


def test_another_model_in_llama_cpp_is_refused(tmp_path):
    peer = build_mamba(TINY)
    llama_cpp.write_gguf(peer, tmp_path / "model.gguf", "float32")
    server, ids = llama_cpp.LlamaServer(tmp_path / "model.gguf", 1), torch.arange(1, 9)[None]
    check_llama(server, "float32", peer, ids)
    with torch.no_grad():
        peer.backbone.layers[0].mixer.out_proj.weight.mul_(8)
        peer.backbone.embeddings.weight.mul_(3)
    with pytest.raises(RuntimeError, match="log-probability"):
        check_llama(server, "float32", peer, ids)


def test_read_bandwidth_is_a_speed():
    assert 1e8 < decode.read_bandwidth(1, megabytes=8, seconds=0.01) < 1e13
