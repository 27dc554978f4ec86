"""Pictures of segmentation: classes look alike everywhere, and are named."""

import numpy as np
import torch

from muonssm.lab.vision.explain import COLOURS, LINE, SIDE, _legend, _painted
from muonssm.lab.vision.segmentation_metrics import IGNORED


def test_a_class_has_one_colour_on_images_of_any_colour_and_what_has_no_label_stays():
    image = np.array([[(240, 30, 30), (30, 240, 30), (7, 8, 9)]], dtype=np.uint8)  # the first two of one brightness
    painted = _painted(image, torch.tensor([[2, 2, IGNORED]]))
    assert painted[0, 0].tolist() == painted[0, 1].tolist() == (0.3 * 100 + 0.7 * COLOURS[2]).astype(np.uint8).tolist()
    assert painted[0, 2].tolist() == [7, 8, 9]


def test_the_legend_has_the_classes_that_are_there_most_pixels_first():
    labels = torch.tensor([[3, 3, 3, 1], [1, 0, IGNORED, IGNORED]])
    legend = _legend(labels, [*"abcde"])
    colours = [legend.pixels[row * LINE + 1, 1].tolist() for row in range(4)]
    assert colours == [*(COLOURS[number].astype(int).tolist() for number in (3, 1, 0)), [255, 255, 255]]


def test_a_legend_that_is_full_says_how_many_more_there_are():
    many = [str(number) for number in range(40)]
    full = _legend(torch.arange(40), many).pixels
    squares = [(full[row * LINE + 1, 1] != 255).any() for row in range(SIDE // LINE)]
    assert all(squares[:-1])
    last = full[(SIDE // LINE - 1) * LINE :]
    assert (last < 128).any()  # words
    assert not (last == COLOURS[13 % len(COLOURS)].astype(np.uint8)).all(axis=-1).any()  # no square
