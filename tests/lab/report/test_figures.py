"""Figures: marks stand where the numbers are, and the SVG text is deterministic, safe and readable in both modes."""

from __future__ import annotations

import base64
import io
import math
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from PIL import Image

from muonssm.lab.report.chart import PHONE_WIDTH
from muonssm.lab.report.colors import (
    DARK,
    LIGHT,
    SCALE_DARK,
    SCALE_LIGHT,
    TEXT_ON_SCALE,
    contrast,
    rgb,
    scale,
    series_colors,
    series_styles,
)
from muonssm.lab.report.figures import bars, confusion, heatmap, lines, number, pictures, side_by_side, standalone


def elements(figure, tag, css_class=None):
    """Return the elements with this tag that lie in a group of this class."""
    tree = ElementTree.fromstring(figure)
    groups = [tree] if css_class is None else [g for g in tree.iter("g") if g.get("class") == css_class]
    return [element for group in groups for element in group.iter() if element.tag.rpartition("}")[2] == tag]


def texts(figure):
    return [element.text for element in elements(figure, "text")]


def titles(figure):
    return [element.text for element in elements(figure, "title")]


def points(path):
    """Return the points of a path element, moved by its transform."""
    moved = re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", path.get("transform", ""))
    x, y = map(float, moved.groups()) if moved else (0.0, 0.0)
    found = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d"))
    return [(x + float(a), y + float(b)) for a, b in found]


def center(path):
    return tuple((min(values) + max(values)) / 2 for values in zip(*points(path), strict=True))


def color(element, key="fill"):
    """Return the CSS variable of an element's color."""
    found = re.search(rf"(?:^|; ){key}: (?:var\(--(\w+)\)|none)", element.get("style"))
    return found[1] if found else None


def curves(figure):
    """Return the lines, without the dots at their points."""
    return [path for path in elements(figure, "path", "curve") if color(path) is None]


def tick_positions(figure, key):
    """Return the positions of the tick labels that are numbers, by label; `key` is the axis."""
    labels = [element for element in elements(figure, "text") if re.fullmatch(r"-?[\d.]+", element.text)]
    anchor = {"x": "middle", "y": "end"}[key]
    chosen = [element for element in labels if f"text-anchor: {anchor}" in element.get("style")]
    return {float(element.text): float(element.get(key)) for element in chosen}


DRAWN = {
    "lines": lambda: lines({"plain": [[(1, 1.0), (2, 3.0)]], "muon": [[(1, 2.0), (2, 1.0)]]}, "x", "y"),
    "heatmap": lambda: heatmap([[1.0, 2.0]], ["a"], ["x", "y"], "r", "c"),
    "bars": lambda: bars({"plain": (1.0, 0.1)}, "x", paper={"plain": 1.05}),
    "pictures": lambda: pictures([[[1.0]]], ["S"]),
    "confusion": lambda: confusion([[1, 0], [0, 1]], ["a", "b"]),
    "side_by_side": lambda: side_by_side([bars({"plain": (1.0, None)}, "x"), pictures([[[1.0]]], ["S"])], "both"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_deterministic_and_safe_on_a_page(name):
    """No ids (two figures cannot collide), no scripts, no handlers, no links, no fixed colors outside of images."""
    figure = DRAWN[name]()
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "text.color": "red"}):
        assert DRAWN[name]() == figure  # whatever the user's settings are
    tree = ElementTree.fromstring(figure)
    assert (tree.get("role"), bool(tree.get("aria-label"))) == ("img", True)
    for element in tree.iter():
        assert element.tag in ("svg", "g", "path", "text", "title", "image")
        assert not {"id", "clip-path", "onclick"} & set(element.attrib)
        assert "href" not in element.attrib or element.get("href").startswith("data:image/png;base64,")
    assert "url(" not in figure
    assert not re.search(r"#[0-9a-f]{6}", figure)
    assert set(re.findall(r"var\(--(\w+)\)", figure)) <= set(LIGHT)


@pytest.mark.parametrize("name", DRAWN)
def test_a_file_has_its_own_colors_for_both_modes(name):
    figure = DRAWN[name]()
    alone = standalone(figure)
    assert ElementTree.fromstring(alone).tag == "{http://www.w3.org/2000/svg}svg"
    light, dark = alone.split("@media screen and (prefers-color-scheme: dark)")
    for variable in set(re.findall(r"var\(--(\w+)\)", figure)):
        assert f"--{variable}: {LIGHT[variable]};" in light
        assert f"--{variable}: {DARK[variable]};" in dark.partition("</style>")[0]
    # Programs that know no variables use the attributes.
    for element in ElementTree.fromstring(alone).iter():
        for key, variable in re.findall(r"([\w-]+): var\(--(\w+)\)", element.get("style", "")):
            assert element.get(key) == LIGHT[variable]
    assert standalone(alone) == alone
    with pytest.raises(ValueError, match="figure must be"):
        standalone("<p>")


def test_a_file_of_an_empty_figure_is_xml():
    alone = ElementTree.fromstring(standalone('<svg viewBox="0 0 1 1" />'))
    assert [element.tag.rpartition("}")[2] for element in alone.iter()] == ["svg", "style"]


@pytest.mark.parametrize("name", ["#fadeff", "#fade01", 'style="fill: var(--no)"', "var(--no)", "a > b", "</svg>"])
def test_names_that_look_like_svg_stay_text(name):
    figure = bars({name: (1.0, None)}, name)
    for text in (figure, standalone(figure)):
        assert name in texts(text)
        assert ElementTree.fromstring(text).get("aria-label") == name


def test_figures_beside_each_other_do_not_overlap():
    one, two = bars({"plain": (1.0, None)}, "x"), pictures([[[1.0]]], ["S"])
    (first, second), whole = (
        list(ElementTree.fromstring(side_by_side([one, two], "both"))),
        side_by_side([one, two], ""),
    )
    assert float(second.get("x")) == float(first.get("width"))
    width = float(re.search(r'viewBox="0 0 ([\d.]+)', whole)[1])
    assert width == pytest.approx(float(first.get("width")) + float(second.get("width")))
    with pytest.raises(ValueError, match="drawn must have"):
        side_by_side([], "none")


def test_colors_have_enough_contrast():
    """WCAG asks for 4.5 for text and 3 for graphics; the gray of plain, 2.8 on light cards, is the lowest."""
    for colors in (LIGHT, DARK):
        for name, least in (("ink", 7), ("soft", 4.5), *((f"c{i}", 2.8) for i in range(8))):
            assert contrast(rgb(colors[name]), rgb(colors["card"])) >= least, name
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21)


@pytest.mark.parametrize("stops", [SCALE_LIGHT, SCALE_DARK])
def test_text_is_readable_on_every_color_of_the_scale(stops):
    colors = scale(stops)
    assert (colors["s0"], colors["s10"], colors["s20"]) == stops
    for i in range(21):
        assert colors[f"t{i}"] in TEXT_ON_SCALE
        assert contrast(rgb(colors[f"t{i}"]), rgb(colors[f"s{i}"])) >= 4.5


# ---- line charts


def test_lines_go_through_their_points():
    """The points of the curves stand where the tick labels of the axes say."""
    plain, muon = [(1, 0.0), (2, 1.0), (3, 0.25)], [(1, 1.0), (3, 0.5)]
    figure = lines({"plain": [plain], "muon": [muon, [(1, 0.2)]]}, "epoch", "loss")
    drawn = curves(figure)
    assert [color(path, "stroke") for path in drawn] == ["c0", "c1", "c1"]
    xs, ys = tick_positions(figure, "x"), tick_positions(figure, "y")
    assert set(xs) == {1, 2, 3}
    y_scale = (ys[0.8] - ys[0.2]) / 0.6
    for path, values in zip(drawn[:2], (plain, muon), strict=True):
        for (x, y), (value_x, value_y) in zip(points(path), values, strict=True):
            assert x == pytest.approx(xs[value_x], abs=0.2)
            # Labels stand a few pixels below the line of their value, all by the same.
            assert y - ys[0.2] == pytest.approx(y_scale * (value_y - 0.2) - 4.2, abs=0.5)


def test_a_logarithmic_axis_has_equal_distances_for_equal_factors():
    figure = lines({"one": [[(1, 1.0), (10, 10.0), (100, 100.0)]]}, "x", "y", log_x=True, log_y=True)
    first, second, third = points(curves(figure)[0])
    assert second[0] - first[0] == pytest.approx(third[0] - second[0], abs=0.05)
    assert second[1] - first[1] == pytest.approx(third[1] - second[1], abs=0.05)
    assert second[1] < first[1]
    assert set(tick_positions(figure, "x")) == set(tick_positions(figure, "y")) == {1, 10, 100}
    lengths = lines({"one": [[(128, 1.0), (512, 2.0), (2048, 4.0)]]}, "x", "y", log_x=True)
    assert set(tick_positions(lengths, "x")) == {128, 512, 2048}  # few values are their own ticks


def test_tick_labels_write_small_and_large_numbers_with_a_power():
    assert [number(x) for x in (0.001, 1e-5, 2e-7, 99999, 1e6, 0, -3, 0.1 + 0.2)] == [
        "0.001", "10⁻⁵", "2·10⁻⁷", "99999", "10⁶", "0", "-3", "0.3",
    ]  # fmt: skip


def test_points_that_cannot_be_shown_are_left_out_and_counted():
    figure = lines({"one": [[(1, 0.0), (2, None), (3, math.nan), (4, 1.0), (5, 10.0)]]}, "x", "y", log_y=True)
    assert len(points(curves(figure)[0])) == 2
    assert "1 not above 0, not shown" in texts(figure)
    figure = lines({"one": [[(1, 0.0), (2, None)]]}, "x", "y")
    assert not [text for text in texts(figure) if "not shown" in text]


@pytest.mark.parametrize("log", [False, True])
def test_charts_without_points_or_with_one_are_drawn(log):
    empty = lines({"plain": [[(1, None)]], "muon": [[]]}, "epoch", "loss", log_x=log, log_y=log)
    assert {"epoch", "loss", "plain", "muon", "no points"} <= set(texts(empty))
    assert titles(empty) == []
    one = lines({"plain": [[(3, 2.0)]]}, "epoch", "loss", log_x=log, log_y=log)
    assert titles(one) == ["epoch 3\nplain: 2"]
    assert "no points" not in texts(one)
    assert texts(bars({}, "x")) == ["x"]
    assert heatmap([], [], [], "r", "c", log=log)
    assert confusion([], [])
    assert pictures([], [])


def test_names_keep_their_colors_and_stand_in_the_legend():
    named = {"other": 1.0, "muon": 2.0, "plain": 3.0, "<b>": 4.0}
    figure = lines({name: [[(1, y), (2, y)]] for name, y in named.items()}, "x", "y")
    assert [color(path, "stroke") for path in curves(figure)] == ["c2", "c1", "c0", "c3"]
    assert [text for text in texts(figure) if text in named] == list(named)
    assert "<b>" not in figure
    eight = lines({f"name {i}": [[(1, 1.0), (2, 1.0)]] for i in range(8)}, "x", "y", legend=False)
    assert {color(path, "stroke") for path in curves(eight)} == {f"c{i}" for i in range(8)}
    assert not [text for text in texts(eight) if text.startswith("name")]
    assert series_colors(["a", "muon"], "curves") == {"a": "c2", "muon": "c1"}


def test_more_than_eight_curves_are_told_apart_by_dashes():
    styles = series_styles([f"name {i}" for i in range(22)] + ["plain", "muon"], "curves")
    assert len(set(map(str, styles.values()))) == 24
    assert (styles["plain"], styles["muon"]) == (("c0", "-"), ("c1", "-"))
    many = lines({str(i): [[(1, 1.0), (2, 1.0)]] for i in range(9)}, "x", "y", legend=False)
    assert len(curves(many)) == 9
    assert len([path for path in curves(many) if "dasharray" in path.get("style")]) == 1
    with pytest.raises(ValueError, match="curves must have at most 24 names"):
        lines({str(i): [[(1, 1.0)]] for i in range(25)}, "x", "y")


def test_names_are_not_read_as_formulas():
    assert "cost in $ of $x^2$" in texts(lines({"one": [[(1, 1.0)]]}, "x", "cost in $ of $x^2$"))


def test_few_points_have_dots_and_all_have_tooltips():
    for count, dots in ((12, 12), (13, 0)):
        figure = lines({"plain": [[(i, i / 2) for i in range(count)]]}, "step", "loss")
        assert len(elements(figure, "path", "curve")) == 1 + dots
        assert "step 3\nplain: 1.5" in titles(figure)
    figure = lines({"plain": [[(i, 1.0) for i in range(1000)]]}, "step", "loss")
    strips = [points(path) for path in elements(figure, "path", "hover")]
    assert 50 <= len(strips) <= 60
    (first, *_, last) = points(curves(figure)[0])
    assert min(x for strip in strips for x, _ in strip) == pytest.approx(first[0], abs=0.5)
    assert max(x for strip in strips for x, _ in strip) == pytest.approx(last[0], abs=0.5)


def test_a_band_has_the_color_of_its_name():
    figure = lines({"muon": [[(0, 5.0), (10, 5.0)]]}, "x", "y", bands={"muon": [(0, 0.0, 10.0), (10, 2.0, 8.0)]})
    (band,) = elements(figure, "path", "band")
    assert color(band) == "c1"
    assert "fill-opacity: 0.18" in band.get("style")
    low, low_end, high_end, high = points(band)[:4]
    assert low[1] > low_end[1] > high_end[1] > high[1]
    middle = points(curves(figure)[0])[0][1]
    assert middle == pytest.approx((low[1] + high[1]) / 2, abs=0.1)


# ---- means


def test_dots_and_whiskers_stand_at_mean_and_deviation():
    groups = {"plain": (70.0, 2.0), "a & b": (80.0, None), "lost": (None, None), "nan": (math.nan, None)}
    figure = bars(groups, "accuracy", paper={"plain": 74.0})
    plain, other = (center(path)[0] for path in elements(figure, "path", "dot"))
    per_unit = (other - plain) / 10
    whiskers = [x for x, _ in points(elements(figure, "path", "whiskers")[0])]
    assert (min(whiskers), max(whiskers)) == pytest.approx((plain - 2 * per_unit, plain + 2 * per_unit), abs=0.2)
    assert center(elements(figure, "path", "paper")[0])[0] == pytest.approx(plain + 4 * per_unit, abs=0.2)
    assert {"70 ± 2", "80", "diverged", "a & b", "◇ paper"} <= set(texts(figure))
    assert "plain: 70 ± 2\npaper: 74" in titles(figure)
    assert "◇ paper" not in texts(bars({"plain": (1.0, None)}, "x"))
    assert "1 ± 0" in texts(bars({"plain": (1.0, 1e-9)}, "x"))  # a rounding error


def test_long_names_stand_above_their_rows_so_that_a_phone_shows_all():
    def name_and_dot(groups):
        figure = bars(groups, "accuracy")
        assert float(re.search(r'viewBox="0 0 ([\d.]+)', figure)[1]) < PHONE_WIDTH
        assert "min-width" not in figure
        bold = [
            element
            for element in elements(figure, "text")
            if "bold" in element.get("style") or "700" in element.get("style")
        ]
        return bold[0], center(elements(figure, "path", "dot")[0])

    name, dot = name_and_dot({"plain": (91.25, 2.25), "momentum + Newton-Schulz": (92.5, 1.5)})
    assert dot[1] - float(name.get("y")) > 10
    name, dot = name_and_dot({"plain": (1.0, None)})
    assert "text-anchor: end" in name.get("style")
    assert abs(dot[1] - float(name.get("y"))) < 6


# ---- cells


def test_a_cell_has_the_color_of_its_share_of_the_range():
    """0 to 10 in 20 steps: 2.5 is step 5. By the logarithm 1 to 100: 10 is the middle, 0 has no color."""
    values = [[0.0, 2.5, 10.0], [None, 5.0, math.nan]]
    figure = heatmap(values, ["a", "b"], ["x", "y", "z"], "r", "c", format="{:.1f}", marks={(1, 1)})
    assert [color(path) for path in elements(figure, "path", "cell")] == ["s0", "s5", "s20", "s10"]
    assert [color(path, "stroke") for path in elements(figure, "path", "none")] == ["none", "none"]
    for text in ("0.0", "10.0"):
        assert texts(figure).count(text) == 2  # in its cell, and on the scale
    assert "r b, c x: no value" in titles(figure)
    assert "r a, c y: 2.5" in titles(figure)
    (mark,) = elements(figure, "path", "mark")
    assert center(mark) == pytest.approx(center(elements(figure, "path", "cell")[3]), abs=0.05)
    assert len(elements(figure, "path", "key")) == 21
    number_of_five = next(element for element in elements(figure, "text") if element.text == "5.0")
    assert color(number_of_five) == "t10"
    logs = heatmap([[1.0, 10.0, 100.0, 0.0]], ["a"], list("wxyz"), "r", "c", log=True, show=False)
    assert [color(path) for path in elements(logs, "path", "cell")] == ["s0", "s10", "s20"]
    assert "10.00" not in texts(logs)
    with pytest.raises(ValueError, match=r"values must have 1 rows of 2 cells, got rows of \[1\]"):
        heatmap([[1.0]], ["a"], ["x", "y"], "r", "c")


def test_limits_titles_and_a_total_row():
    values = [[50.0], [100.0], [75.0]]
    figure = heatmap(values, ["a", "b", "all"], ["x"], "r", "c", limits=(0.0, 100.0), total_row=True, title="Needles")
    cells = elements(figure, "path", "cell")
    assert [color(path) for path in cells] == ["s10", "s20", "s15"]
    first, second, total = (center(path)[1] for path in cells)
    assert total - second > 1.2 * (second - first)
    assert {"Needles", "0.00", "100.00"} <= set(texts(figure))
    told = heatmap([[1.0]], ["a"], ["x"], "r", "c", tooltips=[["3 of <10>"]])
    assert titles(told) == ["3 of <10>"]


def test_numbers_stand_in_cells_only_if_they_fit():
    wide = heatmap([[1.0] * 4], ["a"], list("wxyz"), "r", "c")
    assert texts(wide).count("1.00") == 5
    narrow = heatmap([[1.0] * 30], ["a"], [str(i) for i in range(30)], "r", "c")
    assert texts(narrow).count("1.00") == 1
    assert "min-width:" in narrow  # it scrolls inside its box on a phone, where its names would be too small to read


def test_confusion_has_a_cell_for_every_pair_and_escapes_names():
    figure = confusion([[3, 1], [0, 4]], ["<up>", "down & out"])
    right, wrong = (elements(figure, "path", kind) for kind in ("right", "wrong"))
    assert [color(path) for path in right + wrong] == ["right", "right", "wrong", None]  # a share of 0 is not filled
    shares = [re.search(r"fill-opacity: ([\d.]+)", path.get("style")) for path in right + wrong[:1]]
    assert [1.0 if share is None else float(share[1]) for share in shares] == [0.75, 1.0, 0.25]
    assert "<up> predicted as down & out: 1 of 4" in titles(figure)
    assert [text for text in texts(figure) if text.isdigit()] == ["3", "1", "4"]
    assert texts(figure).count("<up>") == 2


@pytest.mark.full
def test_confusion_of_many_classes_has_no_counts():
    many = confusion([[int(i == j) for j in range(37)] for i in range(37)], [f"class {i}" for i in range(37)])
    assert len(elements(many, "path", "right")) + len(elements(many, "path", "wrong")) == 37 * 37
    assert not [text for text in texts(many) if text.isdigit()]


# ---- matrices


def pixels(image):
    data = image.get("href").removeprefix("data:image/png;base64,")
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")


def test_a_matrix_becomes_pixels():
    """The largest is 4: that is opaque, a quarter of it half so, 0 clear; entries that are not finite are gray."""
    figure = pictures([[[4.0, -4.0, 0.0], [1.0, -1.0, math.inf]], [[2.0]]], ["<S>", "M"], columns=1)
    first, second, color_scale = map(pixels, elements(figure, "image"))
    assert first.size == (3, 2)
    orange, blue, gray = (234, 88, 12), (37, 99, 235), (107, 114, 128)
    found = [first.getpixel((x, y)) for y in range(2) for x in range(3)]
    assert found[:2] == [(*orange, 255), (*blue, 255)]
    assert found[2][3] == 0
    assert found[3:] == [(*orange, 128), (*blue, 128), (*gray, 255)]
    assert second.getpixel((0, 0)) == (*orange, round(255 * math.sqrt(0.5)))  # on the scale of all
    assert [color_scale.getpixel((x, 0))[3] for x in (0, 127, 254)] == [255, 0, 255]
    assert texts(figure) == ["<S>", "M", "-4", "0", "4"]
    boxes = [points(path) for path in elements(figure, "path", "hover")]
    width, height = (max(values) - min(values) for values in zip(*boxes[0], strict=True))
    assert width / height == pytest.approx(1.5, rel=0.01)  # square pixels
    assert titles(figure) == ["<S>\n2 x 3", "M\n1 x 1"]
    assert "pixelated" in elements(figure, "image")[0].get("style")
    assert pixels(elements(pictures([[[0.0]]], ["zero"]), "image")[0]).getpixel((0, 0))[3] == 0


def test_wrong_matrices_are_refused():
    with pytest.raises(ValueError, match="titles must have 1 names"):
        pictures([[[1.0]]], [])
    with pytest.raises(ValueError, match=r"matrices must have rows of one length, got rows of \[1, 2\] in 'S'"):
        pictures([[[1.0], [1.0, 2.0]]], ["S"])
    with pytest.raises(ValueError, match="columns must be"):
        pictures([[[1.0]]], ["S"], columns=0)
