"""The estimator: scikit-learn's and aeon's own checks, its tools on series, reproducibility, and errors."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from aeon.testing.estimator_checking import parametrize_with_checks as parametrize_with_aeons_checks
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, RandomizedSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

from muonssm import Muon, MuonSSMClassifier
from muonssm.layers import BACKBONES
from muonssm.models.aeon_classifier import AeonClassifier

SMALL = {"backbone": "mamba", "d_model": 8, "d_state": 4, "layers": 1, "learning_rate": 0.02, "random_state": 0}


def small(**changes) -> MuonSSMClassifier:
    return MuonSSMClassifier(**{**SMALL, "epochs": 8, **changes})


def waves(n: int = 48, channels: int = 2, length: int = 30, seed: int = 0):
    """Slow and fast sines with random phases and noise: `[n, channels, length]`, and their labels."""
    generator = np.random.default_rng(seed)
    y = np.arange(n) % 2
    phase = generator.uniform(0, 6, (n, channels, 1))
    x = np.sin(np.arange(length) * (0.3 + 0.6 * y[:, None, None]) + phase)
    return 5 + 3 * (x + 0.1 * generator.standard_normal(x.shape)), np.array(["slow", "fast"])[y]


# ---- the libraries' own checks


@pytest.mark.slow
@parametrize_with_checks([MuonSSMClassifier("mamba", d_model=16, d_state=4, layers=1, epochs=10, learning_rate=0.02)])
def test_checks_of_scikit_learn(estimator, check):
    """Their X is a table, which is one channel. None of the checks is expected to fail."""
    check(estimator)


@parametrize_with_aeons_checks([AeonClassifier])
def test_checks_of_aeon(check):
    check()


# ---- learning


@pytest.mark.parametrize("backbone", BACKBONES)
def test_it_learns_with_every_backbone(backbone):
    X, y = waves()
    X_test, y_test = waves(seed=1)
    classifier = small(backbone=backbone).fit(X, y)
    assert classifier.score(X_test, y_test) > 0.9
    probabilities = classifier.predict_proba(X_test)
    assert probabilities.shape == (48, 2)
    assert np.allclose(probabilities.sum(axis=1), 1)
    assert np.array_equal(classifier.classes_, ["fast", "slow"])
    assert np.array_equal(classifier.predict(X_test), classifier.classes_[probabilities.argmax(axis=1)])
    assert classifier.loss_curve_[-1] < classifier.loss_curve_[0]


def test_the_rule_is_an_argument():
    X, y = waves(16)
    plain, paper, default = (small(epochs=1, muon=muon).fit(X, y) for muon in (Muon.off(), Muon(), None))
    assert np.array_equal(paper.predict_proba(X), default.predict_proba(X))
    assert not np.array_equal(plain.predict_proba(X), paper.predict_proba(X))


def test_lists_have_unequal_lengths():
    X, y = waves(length=40)
    lengths = np.random.default_rng(0).integers(25, 41, len(X))
    ragged = [series[:, :length] for series, length in zip(X, lengths, strict=True)]
    classifier = small(epochs=12).fit(ragged, y)
    assert classifier.n_timepoints_ == np.median(lengths)
    assert classifier.score(ragged, y) > 0.9
    objects = np.empty(len(X), dtype=object)
    objects[:] = ragged
    assert np.array_equal(classifier.predict_proba(objects), classifier.predict_proba(ragged))
    assert classifier.predict(X).shape == (48,)  # an array of any length, after a list
    assert cross_val_score(small(epochs=25), ragged, y, cv=2).mean() > 0.7
    assert small(epochs=1, length=7).fit(ragged, y).n_timepoints_ == 7


def test_resampling_keeps_a_line():
    t = np.linspace(0, 1, 11)
    line, short = np.stack([t, 2 * t]), np.stack([t, 2 * t])[:, ::2]
    classifier = small(epochs=1, length=11).fit([line, -line], [0, 1])
    assert np.allclose(classifier._read([line]), classifier._read([short]), atol=1e-6)


def test_a_table_is_one_channel():
    X, y = waves(channels=1)
    table, array = (small(epochs=2).fit(x, y) for x in (X[:, 0], X))
    assert np.array_equal(table.predict_proba(X[:, 0]), array.predict_proba(X))
    assert (table.n_features_in_, array.n_features_in_) == (30, 1)
    frame = pd.DataFrame(X[:, 0]).rename(columns=str)
    assert list(small(epochs=1).fit(frame, y).feature_names_in_) == list(frame.columns)


def test_scale_and_offset_of_a_channel_do_not_matter():
    X, y = waves(16)
    X[:, 1] = 4.0  # a constant channel
    moved = X * np.array([1e4, 7.0])[:, None] - 100
    before, after = (small(epochs=2).fit(x, y).predict_proba(x) for x in (X, moved))
    assert np.allclose(before, after, atol=1e-3)


def test_class_weights_favor_a_class():
    X, _ = waves(24)
    y = np.arange(24) % 3 == 0
    counts = [small(class_weight={False: 1, True: w}).fit(X, y).predict(X).sum() for w in (1e-3, 1e3)]
    assert counts == [0, 24]


def test_held_out_series_stop_early_and_keep_the_best():
    X, y = waves()
    classifier = small(epochs=40, validation_fraction=0.25, patience=2).fit(X, y)
    scores = classifier.validation_scores_
    best = int(np.argmax(scores))
    assert classifier.n_iter_ == len(scores) == len(classifier.loss_curve_) == best + 3 < 40
    assert small(epochs=3).fit(X, y).validation_scores_ == []


# ---- scikit-learn's tools


def test_cross_validation_search_and_pipelines():
    X, y = waves()
    pipeline = make_pipeline(FunctionTransformer(np.ascontiguousarray), small(epochs=25))
    scores = cross_val_score(pipeline, X, y, groups=np.arange(48) // 4, cv=GroupKFold(3))
    assert scores.mean() > 0.8
    grid = {"muonssmclassifier__muon": [Muon.off(), Muon()], "muonssmclassifier__backbone": ["mamba", "longhorn"]}
    search = GridSearchCV(pipeline, grid, cv=2).fit(X, y)
    assert search.best_score_ > 0.8
    assert len(search.cv_results_["params"]) == 4
    drawn = {"d_model": np.arange(8, 12), "learning_rate": np.array([0.01, 0.02], dtype=np.float32)}
    assert RandomizedSearchCV(small(epochs=1), drawn, n_iter=2, cv=2, random_state=0).fit(X, y).best_params_


def test_copies_predict_the_same(tmp_path):
    X, y = waves(16)
    classifier = small(epochs=2, muon=Muon.residual()).fit(X, y)
    wanted = classifier.predict_proba(X)
    joblib.dump(classifier, tmp_path / "model.joblib")
    for other in (
        pickle.loads(pickle.dumps(classifier)),
        copy.deepcopy(classifier),
        joblib.load(tmp_path / "model.joblib"),
    ):
        assert np.array_equal(other.predict_proba(X), wanted)
    unfitted = clone(classifier).set_params(epochs=3)
    assert (unfitted.epochs, unfitted.muon) == (3, Muon.residual())
    with pytest.raises(NotFittedError):
        unfitted.predict(X)


def test_random_state_decides_everything():
    X, y = waves(16)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again = (small(epochs=2, dropout=0.3).fit(X, y).predict_proba(X) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.array_equal(first, again)
    assert not np.array_equal(first, small(epochs=2, dropout=0.3, random_state=1).fit(X, y).predict_proba(X))
    generator = np.random.RandomState(0)
    classifier = small(epochs=1, random_state=generator)
    assert not np.array_equal(classifier.fit(X, y).predict_proba(X), classifier.fit(X, y).predict_proba(X))


def test_verbose_prints_a_line_per_epoch(capsys):
    X, y = waves(16)
    small(epochs=2).fit(X, y)
    assert capsys.readouterr().out == ""
    small(epochs=2, verbose=True, validation_fraction=0.5).fit(X, y)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1 of 2", "epoch 2 of 2"]
    assert "held-out accuracy" in lines[0]


# ---- errors


BAD_SETTINGS = {
    "backbone": "lstm", "d_model": 0, "epochs": 0, "batch_size": 0, "learning_rate": 0, "weight_decay": -1.0,
    "label_smoothing": 1.0, "length": 0, "validation_fraction": 1.0, "patience": 0, "dropout": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_are_named_by_fit(name):
    with pytest.raises(ValueError, match=rf"{name} must be .*got"):
        small(**{name: BAD_SETTINGS[name]}).fit(*waves(4))


@pytest.mark.parametrize(("name", "value"), [("muon", "paper"), ("epochs", 1.5), ("verbose", 1), ("d_state", "4")])
def test_settings_of_a_wrong_type_are_named(name, value):
    with pytest.raises(TypeError, match=rf"{name} must be .*got"):
        small(**{name: value}).fit(*waves(4))


def test_bad_series_are_named():
    X, y = waves(8)
    holes, huge = X.copy(), X.copy()
    holes[3, 1, 7], huge[0, 0, 0] = np.nan, 1e300
    for bad, message in (
        (holes, "X must be finite, got NaN in series 3, channel 1, sample 7"),
        (huge, "X must be finite, got inf or a number beyond float32 in series 0"),
        (X[None], r"X must be \[n, channels, length\].*got an array of shape \(1, 8, 2, 30\)"),
        ([X[0], *X[1:, :1]], "X must have 2 channels, got 1 in series 1"),
        ([X[0], X[1][None], *X[2:]], r"X must be a list of \[channels, length\], got shape \(1, 2, 30\) in series 1"),
        ([X[0], [["a"]], *X[2:]], r"X must be a list of \[channels, length\], got .* in series 1"),
        ([X[0], X[1][:, :0], *X[2:]], r"got shape \(2, 0\) in series 1"),
    ):
        with pytest.raises(ValueError, match=message):
            small().fit(bad, y)
    with pytest.raises(ValueError, match="y must have 2 or more classes, got 1 class"):
        small().fit(X, np.ones(8))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        small().fit(X, y[:5])


def test_series_unlike_the_training_series_are_refused():
    X, y = waves(8)
    classifier = small(epochs=1).fit(X, y)
    with pytest.raises(ValueError, match="X must have 2 channels, got 1"):
        classifier.predict(X[:, :1])
    with pytest.raises(ValueError, match=r"X must have 30 samples as in fit, or be a list.*got 20"):
        classifier.predict(X[:, :, :20])
    assert classifier.predict([X[0][:, :20]]).shape == (1,)


def test_without_scikit_learn_the_error_names_the_extra():
    code = "import sys; sys.modules['sklearn'] = None; import muonssm; muonssm.MuonSSMClassifier"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MuonSSMClassifier needs scikit-learn: pip install 'muonssm[activity]'" in done.stderr
