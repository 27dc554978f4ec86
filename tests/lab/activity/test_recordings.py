"""Resampling recordings to one rate."""

from __future__ import annotations

import numpy as np

from muonssm.lab.activity.recordings import Signal, median_rate, resample

from .trees import waves


def test_a_sine_at_ragged_times_comes_out_resample():
    """Linear interpolation of a curve with |f''| <= w^2 over steps <= h is within w^2 h^2 / 8."""
    generator = np.random.default_rng(0)
    times = np.sort(generator.uniform(0, 10, 4000))
    times[[0, -1]] = 0, 10
    signal = Signal.sorted_by_time(np.sin(2 * np.pi * times)[:, None], times, ("ax",))
    out = resample(signal, 50.0)
    assert out.shape == (501, 1)
    assert out.dtype == np.float32
    bound = (2 * np.pi * np.diff(times).max()) ** 2 / 8
    assert np.abs(out[:, 0] - np.sin(2 * np.pi * np.arange(501) / 50)).max() < bound + 1e-6


def test_samples_at_the_target_rate_do_not_change():
    samples = waves(333, 3).astype(np.float32)
    start = 1.5e9  # seconds since 1970 must not cost precision
    assert np.allclose(
        resample(Signal.sorted_by_time(samples, start + np.arange(333) / 50, ("a", "b", "c")), 50.0), samples, atol=1e-4
    )
    assert np.array_equal(resample(Signal.sorted_by_time(samples, np.arange(333) / 50, ("a", "b", "c"))), samples)
    assert np.array_equal(resample(Signal.sorted_by_time(samples, None, ("a", "b", "c")), 50.0), samples)


def test_half_the_rate_is_every_second_sample():
    samples = waves(101, 2).astype(np.float32)
    assert np.allclose(
        resample(Signal.sorted_by_time(samples, np.arange(101) / 100, ("a", "b")), 50.0), samples[::2], atol=1e-6
    )


def test_a_gap_does_not_change_the_median_rate():
    times = np.concatenate([np.arange(100) / 50, 7 + np.arange(100) / 50])
    assert median_rate(times) == 50.0
