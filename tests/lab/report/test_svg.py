"""Pictures: marks where the numbers are, round ticks, names that cannot break the page."""

from __future__ import annotations

import base64
import io
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image

from muonssm.lab.report.svg import bars, confusion, heatmap, lines, pictures, standalone
from muonssm.lab.report.svg.axes import Axis, log_ticks, number, ticks
from muonssm.lab.report.svg.colours import DARK, LIGHT, contrast, rgb


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


def elements(picture, tag, kind=None):
    """Those of a picture with this tag, and this among their classes."""
    found = [each for each in ElementTree.fromstring(picture).iter() if each.tag.rpartition("}")[2] == tag]
    return [each for each in found if kind is None or kind in (each.get("class") or "").split()]


def points(element):
    return [tuple(map(float, point.split(","))) for point in element.get("points").split()]


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    """x from 50 to 330 pixels for 1 to 100, so 10 is at 190; y from 190 up to 12, with 5% of two decades beyond each
    end: a decade is 178 / 2.2 pixels, and 1 is 0.1 decades above the lower end."""
    picture = lines({"one": [[(1, 1.0), (10, 10.0), (100, 100.0)]]}, "x", "y", log_x=True, log_y=True)
    decade = 178 / 2.2
    at = [190 - decade * (0.1 + i) for i in range(3)]
    for point, expected in zip(
        points(elements(picture, "polyline")[0]), zip((50, 190, 330), at, strict=True), strict=True
    ):
        assert point == pytest.approx(expected, abs=0.06)
    assert [each.text for each in elements(picture, "text")][:6] == ["1", "10", "100", "1", "10", "100"]
    assert Axis(1, 100, 0, 200, log=True).at(10) == pytest.approx(100)


def test_logarithmic_ticks_and_their_names():
    assert log_ticks(0.5, 2e5) == [1, 10, 100, 1000, 10000, 100000]
    assert log_ticks(3, 60) == [5, 10, 20, 50]
    assert log_ticks(1e-12, 1) == pytest.approx([1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 1e-2, 1])
    assert log_ticks(31, 38) == pytest.approx(ticks(31, 38))  # no round power between
    assert [number(x) for x in (0.001, 1e-5, 2e-7, 99999, 1e6, 0, -3)] == [
        "0.001", "10⁻⁵", "2·10⁻⁷", "99999", "10⁶", "0", "-3",
    ]  # fmt: skip
    lengths = [128, 512, 2048]
    assert Axis.over(lengths, 0, 280, log=True).ticks(lengths) == lengths
    assert Axis.over([0.1, 0.9], 0, 280).ticks([0.1, 0.9])[0] == 0.2  # no whole numbers, so finer steps


def test_what_has_no_place_is_left_out_and_said():
    picture = lines({"one": [[(1, 0.0), (2, None), (3, math.nan), (4, 1.0), (5, 10.0)]]}, "x", "y", log_y=True)
    assert len(points(elements(picture, "polyline")[0])) == 2
    assert "1 not above 0, not shown" in [each.text for each in elements(picture, "text")]
    picture = lines({"one": [[(1, 0.0), (2, None)]]}, "x", "y")
    assert not [each for each in elements(picture, "text") if "not shown" in each.text]


def test_plain_and_muon_keep_their_colours_and_names_their_key():
    picture = lines({"other": [[(1, 1.0)]], "muon": [[(1, 2.0)]], "plain": [[(1, 3.0)]], "<b>": [[(1, 4.0)]]}, "x", "y")
    assert [each.get("class") for each in elements(picture, "polyline")] == [
        "curve c2",
        "curve c1",
        "curve c0",
        "curve c3",
    ]
    key = [each.text for each in elements(picture, "text") if each.text in ("other", "muon", "plain", "<b>")]
    assert key == ["other", "muon", "plain", "<b>"]
    names = [f"name {i}" for i in range(8)]
    eight = lines({name: [[(1, 1.0)]] for name in names}, "x", "y", legend=False)
    assert {each.get("class") for each in elements(eight, "polyline")} == {f"curve c{i}" for i in range(8)}
    assert not [each for each in elements(eight, "text") if each.text in names]
    with pytest.raises(ValueError, match="curves has 9 names; it may have at most 8"):
        lines({str(i): [[(1, 1.0)]] for i in range(9)}, "x", "y")


def test_points_are_marked_where_they_are_few_and_say_their_values():
    for count, marked in ((12, 12), (13, 0)):
        picture = lines({"plain": [[(i, i / 2) for i in range(count)]]}, "step", "loss")
        assert len(elements(picture, "circle", "dot")) == marked
        assert "step 3\nplain: 1.5" in [each.text for each in elements(picture, "title")]
    picture = lines({"plain": [[(i, 1.0) for i in range(1000)]]}, "step", "loss")
    strips, (first, *_, last) = elements(picture, "rect", "hit"), points(elements(picture, "polyline")[0])
    assert 50 <= len(strips) <= 60
    assert sum(float(each.get("width")) for each in strips) == pytest.approx(last[0] - first[0], abs=0.5)


def test_a_band_goes_there_and_back_in_the_colour_of_its_name():
    picture = lines({"muon": [[(0, 5.0), (10, 5.0)]]}, "x", "y", bands={"muon": [(0, 0.0, 10.0), (10, 2.0, 8.0)]})
    (band,) = elements(picture, "polygon", "band")
    assert band.get("class") == "band c1"
    low, low_end, high_end, high = points(band)
    assert [p[0] for p in (low, low_end, high_end, high)] == [50, 330, 330, 50]
    assert low[1] > low_end[1] > high_end[1] > high[1] >= 12  # the axis shows all of it
    middle = points(elements(picture, "polyline")[0])[0][1]
    assert middle == pytest.approx((low[1] + high[1]) / 2, abs=0.1)


def test_a_cell_has_the_colour_of_its_share_of_the_range():
    """0 to 10 in 20 steps: 2.5 is step 5. By the logarithm 1 to 100: 10 is the middle, 0 has no colour."""
    picture = heatmap(
        [[0.0, 2.5, 10.0], [None, 5.0, math.nan]],
        ["a", "b"],
        ["x", "y", "z"],
        "r",
        "c",
        format="{:.1f}",
        marks={(1, 1)},
    )
    cells = [each.get("class") for each in elements(picture, "rect") if "key" not in each.get("class")]
    assert cells == ["s0", "s5", "s20", "none", "s10", "none", "mark"]
    texts = [each.text for each in elements(picture, "text")]
    assert [text for text in texts if text in ("0.0", "2.5", "5.0", "10.0")] == [
        "0.0",
        "2.5",
        "10.0",
        "5.0",
        "10.0",
        "0.0",
    ]
    assert "r b, c x: nothing" in [each.text for each in elements(picture, "title")]
    (mark,), same = elements(picture, "rect", "mark"), elements(picture, "rect", "s10")[0]
    assert (mark.get("x"), mark.get("y")) == (same.get("x"), same.get("y"))
    assert len(elements(picture, "rect", "key")) == 21
    logs = heatmap([[1.0, 10.0, 100.0, 0.0]], ["a"], list("wxyz"), "r", "c", log=True, show=False)
    assert [each.get("class") for each in elements(logs, "rect")][:4] == ["s0", "s10", "s20", "none"]
    assert not elements(logs, "text", "s10")
    with pytest.raises(ValueError, match=r"values has rows of \[1\] cells; it may have 1 rows of 2"):
        heatmap([[1.0]], ["a"], ["x", "y"], "r", "c")


def test_numbers_stand_in_cells_only_where_there_is_room():
    wide = heatmap([[1.0] * 4], ["a"], list("wxyz"), "r", "c")
    assert len(elements(wide, "text", "s10")) == 4
    narrow = heatmap([[1.0] * 30], ["a"], [str(i) for i in range(30)], "r", "c")
    assert elements(narrow, "text", "s10") == []
    assert "min-width:" in narrow  # it moves inside its box on a phone, where its names would be too small to read


def test_dots_and_whiskers_stand_at_mean_and_deviation():
    picture = bars(
        {"plain": (70.0, 2.0), "a & b": (80.0, None), "lost": (None, None)}, "accuracy", paper={"plain": 74.0}
    )
    plain, other = (float(each.get("cx")) for each in elements(picture, "circle"))
    per_unit = (other - plain) / 10
    across = elements(picture, "line", "whisker")[0]
    assert (float(across.get("x1")), float(across.get("x2"))) == pytest.approx(
        (plain - 2 * per_unit, plain + 2 * per_unit), abs=0.2
    )
    corners = points(elements(picture, "polygon", "paper")[0])
    assert sum(x for x, _ in corners) / 4 == pytest.approx(plain + 4 * per_unit, abs=0.2)
    texts = [each.text for each in elements(picture, "text")]
    assert {"70 ± 2", "80", "diverged", "a & b", "paper"} <= set(texts)
    assert "paper" not in [each.text for each in elements(bars({"plain": (1.0, None)}, "x"), "text")]
    assert "1 ± 0" in [each.text for each in elements(bars({"plain": (1.0, 1e-9)}, "x"), "text")]  # rounding


def test_long_names_stand_above_their_rows_so_that_a_phone_shows_all():
    picture = bars({"plain": (91.25, 2.25), "momentum + Newton-Schulz": (92.5, 1.5)}, "accuracy")
    assert "min-width:" not in picture
    names = elements(picture, "text", "strong")
    dots = [float(each.get("cy")) for each in elements(picture, "circle")]
    assert [float(each.get("y")) for each in names] == pytest.approx([dots[0] - 16, dots[1] - 16])
    beside = elements(bars({"plain": (1.0, None)}, "x"), "text", "strong")[0]
    assert beside.get("text-anchor") == "end"


def pixels(image):
    data = image.get("href").removeprefix("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")


def test_a_matrix_becomes_pixels():
    """The most is 4: that is opaque, a quarter of it half so, 0 clear; what is no number is grey."""
    picture = pictures([[[4.0, -4.0, 0.0], [1.0, -1.0, math.inf]], [[2.0]]], ["<S>", "M"], columns=1)
    first, second, scale = map(pixels, elements(picture, "image"))
    assert first.size == (3, 2)
    orange, blue, grey = (234, 88, 12), (37, 99, 235), (107, 114, 128)
    half = round(255 * math.sqrt(32 / 127))  # 1 of 4 is step 32 of 127
    found = [first.getpixel((x, y)) for y in range(2) for x in range(3)]
    assert found[0] == (*orange, 255)
    assert found[1] == (*blue, 255)
    assert found[2][3] == 0
    assert found[3:] == [(*orange, half), (*blue, half), (*grey, 255)]
    assert second.getpixel((0, 0)) == (*orange, round(255 * math.sqrt(64 / 127)))  # on the scale of all
    assert [scale.getpixel((x, 0))[3] for x in (0, 127, 254)] == [255, 0, 255]
    texts = [each.text for each in elements(picture, "text")]
    assert texts == ["<S>", "M", "-4", "0", "4"]
    sizes = [(float(each.get("width")), float(each.get("height"))) for each in elements(picture, "image")[:2]]
    assert sizes[0][0] / sizes[0][1] == pytest.approx(1.5, rel=0.01)  # square pixels
    assert pixels(elements(pictures([[[0.0]]], ["zero"]), "image")[0]).getpixel((0, 0))[3] == 0
    with pytest.raises(ValueError, match="titles has 0 names; it may have 1"):
        pictures([[[1.0]]], [])
    with pytest.raises(ValueError, match=r"the matrix 'S' has rows of \[1, 2\]"):
        pictures([[[1.0], [1.0, 2.0]]], ["S"])


def test_a_picture_alone_has_its_colours_with_it():
    drawn = [
        lines({"plain": [[(1, 1.0), (2, 3.0)]]}, "x", "y"),
        heatmap([[1.0, 2.0]], ["a"], ["x", "y"], "r", "c"),
        bars({"plain": (1.0, 0.1)}, "x"),
        pictures([[[1.0]]], ["S"]),
        confusion([[1, 0], [0, 1]], ["a", "b"]),
    ]
    for picture in drawn:
        tree = ElementTree.fromstring(picture)
        assert (tree.get("role"), bool(tree.get("aria-label"))) == ("img", True)
        alone = standalone(picture)
        assert ElementTree.fromstring(alone).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in alone
        light, dark = alone.split("@media screen and (prefers-color-scheme: dark)")
        assert LIGHT["c1"] in light
        assert DARK["c1"] in dark
        assert standalone(alone) == alone
    with pytest.raises(ValueError, match="picture is '<p>'"):
        standalone("<p>")


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_curves_stand_out_from_cards(colours):
    """WCAG asks for 4.5 for text and 3 for pictures; the grey of plain, 2.8 on light cards, is the least."""
    for name, least in (("ink", 7), ("soft", 4.5), *((f"c{i}", 2.8) for i in range(8))):
        assert contrast(rgb(colours[name]), rgb(colours["card"])) >= least, name


def test_curves_without_a_single_point_are_axes_alone():
    picture = lines({"plain": [[(1, None)]], "muon": [[]]}, "epoch", "loss", legend=True)
    assert "hit" not in picture
    assert "epoch" in picture
