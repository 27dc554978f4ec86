"""Scores against numbers worked out by hand, augmentation, and streams against whole windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from muonssm import Muon
from muonssm.lab.activity.augment import Augmentation, blank, rotate, warp
from muonssm.lab.activity.stream import ActivityStream
from muonssm.lab.activity.task import ActivityTask
from muonssm.lab.core.recipe import Recipe
from muonssm.layers import BACKBONES
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig


def test_scores_worked_out_by_hand():
    """True 0 0 1 1 2 2, found 0 1 1 1 2 0: precision 1/2, 2/3, 1; recall 1/2, 1, 1/2."""
    logits = np.eye(4)[[0, 1, 1, 1, 2, 0]]  # a fourth class that never occurs does not count
    scores = ActivityTask.score(None, logits, np.array([0, 0, 1, 1, 2, 2]))
    assert scores["accuracy"] == pytest.approx(100 * 4 / 6)
    assert scores["precision"] == pytest.approx(100 * (1 / 2 + 2 / 3 + 1) / 3)
    assert scores["recall"] == pytest.approx(100 * (1 / 2 + 1 + 1 / 2) / 3)
    assert scores["f1"] == pytest.approx(100 * (1 / 2 + 4 / 5 + 2 / 3) / 3)
    assert scores["confusion"] == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0]]
    assert scores["loss"] == pytest.approx((4 * -np.log(np.e / (np.e + 3)) + 2 * np.log(np.e + 3)) / 6)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.75, 0.3])
def test_a_stream_says_what_whole_windows_say(backbone, overlap):
    torch.manual_seed(0)
    sizes = ActivityModelConfig(backbone, d_model=16, d_state=8)
    model = ActivityClassifier(sizes, Muon(), 3, 4).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    x, length = torch.randn(130, 3), 40
    stream = ActivityStream(model, length, overlap)
    answers = [answer for sample in x if (answer := stream.feed(sample))]
    hop = round(length * (1 - overlap))
    assert [answer.end for answer in answers] == list(range(length - 1, 130, hop))
    for answer in answers:
        with torch.no_grad():
            whole = model(x[None, answer.end - length + 1 : answer.end + 1])["logits"][0].softmax(0)
        assert torch.allclose(answer.probabilities, whole, atol=1e-5)


def test_a_bad_sample_spoils_only_the_windows_it_is_in():
    model = ActivityClassifier(ActivityModelConfig("mamba", d_model=16, d_state=8), Muon(), 3, 4)
    stream, x = ActivityStream(model, 20, 0.5), torch.randn(100, 3)
    x[5] = torch.nan
    answers = {a.end: a.probabilities.isfinite().all().item() for sample in x if (a := stream.feed(sample))}
    assert answers == {end: end != 19 for end in range(19, 100, 10)}


def test_a_stream_is_fast_and_stays_small():
    """Less than a millisecond a sample on one core, for the paper's model (d_model 128, two layers)."""
    import time

    model = ActivityClassifier(ActivityModelConfig(), Muon(), 6, 7)
    stream, x = ActivityStream(model, 512, 0.5), torch.randn(6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            stream.feed(x)
        best = min(best, (time.perf_counter() - start) / 100)
    torch.set_num_threads(threads)
    assert best < 1e-3
    shapes = [t.shape for t in (stream.sums, stream.state.samples, *stream.state.mixers[0].memory)]
    assert all(shape[0] == 2 for shape in shapes)


def test_a_model_that_looks_ahead_cannot_stream():
    model = ActivityClassifier(ActivityModelConfig(bidirectional=True), Muon(), 6, 7)
    with pytest.raises(ValueError, match="the model is bidirectional"):
        ActivityStream(model, 512, 0.5)


def test_augmentation_does_what_it_says():
    torch.manual_seed(0)
    x = torch.randn(5, 60, 6)
    turned = rotate(x, 1.0)
    for sensor in (slice(0, 3), slice(3, 6)):  # lengths and angles between samples stay
        a, b = x[..., sensor], turned[..., sensor]
        assert torch.allclose(a @ a.mT, b @ b.mT, atol=1e-4)
    assert (turned - x).abs().max() > 0.1
    assert torch.allclose(warp(x, 0.0, 0.0), x, atol=1e-4)
    ramp = torch.arange(60.0).expand(4, 60)[..., None]
    warped = warp(ramp, 0.5, 0.0)[..., 0]
    assert (warped.diff(dim=1) >= 0).all()
    assert torch.allclose(warped[:, [0, -1]], ramp[:, [0, -1], 0], atol=1e-3)
    assert (warped - ramp[..., 0]).abs().max() > 1
    moved = warp(ramp, 0.0, 0.2)[..., 0]
    assert torch.allclose(moved[:, 20:40].diff(dim=1), torch.ones(4, 19), atol=1e-3)
    blanked = blank(x, 0.5)
    assert 0 < (blanked == 0).float().mean() < 0.5
    shifted = Augmentation(offset=0.5)(x) - x
    assert torch.allclose(shifted, shifted[:, :1].expand_as(x), atol=1e-5)
    assert 0.2 < shifted[:, 0].std() < 1
    everything = Augmentation(rotation=30, jitter=0.1, scaling=0.1, offset=0.2, warp=0.3, shift=0.1, mask=0.2)
    assert everything(x).shape == x.shape
    assert torch.equal(Augmentation()(x), x)
    with pytest.raises(ValueError, match="rotation is 30; with 5 channels, no sensors of three axes, it may be 0"):
        everything(x[..., :5])
    with pytest.raises(ValueError, match=r"rotation is 200; it may be in \[0, 180\]"):
        Augmentation(rotation=200)


def test_training_batches_are_augmented_and_others_are_not(recordings, changes):
    task = Recipe.load("folder", [*changes, "augment.jitter=1.0"]).task
    data = task.load_data()
    items = [data.train[0], data.train[1]]
    assert torch.equal(task.collate(items, training=False)["x"], torch.stack([x for x, _ in items]))
    assert not torch.equal(task.collate(items, training=True)["x"], torch.stack([x for x, _ in items]))
