"""The memory tests as a task: splits, loss and predictions, a problem that is learned, further test lengths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from muonssm.lab.core.evaluate import evaluate
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.trainer import train
from muonssm.lab.recall.dataset import PROBLEMS, RecallConfig
from muonssm.lab.recall.task import RecallModelConfig, RecallTask
from muonssm.layers import BACKBONES
from muonssm.models.recall import RecallModel
from muonssm.ops import Muon

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"mqar": {"length": 32, "pairs": 2, "vocabulary": 16}, "copying": {"length": 24, "tokens": 4},
         "induction": {"length": 16}, "passkey": {"length": 70}}  # fmt: skip


def make(problem="mqar", muon=None, model=None, **data):
    config = RecallConfig(problem, **{**SIZES[problem], "train_examples": 20, "test_examples": 8, **data})
    return RecallTask(config, RecallModelConfig(hidden_size=32, **(model or {})), Muon() if muon is None else muon)


def build(task, scale=8.0):
    """A model with larger weights than usual, so that its predictions depend on the input."""
    torch.manual_seed(0)
    model = task.build_model(task.load_data().metadata)
    with torch.no_grad():
        model.backbone.embed_tokens.weight.mul_(scale)
    return model


def batch_of(task, split, count=8):
    return task.collate([split[i] for i in range(count)], training=False)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_splits_of_every_problem(problem):
    data = make(problem).load_data()
    length = SIZES[problem]["length"]
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 8, 8)
    assert data.train[0][0].shape == data.test[0][1].shape == (length,)
    seen = {row.numpy().tobytes() for row in data.train.tensors[0]}
    assert not seen & {row.numpy().tobytes() for row in data.validation.tensors[0]}
    again = make(problem).load_data()
    assert torch.equal(data.train.tensors[0], again.train.tensors[0])
    other = make(problem, seed=1).load_data()
    assert not torch.equal(data.train.tensors[0], other.train.tensors[0])
    assert int(data.train.tensors[0].max()) < data.metadata["vocab_size"] == make(problem).data.vocabulary
    assert problem in data.metadata["summary"]


def test_validation_and_test_set_differ():
    data = make().load_data()
    assert not torch.equal(data.test.tensors[0], data.validation.tensors[0])
    assert data.extra_tests == {}


def test_passkey_has_further_test_lengths():
    data = make("passkey").load_data()
    assert {name: split.tensors[0].shape for name, split in data.extra_tests.items()} == {
        "length 140": (8, 140),
        "length 280": (8, 280),
    }
    assert data.test.tensors[0].shape == data.validation.tensors[0].shape
    assert not torch.equal(data.test.tensors[0], data.validation.tensors[0])
    own = make("passkey", test_lengths=[70, 90]).load_data()
    assert list(own.extra_tests) == ["length 90"]
    assert own.test.tensors[0].shape == (8, 70)
    assert not torch.equal(own.test.tensors[0], own.validation.tensors[0])


@pytest.mark.parametrize("problem", PROBLEMS)
def test_loss_and_predictions_agree_with_all_logits(problem):
    task = make(problem)
    model = build(task).eval()
    batch = batch_of(task, task.load_data().train)
    out = model(**batch)
    h = model.backbone(batch["input_ids"]).last_hidden_state
    logits = h @ model.backbone.embed_tokens.weight.T
    labels = batch["labels"]
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(out["loss"], expected)
    asked = labels != -100
    assert torch.equal(out["predictions"][asked], logits.argmax(-1)[asked])
    assert (out["predictions"][~asked] == -100).all()
    assert out["predictions"].shape == labels.shape


QUICK = [("gated_deltanet", "muon"), ("mamba", "plain"), ("longhorn", "muon")]
CASES = [(backbone, variant) for backbone in BACKBONES for variant in ("plain", "muon")]


@pytest.mark.parametrize(
    ("backbone", "variant"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full]) for case in CASES],
)
def test_every_weight_gets_a_gradient(backbone, variant):
    muon = Muon() if variant == "muon" else Muon.off()
    task = make(muon=muon, model={"backbone": backbone, "intermediate_size": 16})
    model = build(task)
    model(**batch_of(task, task.load_data().train))["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_scores_of_labels_and_of_sequences():
    labels = np.array([[-100, 3, 4], [-100, 5, 6]])
    predictions = np.array([[-100, 3, 4], [-100, 5, 7]])
    scorer = make().scorer(None)
    for row in (slice(0, 1), slice(1, 2)):
        scorer.add({"labels": torch.tensor(labels[row])}, {"predictions": torch.tensor(predictions[row])})
    assert scorer.result() == {"accuracy": 75.0, "exact": 50.0}
    assert [metric.name for metric in RecallTask.metrics] == ["accuracy", "exact"]


def test_plain_differs_only_in_the_memory_rule():
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
    assert make().load_data().metadata["tokens_per_item"] == make().data.length
    assert "length 128" in task.title


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.problem=sudoku", r"data\.problem"),
        ("data.length=2", r"data\.length must be >= 4"),
        ("data.vocabulary=2", r"data\.vocabulary must be >= 18"),
        ("data.test_lengths=[64, 64]", r"data\.test_lengths"),
        ("model.backbone=lstm", r"model.*backbone .*lstm"),
        ("model.hidden_size=x", r"model.*hidden_size .*'x'"),
        ("data.fold=1", "fold"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe.load("recall", [change])
    with pytest.raises(ValueError, match="fold must be 0"):
        make().with_fold(1)


def small(*changes):
    """The recipe at a size for tests."""
    sizes = ["model.hidden_size=32", "model.mixer={num_heads=2}", "training.batch_size=32", "training.evaluate_every=0"]
    return Recipe.load("recall", [*sizes, *changes])


@pytest.mark.slow
def test_mqar_is_learned(tmp_path):
    """Chance is 1/8; a model that knows the two values but not their keys reaches 1/2."""
    sizes = ["data.length=16", "data.pairs=2", "data.vocabulary=16", "data.train_examples=2000"]
    budget = ["data.test_examples=200", "training.steps=100", "training.learning_rate=0.02"]
    metrics = train(small(*sizes, *budget), tmp_path / "run")
    assert metrics["test"]["accuracy"] > 75
    assert metrics["test"]["accuracy"] >= metrics["test"]["exact"] > 50
    assert metrics["test"] != metrics["validation"]
    assert metrics["steps"] == 100
    assert evaluate(tmp_path / "run")["test"] == pytest.approx(metrics["test"])


def test_a_passkey_run_scores_further_lengths(tmp_path):
    sizes = [
        "data.problem=passkey",
        "data.pairs=none",
        "data.length=70",
        "data.train_examples=32",
        "data.test_examples=8",
    ]
    metrics = train(small(*sizes, "training.steps=1"), tmp_path / "run")
    assert set(metrics["extra_tests"]) == {"length 140", "length 280"}
    assert set(metrics["extra_tests"]["length 280"]) == {"accuracy", "exact"}
    again = evaluate(tmp_path / "run")
    for name, scores in metrics["extra_tests"].items():
        assert again["extra_tests"][name] == pytest.approx(scores)
