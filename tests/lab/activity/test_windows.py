"""Cutting recordings into windows, and standardizing them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonssm.lab.activity.windows import (
    channel_statistics,
    count_dropped_samples,
    cut_windows,
    make_windows,
    resample_to_window,
    standardize,
    window_hop,
)


def test_windows_of_512_overlap_by_half():
    samples = np.arange(1300, dtype=np.float32)[:, None].repeat(2, 1)
    windows = cut_windows(samples, 512, 0.5)
    assert windows.shape == (4, 512, 2)
    assert windows[:, 0, 0].tolist() == [0, 256, 512, 768]
    assert np.array_equal(windows[3], samples[768:1280])
    assert count_dropped_samples(1300, 512, 0.5) == 20


@pytest.mark.parametrize(("overlap", "hop"), [(0.0, 512), (0.25, 384), (0.5, 256), (0.75, 128), (0.999, 1)])
def test_hop_by_overlap(overlap, hop):
    assert window_hop(512, overlap) == hop


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 90), st.integers(2, 30), st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.99]))
def test_windows_are_slices_of_the_recording(samples, length, overlap):
    x = np.arange(samples, dtype=np.float32)[:, None]
    windows, hop = cut_windows(x, length, overlap), window_hop(length, overlap)
    assert windows.shape[1:] == (length, 1)
    assert windows.flags["C_CONTIGUOUS"]
    if samples < length:
        assert len(windows) == 1
        assert count_dropped_samples(samples, length, overlap) == 0
        return
    assert len(windows) == 1 + (samples - length) // hop
    for i, window in enumerate(windows):
        assert np.array_equal(window, x[i * hop : i * hop + length])
    assert count_dropped_samples(samples, length, overlap) == samples - (windows[-1, -1, 0] + 1)


def test_a_short_recording_is_resampled_to_one_window():
    x = np.linspace(3, 7, 50, dtype=np.float32)[:, None]
    windows = cut_windows(x, 512, 0.5)
    assert windows.shape == (1, 512, 1)
    assert np.allclose(windows[0, :, 0], np.linspace(3, 7, 512), atol=1e-5)
    assert np.array_equal(windows, resample_to_window(x, 512))


def test_resampling_a_sine_gives_that_sine():
    t = np.linspace(0, 1, 2001)
    clip = resample_to_window(np.sin(2 * np.pi * t)[:, None], 512)
    assert clip.shape == (1, 512, 1)
    assert np.abs(clip[0, :, 0] - np.sin(2 * np.pi * np.linspace(0, 1, 512))).max() < 1e-5


@pytest.mark.parametrize(("mode", "count"), [("windows", 3), ("clips", 1)])
def test_mode_selects_windows_or_clips(mode, count):
    assert make_windows(np.zeros((40, 1), np.float32), mode, 20, 0.5).shape == (count, 20, 1)


def test_statistics_and_standardizing():
    generator = np.random.default_rng(0)
    x = (generator.standard_normal((30, 20, 3)) * [1, 5, 0] + [100, -3, 0.1]).astype(np.float32)
    mean, std = channel_statistics(x)
    assert mean.dtype == std.dtype == torch.float32
    assert torch.allclose(mean, torch.tensor(x.mean((0, 1), dtype=np.float64), dtype=torch.float32))
    assert std[2] == 1  # constant
    y = standardize(x, mean, std)
    assert y.dtype == torch.float32
    assert torch.allclose(y.mean((0, 1)), torch.zeros(3), atol=1e-4)
    assert torch.allclose(y.std((0, 1), correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)
    assert torch.equal(y, standardize(torch.from_numpy(x), mean, std))
    assert torch.equal(standardize(x[0], mean, std), y[0])


def test_a_constant_channel_becomes_zero():
    mean, std = channel_statistics(np.zeros((2, 4, 1), np.float32))
    assert torch.equal(standardize(np.zeros((2, 4, 1)), mean, std), torch.zeros(2, 4, 1))
