"""Pictures of predictions: colors of classes, legend, joined panels."""

from __future__ import annotations

import numpy as np
import torch

from muonssm.lab.vision.ade20k import IGNORED
from muonssm.lab.vision.pictures import (
    COLORS,
    HEIGHT,
    LEGEND_LINE,
    MARGIN,
    TITLE_HEIGHT,
    Panel,
    draw_legend,
    draw_objects,
    join_panels,
    overlay_heat,
    paint_labels,
)


def test_a_class_has_one_color_on_any_image_and_ignored_pixels_stay():
    image = np.array([[(240, 30, 30), (30, 240, 30), (7, 8, 9)]], dtype=np.uint8)  # the first two are equally bright
    painted = paint_labels(image, torch.tensor([[2, 2, IGNORED]]))
    assert painted[0, 0].tolist() == painted[0, 1].tolist() == (0.3 * 100 + 0.7 * COLORS[2]).astype(np.uint8).tolist()
    assert painted[0, 2].tolist() == [7, 8, 9]


def test_the_legend_lists_the_classes_by_number_of_pixels():
    labels = torch.tensor([[3, 3, 3, 1], [1, 0, IGNORED, IGNORED]])
    legend = draw_legend(labels, [*"abcde"])
    colors = [legend.pixels[line * LEGEND_LINE + 1, 1].tolist() for line in range(4)]
    assert colors == [*(COLORS[label].astype(int).tolist() for label in (3, 1, 0)), [255, 255, 255]]


def test_a_full_legend_says_how_many_more_classes_there_are():
    names = [str(number) for number in range(40)]
    full = draw_legend(torch.arange(40), names).pixels
    squares = [(full[line * LEGEND_LINE + 1, 1] != 255).any() for line in range(HEIGHT // LEGEND_LINE)]
    assert all(squares[:-1])
    last = full[(HEIGHT // LEGEND_LINE - 1) * LEGEND_LINE :]
    assert (last < 128).any()  # text
    assert not (last == COLORS[13 % len(COLORS)].astype(np.uint8)).all(axis=-1).any()  # no square


def test_heat_goes_from_blue_to_red():
    gray = np.full((8, 8, 3), 100, dtype=np.uint8)
    heat = overlay_heat(gray, np.array([[0.0, 1.0]]))
    cold, hot = heat[0, 0].tolist(), heat[0, -1].tolist()
    assert cold[2] > cold[0]
    assert hot[0] > hot[2]


def test_objects_have_boxes_and_masks_in_the_color_of_their_class():
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    masks = torch.zeros(1, 64, 64, dtype=torch.bool)
    masks[0, 40:50, 40:50] = True
    drawn = draw_objects(pixels, masks, torch.tensor([[8.0, 8.0, 60.0, 60.0]]), torch.tensor([3]), [*"abc"])
    assert drawn.shape == (HEIGHT, HEIGHT, 3)
    assert drawn[8 * 4, 100].tolist() == COLORS[3].astype(int).tolist()  # the box's upper edge, enlarged four times
    assert drawn[45 * 4, 45 * 4].tolist() == (0.5 * COLORS[3]).astype(np.uint8).tolist()


def test_panels_stand_side_by_side():
    page = join_panels([Panel("a", np.zeros((128, 64, 3), np.uint8)), Panel("b", np.zeros((512, 512, 3), np.uint8))])
    assert page.size == (3 * MARGIN + 128 + 256, HEIGHT + TITLE_HEIGHT + MARGIN)
