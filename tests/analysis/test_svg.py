"""Pictures: marks where the numbers are, round ticks, names that cannot break the page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from muonssm.analysis.svg import confusion, lines
from muonssm.analysis.svg.axes import ticks


@pytest.mark.parametrize(
    ("low", "high", "least", "found"),
    [
        (0, 1, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1, 50, 1, [10, 20, 30, 40, 50]),
        (1, 3, 1, [1, 2, 3]),
        (62.3, 96.1, 0, [70, 80, 90]),
        (0.004, 0.021, 0, [0.005, 0.01, 0.015, 0.02]),
        (-3, 2, 0, [-3, -2, -1, 0, 1, 2]),
        (7, 7, 0, [7]),
    ],
)
def test_ticks_are_round_numbers_inside(low, high, least, found):
    assert ticks(low, high, least) == pytest.approx(found)


def test_lines_go_through_their_points():
    picture = lines(
        {"plain": [[(1, 0.0), (2, 1.0)]], "muon": [[(1, 1.0), (2, 0.5)], [(1, 0.2), (2, 0.1)]]}, "epoch", "loss"
    )
    tree = ElementTree.fromstring(picture)
    curves = [element for element in tree.iter() if element.tag.endswith("polyline")]
    assert [curve.get("class") for curve in curves] == ["curve c0", "curve c1", "curve c1"]
    first, second = (tuple(map(float, point.split(","))) for point in curves[0].get("points").split())
    assert first[0] < second[0]
    assert first[1] > second[1]  # up is more
    assert ElementTree.fromstring(lines({"one": [[(1, 2.0)]]}, "epoch", "loss")) is not None


def test_confusion_has_a_cell_for_every_pair_and_escapes_names():
    tree = ElementTree.fromstring(confusion([[3, 1], [0, 4]], ["<up>", "down & out"]))
    cells = [element for element in tree.iter() if element.tag.endswith("rect")]
    assert [cell.get("class") for cell in cells] == ["right", "wrong", "wrong", "right"]
    assert [float(cell.get("fill-opacity")) for cell in cells] == [0.75, 0.25, 0.0, 1.0]
    assert cells[1][0].text == "<up> taken for down & out: 1 of 4"
    many = confusion([[int(i == j) for j in range(37)] for i in range(37)], [f"class {i}" for i in range(37)])
    assert len(re.findall("<rect", many)) == 37 * 37
