"""Tests of memory as a task: the parts, the model's loss and answers, a problem that is learnt, further lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from muonssm.lab.core.evaluate import evaluate
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.trainer import train
from muonssm.lab.recall.dataset import KINDS, RecallConfig
from muonssm.lab.recall.task import RecallModelConfig, RecallTask
from muonssm.layers import BACKBONES
from muonssm.models.recall import RecallModel
from muonssm.ops import Muon

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"mqar": {"length": 32, "pairs": 2, "vocabulary": 16}, "copying": {"length": 24, "tokens": 4},
         "induction": {"length": 16}, "passkey": {"length": 70}}  # fmt: skip


def make(kind="mqar", muon=None, model=None, **data):
    config = RecallConfig(kind, **{**SIZES[kind], "train_examples": 20, "test_examples": 8, **data})
    return RecallTask(config, RecallModelConfig(hidden_size=32, **(model or {})), Muon() if muon is None else muon)


def build(task, scale=8.0):
    """A model whose answers depend on what it read: larger weights than those it would start from."""
    torch.manual_seed(0)
    model = task.build_model(task.load_data().metadata)
    with torch.no_grad():
        model.backbone.embed_tokens.weight.mul_(scale)
    return model


def batch_of(task, part, count=8):
    return task.collate([part[i] for i in range(count)], training=False)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_every_kind(kind):
    data = make(kind).prepare()
    length = SIZES[kind]["length"]
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 8, 8)
    assert data.train[0][0].shape == data.test[0][1].shape == (length,)
    seen = {row.numpy().tobytes() for row in data.train.tensors[0]}
    assert not seen & {row.numpy().tobytes() for row in data.validation.tensors[0]}
    again = make(kind).prepare()
    assert torch.equal(data.train.tensors[0], again.train.tensors[0])
    other = make(kind, seed=1).prepare()
    assert not torch.equal(data.train.tensors[0], other.train.tensors[0])
    assert int(data.train.tensors[0].max()) < data.metadata["vocab_size"] == make(kind).data.vocabulary
    assert kind in data.metadata["summary"]


def test_the_test_part_is_not_that_which_chooses():
    data = make().prepare()
    assert not torch.equal(data.test.tensors[0], data.validation.tensors[0])
    assert data.more == {}


def test_passkey_is_asked_at_further_lengths():
    data = make("passkey").prepare()
    assert {name: part.tensors[0].shape for name, part in data.more.items()} == {
        "length 140": (8, 140),
        "length 280": (8, 280),
    }
    assert data.test.tensors[0].shape == data.validation.tensors[0].shape
    assert not torch.equal(data.test.tensors[0], data.validation.tensors[0])
    own = make("passkey", test_lengths=[70, 90]).prepare()
    assert list(own.more) == ["length 90"]
    assert own.test.tensors[0].shape == (8, 70)
    assert not torch.equal(own.test.tensors[0], own.validation.tensors[0])


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_answers_are_those_of_all_logits(kind):
    task = make(kind)
    model = build(task).eval()
    batch = batch_of(task, task.load_data().train)
    out = model(**batch)
    h = model.backbone(batch["input_ids"]).last_hidden_state
    logits = h @ model.backbone.embed_tokens.weight.T
    labels = batch["labels"]
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(out["loss"], wanted)
    asked = labels != -100
    assert torch.equal(out["logits"][asked], logits.argmax(-1)[asked])
    assert (out["logits"][~asked] == -100).all()
    assert out["logits"].shape == labels.shape


@pytest.mark.parametrize("muon", [Muon.off(), Muon()], ids=["plain", "muon"])
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_weight_of_every_backbone_learns(backbone, muon):
    task = make(muon=muon, model={"backbone": backbone, "intermediate_size": 16})
    model = build(task)
    model(**batch_of(task, task.load_data().train))["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_scores_are_percent_of_labels_and_of_sequences():
    labels = np.array([[-100, 3, 4], [-100, 5, 6]])
    found = np.array([[-100, 3, 4], [-100, 5, 7]])
    assert make().score(found, labels) == {"accuracy": 75.0, "exact": 50.0}
    assert [metric.name for metric in RecallTask.metrics] == ["accuracy", "exact"]


def test_plain_differs_by_the_memory_update_alone():
    task = make(model={"momentum": "per_head"})
    plain = task.plain()
    assert plain.muon == Muon.off()
    assert (plain.model.momentum, plain.data) == ("fixed", task.data)
    assert plain.model.hidden_size == task.model.hidden_size
    one, two = (build(t).state_dict() for t in (make(), make().plain()))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_recipe_is_two_layers_without_swiglu():
    task = Recipe.load("recall").task
    model = task.build_model({"vocab_size": task.data.vocabulary})
    assert isinstance(model, RecallModel)
    config = model.backbone.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 64, 0)
    assert all(layer.mlp is None for layer in model.backbone.layers)
    assert (task.data.vocabulary, task.data.length, task.data.pairs) == (8192, 128, 8)
    assert make().prepare().metadata["tokens_per_item"] == make().data.length
    assert "length 128" in task.title


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.kind=sudoku", "in data: kind is 'sudoku'; it may be one of"),
        ("data.length=2", "in data: length is 2 with kind 'mqar'"),
        ("data.vocabulary=2", "in data: vocabulary is 2 with kind 'mqar' and pairs 8; it may be an integer >= 18"),
        ("data.test_lengths=[64, 64]", "each once"),
        ("model.backbone=lstm", "in model: backbone is 'lstm'"),
        ("model.hidden_size=x", "in model: hidden_size is 'x'; it may be an integer >= 1"),
        ("data.fold=1", "data has 'fold'"),
    ],
)
def test_what_is_wrong_is_said(change, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        Recipe.load("recall", [change])
    with pytest.raises(ValueError, match="fold is 1; of this task it may be 0"):
        make().with_fold(1)


def small(*changes):
    """The recipe at sizes for a test."""
    sizes = ["model.hidden_size=32", "model.mixer={num_heads=2}", "training.batch_size=32", "training.evaluate_every=0"]
    return Recipe.load("recall", [*sizes, *changes])


def test_recall_is_learnt(tmp_path):
    """Knowing which two values were there, but not of which key, half of them are right; knowing nothing, an eighth."""
    sizes = ["data.length=16", "data.pairs=2", "data.vocabulary=16", "data.train_examples=2000"]
    budget = ["data.test_examples=200", "training.steps=100", "training.learning_rate=0.02"]
    metrics = train(small(*sizes, *budget), tmp_path / "run")
    assert metrics["test"]["accuracy"] > 75
    assert metrics["test"]["accuracy"] >= metrics["test"]["exact"] > 50
    assert metrics["test"] != metrics["validation"]
    assert metrics["steps"] == 100
    assert evaluate(tmp_path / "run")["test"] == pytest.approx(metrics["test"])


def test_a_run_on_passkey_has_scores_of_further_lengths(tmp_path):
    sizes = ["data.kind=passkey", "data.pairs=none", "data.length=70", "data.train_examples=32", "data.test_examples=8"]
    metrics = train(small(*sizes, "training.steps=1"), tmp_path / "run")
    assert set(metrics["more"]) == {"length 140", "length 280"}
    assert set(metrics["more"]["length 280"]) == {"accuracy", "exact"}
    again = evaluate(tmp_path / "run")
    for name, scores in metrics["more"].items():
        assert again["more"][name] == pytest.approx(scores)
