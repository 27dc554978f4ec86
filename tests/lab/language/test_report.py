"""The report's sections about a language model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from muonssm.lab.language.report_sections import missing_evaluations, sections

SCORES = {
    "settings": {"limit": 100, "max_length": 256},
    "tasks": {
        "piqa": {"metrics": {"acc": 0.5}, "samples": 101, "truncated": 3},
        "mine": {"metrics": {"f1": 0.25}, "samples": 4},
    },
}
DEPTHS = [{"from": i / 10, "to": (i + 1) / 10, "samples": 1, "score": 100.0} for i in range(10)]
CELL = {"variant": "pk", "length": 2048, "samples": 10, "score": 100.0, "depths": DEPTHS, "repeated": 0, "wrong": []}
NEEDLES = {"settings": {"samples": 10, "answer_tokens": 32, "seed": 0}, "cells": [CELL]}


def checked(content, check):
    check(content)
    return content


def experiment(files, backbone="mamba"):
    """An experiment with one run and these result files."""
    return SimpleNamespace(
        read_all=lambda name, check: {"muon": checked(files[name], check)} if name in files else {},
        has_any=lambda name: name in files,
        task=SimpleNamespace(model=SimpleNamespace(backbone=backbone)),
        trained_runs=["run"],
        folder=lambda run: SimpleNamespace(path=Path("runs/mine")),
    )


def test_zero_shot_scores_stand_beside_the_papers():
    (section,) = sections(experiment({"zero-shot.json": SCORES}))
    assert (section.slug, section.title) == ("zero-shot", "Zero-shot")
    for text in (">50.00<", ">5.00<", "paper, plain", ">63.81<", "paper, muon", ">63.47<"):  # score, error, paper
        assert text in section.body
    assert ">0.2500<" in section.body  # the other task
    for remark in ("muon: missing: wikitext", "at most 100 samples per task", "piqa: 3 texts cut at the beginning"):
        assert remark in section.body


def test_needles_stand_beside_the_papers():
    (section,) = sections(experiment({"needle.json": NEEDLES}))
    assert section.slug == "needle"
    for text in ("pk, 2048", ">100.0<", ">29.3<", ">32.1<", "10 samples per cell", "<svg"):
        assert text in section.body


def test_other_lengths_than_the_papers_stand_beside_all_of_its_scores():
    result = {**NEEDLES, "cells": [{**cell, "length": 256} for cell in NEEDLES["cells"]]}
    (section,) = sections(experiment({"needle.json": result}))
    for text in ("pk, 256", ">100.0<", "uuid, 8192", ">29.3<", ">32.1<"):
        assert text in section.body


def test_a_backbone_that_is_not_in_the_paper_has_no_row_of_it():
    for section in sections(experiment({"zero-shot.json": SCORES, "needle.json": NEEDLES}, "deltanet")):
        assert "paper, " not in section.body


def test_missing_evaluations_name_their_commands():
    zero_shot, needle = missing_evaluations(experiment({}))
    assert "muonssm eval runs/mine --tasks paper" in zero_shot
    assert "muonssm needle runs/mine" in needle
    assert missing_evaluations(experiment({"zero-shot.json": SCORES, "needle.json": NEEDLES})) == []
