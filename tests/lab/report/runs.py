"""Folders of finished runs and comparisons as training leaves them, made without training."""

from __future__ import annotations

import json

from PIL import Image

from muonssm.lab.core.compare import Trial, summary
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder, as_json
from muonssm.lab.report import svg

CLASSES = ["<up>", "down & out"]


def scores_of(recipe, value):
    scores = {metric.name: value for metric in recipe.task.metrics} | {"loss": 0.5}
    return scores | ({"confusion": [[7, 1], [2, 6]]} if recipe.task_name in ("activity", "vision") else {})


def make_run(path, recipe, value=70.0):
    """One run whose every score is `value`."""
    folder, first = RunFolder(path), recipe.task.metrics[0].name
    folder.begin("recipe.json", recipe.to_dict())
    folder.write("metadata.json", {"classes": CLASSES, "summary": "made: 16 things"})
    rows = [{"epoch": i, "step": 10 * i, "loss": 1 / i, "validation_loss": 2 / i} for i in (1, 2, 3)]
    folder.write("history.json", [{**row, f"validation_{first}": value - 1 / row["epoch"]} for row in rows])
    folder.write("timing.json", [{"epoch": 3, "step": 30, "seconds": 12.3}])
    parts = {part: scores_of(recipe, value) for part in ("validation", "test")}
    folder.write("metrics.json", {"parameters": 12345, "epochs": 3, "steps": 30, **parts})
    return path


def make_comparison(path, recipe, seeds=2):
    """Plain has 70, 71, ...; Muon one more on each seed."""
    trials = []
    for seed in range(seeds):
        for kind, more in (("plain", 0.0), ("muon", 1.0)):
            place = path / f"{kind}-seed{seed}-fold0"
            variant = recipe.variant(kind == "plain", seed, 0)
            make_run(place, variant, 70.0 + seed + more)
            trials.append(Trial(kind, seed, 0, place.name, scores_of(recipe, 70.0 + seed + more)))
    settings = {"recipe": recipe.to_dict(), "seeds": seeds, "folds": 1, "against": None}
    RunFolder(path).write("comparison.json", as_json(summary(recipe, trials) | {"settings": settings}))
    return path


def make_analysis(path, name, title, figures=(), **more):
    (path / "analysis").mkdir(exist_ok=True)
    table = {"caption": "Ranks", "head": ["", "rank"], "rows": [["muon", "12.9"]], "paper": [["paper", "12.98"]]}
    made = {
        "name": name, "title": title, "paper": "The rank is <higher>.", "found": ["It is `12.9` & more.", "Also here."],
        "tables": [table],
        "figures": [{"caption": caption, "svg": picture} for caption, picture in figures],
        "settings": {"windows": 64}, "data": {"x": [1]}, **more,
    }  # fmt: skip
    (path / "analysis" / f"{name}.json").write_text(json.dumps(made))


def make_everything(root):
    """Runs of five tasks, with all that a page may show; their folders."""
    watch = make_comparison(root / "watch", Recipe.load("mmact", ["data.root=somewhere", "model.backbone=longhorn"]))
    matrices = svg.pictures([[[i * j - 40.0 for j in range(16)] for i in range(9)] for _ in range(7)], list("abcdefg"))
    table = svg.heatmap([[0.1, None, 3.0]] * 4, list("abcd"), ["x", "y", "z"], "gamma", "tau", marks={(0, 0)})
    wide = svg.heatmap([[float(j) for j in range(30)]] * 3, list("abc"), [f"step {j}" for j in range(30)], "r", "c")
    curve = svg.lines({f"name {i}": [[(1, i + 1.0), (10, 5.0)]] for i in range(8)}, "x", "y", log_x=True, log_y=True)
    make_analysis(watch, "spectrum", "Singular values", [("curve", curve), ("memory", matrices)])
    make_analysis(
        watch, "sensitivity", "Gamma and tau", [("cells", table), ("wide", wide), ("file", svg.standalone(table))]
    )
    make_analysis(watch, "own-idea", "An analysis of one's own")
    vision = make_comparison(root / "vision", Recipe.load("vision-demo"), seeds=1)
    (vision / "explain").mkdir()
    Image.new("RGB", (600, 200), (200, 30, 30)).save(vision / "explain" / "test-00000.png")
    errors = {"fog": {str(s): 10.0 * s for s in range(1, 6)}}
    RunFolder(vision / "muon-seed0-fold0").write(
        "imagenet-c.json", {"errors": errors, "ce": {"fog": 36.6}, "mce": None, "missing": ["no folder snow"]}
    )
    language = make_run(root / "language", Recipe.load("language-demo", ["model.backbone=mamba"]), 24.0)
    tasks = {"piqa": {"metrics": {"acc": 0.6}, "samples": 101, "version": "1", "truncated": 0}}
    RunFolder(language).write("zero-shot.json", {"settings": {"limit": 100, "max_length": 256}, "tasks": tasks})
    depths = [{"from": i / 10, "to": (i + 1) / 10, "samples": 10, "score": 10.0 * i} for i in range(10)]
    cell = {
        "variant": "pk",
        "length": 2048,
        "samples": 100,
        "score": 45.0,
        "depths": depths,
        "repeated": 0,
        "wrong": [],
    }
    settings = {"samples": 100, "answer_tokens": 8, "seed": 0, "essay": "-"}
    RunFolder(language).write("needle.json", {"settings": settings, "cells": [cell]})
    recall = make_run(root / "recall", Recipe.load("recall").variant(True, 0, 0))
    detection = make_run(root / "detection", Recipe.load("detection-demo"))
    return [watch, vision, language, recall, detection]
