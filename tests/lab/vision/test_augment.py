"""Crops and flips of batches of small images."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from muonssm.lab.vision.augment import ImageAugmentation, crop_and_flip


def batch(count=400, height=6, width=7):
    """Images whose values differ everywhere, so that a crop determines its position."""
    return torch.arange(count * 2 * height * width, dtype=torch.float32).reshape(count, 2, height, width)


def test_every_crop_is_a_window_of_the_reflected_image():
    images, pad = batch(), 2
    torch.manual_seed(0)
    cropped = crop_and_flip(images, pad, 0.5)
    assert cropped.shape == images.shape
    assert cropped.is_contiguous()
    padded = F.pad(images, (pad,) * 4, mode="reflect")
    seen = set()
    for image, source in zip(cropped, padded, strict=True):
        windows = source.unfold(1, 6, 1).unfold(2, 7, 1).permute(1, 2, 0, 3, 4)  # [top, left, C, H, W]
        both = torch.stack([windows, windows.flip(-1)])
        (found,) = (both == image).flatten(3).all(3).nonzero().tolist()
        seen.add(tuple(found))
    assert seen == {(flip, top, left) for flip in range(2) for top in range(5) for left in range(5)}


@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_flips_without_crops(flip):
    images = batch(count=4)
    assert crop_and_flip(images, 0, flip).equal(images.flip(3) if flip else images)


def test_a_share_of_the_images_is_flipped():
    images = batch(count=2000)
    torch.manual_seed(0)
    same = (crop_and_flip(images, 0, 0.25) == images).flatten(1).all(1)
    assert 1 - same.double().mean().item() == pytest.approx(0.25, abs=0.03)


def test_small_images_are_cropped_and_flipped_in_the_batch():
    images = batch(count=3)
    assert ImageAugmentation().transform(images) is images
    assert ImageAugmentation(flip=1.0).transform(images).equal(images.flip(3))
    assert ImageAugmentation(size=8, flip=1.0).transform(images) is images  # timm has flipped them
    torch.manual_seed(1)
    both = ImageAugmentation(pad=2, flip=0.5, rotation=10).transform(images)
    torch.manual_seed(1)
    assert both.equal(crop_and_flip(ImageAugmentation(rotation=10).transform(images), 2, 0.5))


def test_a_border_that_the_image_cannot_reflect_is_named():
    with pytest.raises(ValueError, match=r"^pad must be less than the sides of the images, 6 x 7, got 6"):
        ImageAugmentation(pad=6).transform(batch(count=1))
