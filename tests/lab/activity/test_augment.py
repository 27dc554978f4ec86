"""Augmentation: what each transformation keeps and what it changes."""

from __future__ import annotations

import pytest
import torch

from muonssm.lab.activity.augment import Augmentation, mask_interval, rotate, warp_time


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 60, 6)


def test_rotation_keeps_lengths_and_angles(x):
    rotated = rotate(x, 1.0)
    for sensor in (slice(0, 3), slice(3, 6)):
        a, b = x[..., sensor], rotated[..., sensor]
        assert torch.allclose(a @ a.mT, b @ b.mT, atol=1e-4)
    assert (rotated - x).abs().max() > 0.1


def test_time_warp_keeps_the_order_and_the_ends(x):
    assert torch.allclose(warp_time(x, 0.0, 0.0), x, atol=1e-4)
    ramp = torch.arange(60.0).expand(4, 60)[..., None]
    warped = warp_time(ramp, 0.5, 0.0)[..., 0]
    assert (warped.diff(dim=1) >= 0).all()
    assert torch.allclose(warped[:, [0, -1]], ramp[:, [0, -1], 0], atol=1e-3)
    assert (warped - ramp[..., 0]).abs().max() > 1
    shifted = warp_time(ramp, 0.0, 0.2)[..., 0]
    assert torch.allclose(shifted[:, 20:40].diff(dim=1), torch.ones(4, 19), atol=1e-3)


def test_mask_sets_up_to_its_fraction_to_zero(x):
    assert 0 < (mask_interval(x, 0.5) == 0).float().mean() < 0.5


def test_offset_is_constant_per_channel(x):
    offset = Augmentation(offset=0.5)(x) - x
    assert torch.allclose(offset, offset[:, :1].expand_as(x), atol=1e-5)
    assert 0.2 < offset[:, 0].std() < 1


def test_all_together_and_none(x):
    everything = Augmentation(rotation=30, jitter=0.1, scaling=0.1, offset=0.2, warp=0.3, shift=0.1, mask=0.2)
    assert everything(x).shape == x.shape
    assert torch.equal(Augmentation()(x), x)
    with pytest.raises(ValueError, match="rotation must be 0 for 5 channels"):
        everything(x[..., :5])


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("rotation", 200, ValueError), ("jitter", -1, ValueError), ("warp", 0.96, ValueError), ("mask", "x", TypeError)],
)
def test_strengths_are_checked(name, value, error):
    with pytest.raises(error, match=f"^{name} must be"):
        Augmentation(**{name: value})
