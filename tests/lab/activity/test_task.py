"""The task: scores worked out by hand, the paper's table, folds, the small version, batches and a comparison."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from muonssm.lab.activity.task import PAPER_TABLE, score_logits
from muonssm.lab.core.compare import compare, table
from muonssm.lab.core.paper import read_table
from muonssm.lab.core.recipe import Recipe


def test_scores_worked_out_by_hand():
    """True 0 0 1 1 2 2, predicted 0 1 1 1 2 0: precision 1/2, 2/3, 1; recall 1/2, 1, 1/2."""
    logits = np.eye(4)[[0, 1, 1, 1, 2, 0]]  # a fourth class that never occurs does not count
    scores = score_logits(logits, np.array([0, 0, 1, 1, 2, 2]))
    assert scores["accuracy"] == pytest.approx(100 * 4 / 6)
    assert scores["precision"] == pytest.approx(100 * (1 / 2 + 2 / 3 + 1) / 3)
    assert scores["recall"] == pytest.approx(100 * (1 / 2 + 1 + 1 / 2) / 3)
    assert scores["f1"] == pytest.approx(100 * (1 / 2 + 4 / 5 + 2 / 3) / 3)
    assert scores["confusion"] == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert scores["loss"] == pytest.approx((4 * -np.log(np.e / (np.e + 3)) + 2 * np.log(np.e + 3)) / 6)


def test_the_scorer_joins_batches():
    task = Recipe.load("watch").task
    scorer = task.scorer(None)
    logits, labels = torch.eye(3)[[0, 1, 1, 2]], torch.tensor([0, 1, 2, 2])
    for part in (slice(0, 3), slice(3, 4)):
        scorer.add({"labels": labels[part]}, {"logits": logits[part]})
    assert scorer.result() == score_logits(logits.numpy(), labels.numpy())


def test_the_papers_scores():
    """Two figures of the table, and data without a row."""
    mmact = Recipe.load("mmact", ["model.backbone=longhorn", "data.root=somewhere"]).task.paper_scores({})
    assert mmact["muon"]["accuracy"] == 74.40
    assert mmact["plain"]["f1"] == 73.76
    assert list(mmact) == ["plain", "muon"]
    assert Recipe.load("watch").task.paper_scores({}) == {}


def test_the_papers_table_is_complete():
    """Three data sets, three backbones, two variants, four scores each."""
    rows = read_table(PAPER_TABLE)["architectures"]
    assert len({(row["source"], row["backbone"], row["variant"]) for row in rows}) == len(rows) == 18
    assert all(set(row) == {"source", "backbone", "variant", "accuracy", "precision", "recall", "f1"} for row in rows)


def test_folds_need_a_split_that_rotates(tmp_path):
    task = Recipe.load("watch").task
    assert task.with_fold(2).data.fold == 2
    assert task.folds == 5
    fixed = Recipe.load("folder", [f"data.root={tmp_path}"]).task
    assert fixed.with_fold(0) == fixed
    with pytest.raises(ValueError, match="--folds must be 1"):
        fixed.with_fold(1)


def test_double_state():
    task = Recipe.load("watch").task
    double = task.with_double_state()
    assert double.model.d_state == 2 * task.model.d_state
    assert replace(double, model=task.model) == task


def test_shrink_gives_the_sizes_of_watch_small():
    small, recipe = Recipe.load("watch-small"), Recipe.load("watch")
    task, training = recipe.task.shrink({"rate": 50.0}, recipe.training)
    assert (task, training) == (small.task, small.training)


def test_shrink_keeps_what_is_small_already():
    recipe = Recipe.load("watch", ["data.length=128", "model.d_model=16", "model.d_state=8", "muon.gamma=0.5"])
    task, _ = recipe.task.shrink({"rate": 50.0}, recipe.training)
    assert task == recipe.task


@pytest.mark.parametrize(("rate", "expected"), [(100.0, 25.0), (None, None)])
def test_shrink_divides_the_rate_by_the_factor_of_the_length(rate, expected):
    recipe = Recipe.load("watch", ["data.length=1024"])
    task, _ = recipe.task.shrink({"rate": rate}, recipe.training)
    assert (task.data.length, task.data.rate) == (256, expected)


def test_training_batches_are_augmented_and_others_are_not(recordings, changes):
    task = Recipe.load("folder", [*changes, "augment.jitter=1.0"]).task
    data = task.load_data()
    items = [data.train[0], data.train[1]]
    assert torch.equal(task.collate(items, training=False)["x"], torch.stack([x for x, _ in items]))
    assert not torch.equal(task.collate(items, training=True)["x"], torch.stack([x for x, _ in items]))


@pytest.mark.slow
def test_compare_two_seeds(tmp_path, changes):
    recipe = Recipe.load("folder", [*changes, "training.epochs=1"])
    result = compare(recipe, tmp_path / "comparison", seeds=2)
    assert [(run.variant, run.seed) for run in result.runs] == [("plain", 0), ("muon", 0), ("plain", 1), ("muon", 1)]
    assert result.variants == ["plain", "muon"]
    assert result.difference("muon", "accuracy").pairs == 2
    assert result.paper == {}
    assert "95% interval over 2 paired runs" in table(result)
    for run in result.runs:
        assert sum(map(sum, run.scores["confusion"])) == 30  # a prediction for every test window
