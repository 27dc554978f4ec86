"""Streaming: the same results as from whole windows, in constant memory."""

from __future__ import annotations

import time

import pytest
import torch

from muonssm import Muon
from muonssm.lab.activity.stream import ActivityStream
from muonssm.layers import BACKBONES
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig

CASES = [(backbone, overlap) for backbone in BACKBONES for overlap in (0.0, 0.5, 0.75, 0.3)]
QUICK = [("longhorn", 0.75), ("mamba", 0.3), ("gated_deltanet", 0.0)]


@pytest.mark.parametrize(
    ("backbone", "overlap"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.full]) for case in CASES],
)
def test_a_stream_agrees_with_whole_windows(backbone, overlap):
    torch.manual_seed(0)
    sizes = ActivityModelConfig(backbone, d_model=16, d_state=8)
    model = ActivityClassifier(sizes, Muon(), 3, 4).eval()
    for parameter in model.parameters():
        parameter.data *= 3
    x, length = torch.randn(130, 3), 40
    stream = ActivityStream(model, length, overlap)
    windows = [window for sample in x if (window := stream.feed(sample))]
    hop = round(length * (1 - overlap))
    assert [window.end for window in windows] == list(range(length - 1, 130, hop))
    for window in windows:
        with torch.no_grad():
            whole = model(x[None, window.end - length + 1 : window.end + 1])["logits"][0].softmax(0)
        assert torch.allclose(window.probabilities, whole, atol=1e-5)


def test_a_nan_affects_only_its_own_windows():
    model = ActivityClassifier(ActivityModelConfig("mamba", d_model=16, d_state=8), Muon(), 3, 4)
    stream, x = ActivityStream(model, 20, 0.5), torch.randn(100, 3)
    x[5] = torch.nan
    finite = {w.end: w.probabilities.isfinite().all().item() for sample in x if (w := stream.feed(sample))}
    assert finite == {end: end != 19 for end in range(19, 100, 10)}


def test_a_stream_is_fast_and_its_state_is_small():
    """Less than a millisecond of CPU time per sample, for the paper's model (d_model 128, two layers)."""
    model = ActivityClassifier(ActivityModelConfig(), Muon(), 6, 7)
    stream, x = ActivityStream(model, 512, 0.5), torch.randn(6)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = 1.0
    for _ in range(5):
        start = time.process_time()
        for _ in range(100):
            stream.feed(x)
        best = min(best, (time.process_time() - start) / 100)
    torch.set_num_threads(threads)
    assert best < 1e-3
    shapes = [t.shape for t in (stream.sums, stream.state.samples, *stream.state.mixers[0].memory)]
    assert all(shape[0] == 2 for shape in shapes)


def test_a_bidirectional_model_cannot_stream():
    model = ActivityClassifier(ActivityModelConfig(bidirectional=True), Muon(), 6, 7)
    with pytest.raises(ValueError, match="bidirectional must be False"):
        ActivityStream(model, 512, 0.5)
