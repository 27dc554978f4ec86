"""`muonssm bench --vision` on a small network: both rows, the ratio, and the share that the scans have."""

from __future__ import annotations

import json

import pytest
import torch

from muonssm.cli import main
from muonssm.lab.bench import vision
from muonssm.models.vision import mambavision_micro


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(vision, "mambavision_tiny", mambavision_micro)
    for name, value in {"BATCH": 2, "PIXELS": 64, "CLASSES": 5, "CHANNELS": 1}.items():
        monkeypatch.setattr(vision, name, value)


def test_the_record_has_times_ratio_and_shares(little, tmp_path, capsys):
    assert main(["bench", "--vision", "--rounds", "1", "--threads", "1", "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2 images of 64 x 64" in said
    record = json.loads((tmp_path / "vision.json").read_text())
    times = {row["name"]: row["milliseconds"] for row in record["rows"]}
    metadata = record["metadata"]
    assert set(times) == {"plain", "muon"}
    assert metadata["muon over plain"] == pytest.approx(times["muon"] / times["plain"])
    assert all(0 < metadata[f"share of the scans, {name}"] < 1 for name in times)


def test_both_start_from_the_same_weights(little):
    plain, muon = (model.state_dict() for model in vision.networks().values())
    assert all(torch.equal(weight, muon[name]) for name, weight in plain.items())


def test_a_step_without_scans_has_no_share():
    with pytest.raises(RuntimeError, match="no share is reported"):
        vision.share_of_scans(lambda: torch.ones(3).sum())
