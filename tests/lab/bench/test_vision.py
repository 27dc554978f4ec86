"""`muonssm bench --vision` on a small network: both times, their ratio, and the share of the scans."""

from __future__ import annotations

import json

import pytest
import torch

from muonssm.lab.bench import vision
from muonssm.models.vision import mambavision_micro

from .commands import run_command


@pytest.fixture
def small_network(monkeypatch):
    monkeypatch.setattr(vision, "mambavision_tiny", mambavision_micro)
    for name, value in {"BATCH": 2, "PIXELS": 64, "CLASSES": 5, "CHANNELS": 1}.items():
        monkeypatch.setattr(vision, name, value)


def test_the_record_has_times_a_ratio_and_shares(small_network, tmp_path, capsys):
    assert run_command("--vision", "--rounds", "1", "--threads", "1", "--output", str(tmp_path)) == 0
    assert "2 images of 64 x 64" in capsys.readouterr().out
    record = json.loads((tmp_path / "vision.json").read_text())
    times = {row["name"]: row["milliseconds"] for row in record["rows"]}
    summary = record["summary"]
    assert set(times) == {"plain", "muon"}
    assert summary["muon over plain"] == pytest.approx(times["muon"] / times["plain"])
    assert all(0 < summary[f"share of the scans, {name}"] < 1 for name in times)


def test_both_networks_have_the_same_weights(small_network):
    plain, muon = (model.state_dict() for model in vision.networks().values())
    assert all(torch.equal(weight, muon[name]) for name, weight in plain.items())


def test_a_step_without_scans_has_no_share():
    with pytest.raises(RuntimeError, match="no share is reported"):
        vision.share_of_scans(lambda: torch.ones(3).sum())
