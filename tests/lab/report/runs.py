"""Folders of finished runs and comparisons as training leaves them, made without training."""

from __future__ import annotations

import json

from PIL import Image

from muonssm.lab.core.compare import ComparedRun, Comparison
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.report import figures

CLASSES = ["<up>", "down & out"]
METADATA = {"classes": CLASSES, "summary": "made: 16 things"}


def make_scores(recipe, value):
    scores = {metric.name: value for metric in recipe.task.metrics} | {"loss": 0.5}
    return scores | ({"confusion": [[7, 1], [2, 6]]} if recipe.task_name in ("activity", "vision") else {})


def make_run(path, recipe, value=70.0):
    """Write one run whose every score is `value`."""
    folder, first = RunFolder(path), recipe.task.metrics[0].name
    folder.begin("recipe.json", recipe.to_dict())
    folder.write("metadata.json", METADATA)
    rows = [{"epoch": i, "step": 10 * i, "loss": 1 / i, "validation_loss": 2 / i} for i in (1, 2, 3)]
    folder.write("history.json", [{**row, f"validation_{first}": value - 1 / row["epoch"]} for row in rows])
    folder.write("timing.json", [{"epoch": 3, "step": 30, "seconds": 12.3}])
    splits = {split: make_scores(recipe, value) for split in ("validation", "test")}
    folder.write("metrics.json", {"parameters": 12345, "epochs": 3, "steps": 30, **splits})
    return path


def make_comparison(path, recipe, seeds=2, variants=("plain", "muon")):
    """Write a comparison: plain has 70, 71, ...; the next variant one more on each seed, and so on."""
    runs = []
    for seed in range(seeds):
        for gain, variant in enumerate(variants):
            folder, score = path / f"{variant}-seed{seed}-fold0", 70.0 + seed + gain
            make_run(folder, recipe.variant(variant, seed, 0), score)
            runs.append(ComparedRun(variant, seed, 0, folder.name, make_scores(recipe, score)))
    task, paper = recipe.task, recipe.task.paper_scores(METADATA)
    comparison = Comparison(task.title, task.metrics, recipe.to_dict(), seeds, 1, None, tuple(runs), paper)
    RunFolder(path).write("comparison.json", comparison.to_dict())
    return path


def make_analysis(path, name, title, drawn=(), **changes):
    """Write the JSON file of an analysis; `drawn` has captions and figures."""
    (path / "analysis").mkdir(exist_ok=True)
    table = {"caption": "Ranks", "head": ["", "rank"], "rows": [["muon", "12.9"]], "paper": [["paper", "12.98"]]}
    content = {
        "name": name, "title": title, "paper": "The rank is <higher>.", "found": ["It is `12.9` & more.", "Also here."],
        "tables": [table],
        "figures": [{"caption": caption, "svg": figure} for caption, figure in drawn],
        "settings": {"windows": 64}, "data": {"x": [1]}, **changes,
    }  # fmt: skip
    (path / "analysis" / f"{name}.json").write_text(json.dumps(content))


def make_analyzed_comparison(path):
    """Write a comparison with analyses that use every kind of figure."""
    make_comparison(path, Recipe.load("mmact", ["data.root=somewhere", "model.backbone=longhorn"]))
    matrix = [[i * j - 40.0 for j in range(16)] for i in range(9)]
    names = [f"step {j}" for j in range(30)]
    cells = figures.heatmap([[0.1, None, 3.0]] * 4, list("abcd"), ["x", "y", "z"], "gamma", "tau", marks={(0, 0)})
    wide = figures.heatmap([[float(j) for j in range(30)]] * 3, list("abc"), names, "r", "c")
    curves = {f"name {i}": [[(1, i + 1.0), (10, 5.0)]] for i in range(8)}
    curve = figures.lines(curves, "x", "y", log_x=True, log_y=True)
    memory = figures.pictures([matrix] * 7, list("abcdefg"))
    make_analysis(path, "spectrum", "Singular values", [("curve", curve), ("memory", memory)])
    drawn = [("cells", cells), ("wide", wide), ("file", figures.standalone(cells))]
    make_analysis(path, "sensitivity", "Gamma and tau", drawn)
    make_analysis(path, "own-idea", "An analysis of one's own")
    return path


def make_vision_comparison(path):
    """Write a comparison with a picture of `explain` and scores on corrupted images."""
    make_comparison(path, Recipe.load("vision-demo"), seeds=1)
    (path / "explain").mkdir()
    Image.new("RGB", (600, 200), (200, 30, 30)).save(path / "explain" / "test-00000.png")
    errors = {"fog": {str(severity): 10.0 * severity for severity in range(1, 6)}}
    scores = {"errors": errors, "ce": {"fog": 36.6}, "mce": None, "missing": ["no folder snow"]}
    RunFolder(path / "muon-seed0-fold0").write("imagenet-c.json", scores)
    return path


def make_language_run(path):
    """Write a run with zero-shot scores and a needle test."""
    make_run(path, Recipe.load("language-demo", ["model.backbone=mamba"]), 24.0)
    tasks = {"piqa": {"metrics": {"acc": 0.6}, "samples": 101, "version": "1", "truncated": 0}}
    RunFolder(path).write("zero-shot.json", {"settings": {"limit": 100, "max_length": 256}, "tasks": tasks})
    depths = [{"from": i / 10, "to": (i + 1) / 10, "samples": 10, "score": 10.0 * i} for i in range(10)]
    cell = {"variant": "pk", "length": 2048, "samples": 100, "score": 45.0, "depths": depths}
    settings = {"samples": 100, "answer_tokens": 8, "seed": 0, "essay": "-"}
    RunFolder(path).write("needle.json", {"settings": settings, "cells": [{**cell, "repeated": 0, "wrong": []}]})
    return path


def make_everything(root):
    """Write runs of five tasks with everything that a page can show; return their folders."""
    return [
        make_analyzed_comparison(root / "watch"),
        make_vision_comparison(root / "vision"),
        make_language_run(root / "language"),
        make_run(root / "recall", Recipe.load("recall").variant("plain", 0, 0)),
        make_run(root / "detection", Recipe.load("detection-demo")),
    ]
