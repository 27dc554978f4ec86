"""Figures as SVG text, drawn by matplotlib with the CSS colors of the page they stand on (light, dark or print).

figures.lines({"plain": [points], "muon": [points]}, "epoch", "loss")        # curves, one or more per name
figures.heatmap(values, ["0.5", "0.9"], ["1", "2"], "gamma", "tau")          # a table as colored cells
figures.bars({"plain": (72.0, 0.6), "muon": (74.1, None)}, "accuracy, %")    # means with standard deviations
figures.pictures([S, M], ["memory", "momentum"])                             # matrices, one pixel per entry
figures.confusion(counts, classes)                                           # a confusion matrix
figures.standalone(figure)                                                   # the same as the text of an .svg file

The same data gives the same text. A figure has no ids, so that several can stand on one page, no scripts and no links.
"""

from __future__ import annotations

import io
import math
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from .colors import DARK, LIGHT, MAX_SERIES, SCALE_STEPS, rgb, series_colors

PHONE_WIDTH = 440  # pixels; a wider figure scrolls inside its box on a phone instead of shrinking further
FONT_SIZE = 11
LINES_WIDTH, LINES_HEIGHT = 340, 230
MAX_MARKED_POINTS = 12  # curves of up to so many points have a dot at each
MAX_TOOLTIPS = 60  # along the x-axis of a line chart
BAR_ROW, BAR_WIDTH, LONGEST_NAME = 28, 250, 96  # pixels; longer names stand above their row
CELL_HEIGHT, MIN_CELL_WIDTH, MAX_CELL_WIDTH, MAX_CELLS_WIDTH = 26, 14, 52, 460
PICTURE_SIZE, PICTURE_GAP, PICTURE_TITLE = 104, 14, 18
BELOW, ABOVE, NOT_FINITE = "#2563eb", "#ea580c", "#6b7280"  # each is visible on a light and on a dark page

Points = Sequence[tuple[float, float | None]]
Band = Sequence[tuple[float, float, float]]

# Matplotlib knows no CSS variables: it draws variable number i in the color #fadeNN, which _Chart.svg replaces.
VARIABLES = list(LIGHT)
PLACEHOLDERS = {name: f"#fade{i:02x}" for i, name in enumerate(VARIABLES)}
SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "muonssm", "text.parse_math": False, "font.size": FONT_SIZE,
    "path.simplify": False, "lines.solid_capstyle": "butt",
    "text.color": PLACEHOLDERS["soft"], "axes.labelcolor": PLACEHOLDERS["soft"], "axes.labelsize": FONT_SIZE,
    "xtick.labelcolor": PLACEHOLDERS["soft"], "ytick.labelcolor": PLACEHOLDERS["soft"],
    "xtick.labelsize": FONT_SIZE, "ytick.labelsize": FONT_SIZE, "legend.fontsize": FONT_SIZE,
}  # fmt: skip
# "default" undoes the user's matplotlibrc, so that the same data gives the same figure everywhere.
_with_settings = style.context(["default", SETTINGS])


@_with_settings
def lines(
    curves: Mapping[str, Sequence[Points]],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    bands: Mapping[str, Band] | None = None,
    legend: bool = True,
) -> str:
    """Draw curves by name, one color per name; a name can have several curves (seeds, folds).

    Points whose y is None or not finite are left out, as are points that a logarithmic axis cannot show; the figure
    states the number of the latter.

    Args:
        curves: points `(x, y)` of each curve; at most eight names.
        x_label, y_label: labels of the axes.
        log_x, log_y: whether an axis is logarithmic.
        bands: `(x, low, high)` by name, drawn as a translucent area in the color of the name.
        legend: whether to draw a legend if there is more than one name.
    """
    bands = bands or {}
    colors = series_colors(list(dict.fromkeys([*curves, *bands])), "curves")

    def is_visible(x: float, *ys: float) -> bool:
        return not (log_x and x <= 0) and not (log_y and min(ys) <= 0)

    finite = {name: [_finite(curve) for curve in group] for name, group in curves.items()}
    shown = {name: [[p for p in curve if is_visible(*p)] for curve in group] for name, group in finite.items()}
    areas = {name: [p for p in band if is_visible(*p)] for name, band in bands.items()}
    points = [p for group in shown.values() for curve in group for p in curve]
    corners = [(p[0], y) for band in areas.values() for p in band for y in p[1:]]
    xs, ys = ([p[i] for p in (*points, *corners)] for i in (0, 1))

    chart = _Chart(LINES_WIDTH, LINES_HEIGHT, layout="constrained")
    axes = _style(chart.figure.add_subplot())
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(axis="y", color=PLACEHOLDERS["line"], linewidth=1)
    _scale_axis(axes, "x", xs, log_x, 0.0)
    _scale_axis(axes, "y", ys, log_y, 0.05)
    for name, band in areas.items():
        if band:
            _draw_band(chart, axes, band, colors[name])
    for name, group in shown.items():
        for curve in group:
            _draw_curve(chart, axes, curve, colors[name])
    if legend and len(colors) > 1:
        _draw_legend(chart, colors)
    _add_tooltips(chart, axes, shown, x_label)
    hidden = sum(len(curve) for group in finite.values() for curve in group) - len(points)
    note = "no points" if not xs else f"{hidden} not above 0, not shown" if hidden else ""
    axes.text(1, 1, note, transform=axes.transAxes, ha="right", va="top")
    return chart.svg(f"{y_label} against {x_label}")


@_with_settings
def bars(
    groups: Mapping[str, tuple[float | None, float | None]], y_label: str, *, paper: Mapping[str, float] | None = None
) -> str:
    """Draw one row per name: a dot at the mean, whiskers of one standard deviation, and the numbers beside it.

    The marks are dots because the axis need not start at 0. A diamond shows the paper's value.

    Args:
        groups: name to `(mean, standard deviation)`; the mean of diverged runs is None, the deviation of one run is
            None.
        y_label: the name of the measured value.
        paper: the paper's values, by name.
    """
    paper = {name: value for name, value in (paper or {}).items() if name in groups}
    colors = series_colors(list(groups), "groups") if len(groups) <= MAX_SERIES else dict.fromkeys(groups, "c2")
    above = any(1.1 * _text_width(name) > LONGEST_NAME for name in groups)  # a phone has no room beside long names
    row_height = BAR_ROW + (FONT_SIZE + 7 if above else 0)
    chart = _Chart(BAR_WIDTH, row_height * max(1, len(groups)))
    axes = _style(chart.add_axes(0, 0, BAR_WIDTH, row_height * max(1, len(groups))))
    known = [(mean, deviation or 0.0) for mean, deviation in groups.values() if _is_finite(mean)]
    ends = [mean + sign * deviation for mean, deviation in known for sign in (-1, 1)]  # type: ignore[operator]
    _scale_axis(axes, "x", [*ends, *paper.values()], False, 0.05)
    axes.grid(axis="x", color=PLACEHOLDERS["line"], linewidth=1)
    axes.set(xlabel=y_label, ylim=(max(1, len(groups)) - 0.5, -0.5))
    axes.set_yticks([])
    offset = (FONT_SIZE + 7) / 2 / row_height if above else 0.0
    for i, (name, (mean, deviation)) in enumerate(groups.items()):
        value = _mean_text(mean, deviation)
        if _is_finite(mean):
            _draw_mean(chart, axes, i + offset, mean, deviation, colors[name])  # type: ignore[arg-type]
        if name in paper:
            _draw_diamond(chart, axes, paper[name], i + offset)
        _annotate(axes, 0, i - offset - (0.12 if above else 0), name, 0 if above else -8, strong=True)
        _annotate(axes, 1, i + offset, value, 10)
        tooltip = [f"{name}: {value}", *([f"paper: {paper[name]:g}"] if name in paper else [])]
        chart.tooltip(axes, 0, i - 0.5, 1, 1, tooltip, axes.get_yaxis_transform())
    if paper:
        below = axes.annotate("◇ paper", (1, 0), (10, -32), "axes fraction", "offset points", annotation_clip=False)
        below.set_color(PLACEHOLDERS["ink"])
    return chart.svg(y_label, crop=True)


@_with_settings
def heatmap(
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    row_label: str,
    column_label: str,
    *,
    format: str = "{:.2f}",
    show: bool = True,
    log: bool = False,
    marks: Collection[tuple[int, int]] = (),
    limits: tuple[float, float] | None = None,
    total_row: bool = False,
    title: str = "",
    tooltips: Sequence[Sequence[str]] | None = None,
) -> str:
    """Draw a table of cells, colored from the lowest to the highest value, with the color scale beside it.

    Args:
        values: one list per row; None (no value) is drawn as an empty outline.
        rows, columns: names of the rows and columns.
        row_label, column_label: what the names stand for.
        format: format of a number.
        show: whether to print the numbers in the cells if they fit.
        log: color by the logarithm; values that are not above 0 get no color.
        marks: cells `(row, column)` with a strong outline.
        limits: the values of the lowest and the highest color; None: taken from `values`.
        total_row: whether the last row sums up the others and stands a little apart.
        title: a heading above the cells.
        tooltips: a text for each cell; None: the names of its row and column, and its value.
    """
    if len(values) != len(rows) or any(len(row) != len(columns) for row in values):
        sizes = [len(row) for row in values]
        raise ValueError(f"values must have {len(rows)} rows of {len(columns)} cells, got rows of {sizes} cells")
    colored = [x for row in values for x in row if x is not None and _has_color(x, log)]
    low, high = limits or ((min(colored), max(colored)) if colored else (0.0, 0.0))
    width = max(MIN_CELL_WIDTH, min(MAX_CELL_WIDTH, MAX_CELLS_WIDTH / max(1, len(columns))))
    tops = [float(i) for i in range(len(rows))]
    if total_row and tops:
        tops[-1] += 0.3
    bottom = tops[-1] + 1 if tops else 1.0
    full_width, full_height = width * max(1, len(columns)), CELL_HEIGHT * bottom
    chart = _Chart(full_width, full_height)
    axes = _style(chart.add_axes(0, 0, full_width, full_height))
    axes.set(xlim=(0, max(1, len(columns))), ylim=(bottom, 0), xlabel=column_label, ylabel=row_label)
    axes.set_title(title, loc="left", fontsize=FONT_SIZE + 1, fontweight="bold", color=PLACEHOLDERS["ink"])
    axes.set_yticks([top + 0.5 for top in tops], rows)
    _name_columns(axes, columns, width)
    numbers = show and all(_text_width(format.format(x)) + 4 <= width for x in colored)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            text = "no value" if value is None else format.format(value)
            tooltip = f"{row_label} {rows[i]}, {column_label} {columns[j]}: {text}"
            step = _scale_step(value, low, high, log) if value is not None and _has_color(value, log) else None
            cell = _draw_cell(axes, tops[i], j, width, step, text if numbers else "")
            chart.annotate(cell, "cell" if step is not None else "none", tooltips[i][j] if tooltips else tooltip)
    for i, j in sorted(marks):
        outline = _cell(tops[i], j, width, facecolor="none", edgecolor=PLACEHOLDERS["c1"], linewidth=2.5)
        chart.annotate(axes.add_patch(outline), "mark")
    _draw_scale(
        chart, full_width + 18, full_height, [format.format(x) for x in (low, high)] if colored or limits else ["", ""]
    )
    return chart.svg(f"by {row_label} and {column_label}", crop=True)


@_with_settings
def confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Draw counts by true class (rows) and predicted class (columns), shaded by their share of the row."""
    count, size = len(names), 38 if len(names) <= 12 else 18
    chart = _Chart(size * count, size * count)
    axes = _style(chart.add_axes(0, 0, size * count, size * count))
    axes.set(xlim=(0, count), ylim=(count, 0))
    axes.xaxis.tick_top()
    centers = [i + 0.5 for i in range(count)]
    axes.set_xticks(centers, names, rotation=40, ha="left", rotation_mode="anchor")
    axes.set_yticks(centers, names)
    for i, row in enumerate(matrix):
        total = sum(row)
        for j, cell_count in enumerate(row):
            share = cell_count / max(1, total)
            kind = "right" if i == j else "wrong"
            color = (PLACEHOLDERS[kind], round(share, 3))
            cell = Rectangle((j, i), 1 - 1 / size, 1 - 1 / size, facecolor=color, edgecolor=PLACEHOLDERS["line"])
            tooltip = f"{names[i]} predicted as {names[j]}: {cell_count} of {total}"
            chart.annotate(axes.add_patch(cell), kind, tooltip)
            if cell_count and count <= 12:
                text = axes.text(j + 0.5 - 0.5 / size, i + 0.5, str(cell_count), ha="center", va="center")
                text.set(color=PLACEHOLDERS["page" if share > 0.55 else "ink"])
                text.set(fontweight="bold" if share > 0.55 else "normal")
    return chart.svg("confusion matrix, rows are true classes", crop=True)


@_with_settings
def pictures(matrices: Sequence[Any], titles: Sequence[str], *, columns: int = 6) -> str:
    """Draw each matrix as a small picture, one pixel per entry.

    Negative entries are blue, positive ones orange, and 0 is transparent. All pictures share one scale, on which
    a quarter of the largest entry has half of its opacity, so that a few large entries do not hide the others.

    Args:
        matrices: nested lists, arrays or tensors of shape [rows, columns]; entries that are not finite are gray.
        titles: the text above each picture.
        columns: number of pictures side by side.
    """
    if len(matrices) != len(titles):
        raise ValueError(f"titles must have {len(matrices)} names, one per matrix, got {len(titles)}")
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    tables = [_as_matrix(matrix, title) for matrix, title in zip(matrices, titles, strict=True)]
    limit = max((float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for table in tables), default=0.0)
    columns = min(columns, max(1, len(tables)))
    sizes = [_picture_size(table) for table in tables]
    row_heights = [max(height for _, height in sizes[i : i + columns]) for i in range(0, len(sizes), columns)]
    tops = np.cumsum([0.0, *(PICTURE_TITLE + height + PICTURE_GAP for height in row_heights)])
    width = max(columns * (PICTURE_SIZE + PICTURE_GAP) - PICTURE_GAP, 200) + 4
    chart = _Chart(width, tops[-1] + 34)
    for i, (table, title, size) in enumerate(zip(tables, titles, sizes, strict=True)):
        left, top = 2 + (i % columns) * (PICTURE_SIZE + PICTURE_GAP), tops[i // columns]
        axes = _draw_pixels(chart, (left, top + PICTURE_TITLE, *size), table, limit)
        axes.set_title(title, loc="left", fontsize=FONT_SIZE, pad=5)
        shape = f"{table.shape[0]} x {table.shape[1]}"
        chart.tooltip(axes, 0, 0, 1, 1, [title, shape], axes.transAxes)
    levels = np.linspace(-1.0, 1.0, 255)[None]
    axes = _draw_pixels(chart, (2, tops[-1], 140, 10), levels, 1.0)
    for x, anchor, value in ((0, "left", -limit), (0.5, "center", 0.0), (1, "right", limit)):
        axes.text(x, -0.5, f"{value:.3g}", transform=axes.transAxes, ha=anchor, va="top")
    return chart.svg(f"matrices: {', '.join(titles)}")


def side_by_side(drawn: Sequence[str], label: str) -> str:
    """Put figures beside each other in one."""
    sizes = [_size(figure) for figure in drawn]
    width, height = sum(size[0] for size in sizes), max((size[1] for size in sizes), default=0.0)
    lefts = [sum(size[0] for size in sizes[:i]) for i in range(len(sizes))]
    inner = [
        figure.replace("<svg ", f'<svg x="{left:g}" width="{size[0]:g}" height="{size[1]:g}" ', 1)
        for figure, left, size in zip(drawn, lefts, sizes, strict=True)
    ]
    root = ElementTree.Element("svg", _root_attributes(width, height, label))
    root.extend(ElementTree.fromstring(figure) for figure in inner)
    return ElementTree.tostring(root, encoding="unicode")


def standalone(figure: str) -> str:
    """Return a figure as the text of an .svg file, with its own colors for light and dark mode.

    Colors are written as values, since many programs know no CSS variables; those show the light ones. The text of
    such a file is returned unchanged.
    """
    if re.match(r"<svg xmlns=", figure):
        return figure
    width, height = _size(figure)
    rules: set[str] = set()

    def with_classes(match: re.Match[str]) -> str:
        used = re.findall(r"([\w-]+): var\(--(\w+)\)", match[1])
        rules.update(f".{key}-{name} {{ {key}: {DARK[name]} !important; }}\n" for key, name in used)
        light = re.sub(r"var\(--(\w+)\)", lambda variable: LIGHT[variable[1]], match[1])
        return f'data-colors="{" ".join(f"{key}-{name}" for key, name in used)}" style="{light}"'

    body = re.sub(r'style="([^"]*var\([^"]*)"', with_classes, figure[len("<svg") :])
    body = re.sub(r'class="([^"]*)" data-colors="([^"]*)"', r'class="\1 \2"', body).replace("data-colors=", "class=")
    body = body.replace("<", f"<style>{_file_style(rules)}</style><", 1) if "<" in body else body
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"{body}'


def _size(figure: str) -> tuple[float, float]:
    head = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"', figure)
    if head is None:
        raise ValueError(f"figure must be the result of a function of this module, got {figure[:40]!r}")
    return float(head[1]), float(head[2])


def _root_attributes(width: float, height: float, label: str) -> dict[str, str]:
    """Return the attributes of <svg>: it shrinks with the page, a wide one only as far as its text is readable."""
    min_width = f"min-width:{0.75 * width:.0f}px;" if width > PHONE_WIDTH else ""
    return {
        "viewBox": f"0 0 {width:g} {height:g}",
        "style": f"{min_width}max-width:{width:g}px",
        "role": "img",
        "aria-label": label,
        "font-family": "system-ui, sans-serif",
        "stroke-linejoin": "round",
        "pointer-events": "none",
    }


def _file_style(rules: Collection[str]) -> str:
    dark = f"svg {{ background: {DARK['card']}; }}\n{''.join(sorted(rules))}"
    return f"svg {{ background: {LIGHT['card']}; }}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n"


class _Chart:
    """A matplotlib figure measured in pixels from its top left, whose artists can have a CSS class and a tooltip."""

    def __init__(self, width: float, height: float, layout: Any = None) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout=layout)
        self.figure.patch.set_visible(False)
        self.annotations: dict[str, tuple[str, str]] = {}

    def add_axes(self, left: float, top: float, width: float, height: float) -> Axes:
        bottom = self.height - top - height
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def annotate(self, artist: Artist, kind: str, tooltip: str = "") -> None:
        """Give an artist a CSS class and a tooltip."""
        key = f"annotation-{len(self.annotations)}"
        self.annotations[key] = (kind, tooltip)
        artist.set_gid(key)

    def tooltip(
        self, axes: Axes, left: float, bottom: float, width: float, height: float, text: Sequence[str], transform: Any
    ) -> None:
        """Add an invisible rectangle that shows a text when the pointer is over it."""
        area = Rectangle((left, bottom), width, height, transform=transform, facecolor="none", edgecolor="none")
        self.annotate(axes.add_patch(area), "hover", "\n".join(text))

    def svg(self, label: str, crop: bool = False) -> str:
        """Return the SVG text; `crop` fits the size to what was drawn."""
        buffer = io.StringIO()
        options: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 4 / 72} if crop else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the browser has other fonts than matplotlib
            self.figure.savefig(buffer, format="svg", metadata={"Date": None}, **options)
        drawn = ElementTree.fromstring(buffer.getvalue())
        *_, width, height = (round(float(x), 1) for x in drawn.get("viewBox", "").split())
        root = ElementTree.Element("svg", _root_attributes(width, height, label))
        root.extend(self._simplified(drawn, _shared_paths(drawn)))
        text = ElementTree.tostring(root, encoding="unicode")
        return re.sub(r"#fade([0-9a-f]{2})", lambda color: f"var(--{VARIABLES[int(color[1], 16)]})", text)

    def _simplified(self, parent: ElementTree.Element, shared: Mapping[str, str]) -> list[ElementTree.Element]:
        """Return the drawn elements below `parent` without ids, clip paths, metadata and groups of no meaning."""
        elements: list[ElementTree.Element] = []
        for child in parent:
            tag = _local(child.tag)
            if tag in ("metadata", "defs"):
                continue
            if tag != "g":
                elements.append(_plain_element(child, tag, shared))
                continue
            inner = self._simplified(child, shared)
            kind, tooltip = self.annotations.get(child.get("id", ""), ("", ""))
            if kind and inner:
                group = ElementTree.Element("g", {"class": kind, **({"pointer-events": "all"} if tooltip else {})})
                if tooltip:
                    ElementTree.SubElement(group, "title").text = tooltip
                group.extend(inner)
                elements.append(group)
            else:
                elements += inner
        return elements


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _shared_paths(root: ElementTree.Element) -> dict[str, str]:
    """Return the markers that matplotlib defines once, by id."""
    return {
        path.get("id", ""): path.get("d", "")
        for definitions in root.iter()
        if _local(definitions.tag) == "defs"
        for path in definitions
        if _local(path.tag) == "path"
    }


def _plain_element(element: ElementTree.Element, tag: str, shared: Mapping[str, str]) -> ElementTree.Element:
    """Copy an element without ids and clip paths, numbers rounded; a use of a shared marker becomes a path."""
    attributes = {_local(key): value for key, value in element.items() if key not in ("id", "clip-path")}
    if tag == "use":
        tag, attributes["d"] = "path", shared[attributes.pop("href").removeprefix("#")]
        attributes["transform"] = f"translate({attributes.pop('x')} {attributes.pop('y')})"
    for key in attributes.keys() & {"d", "x", "y", "width", "height", "transform"}:
        attributes[key] = _rounded(" ".join(attributes[key].split()))
    if attributes.get("transform", "").startswith(("rotate(0 ", "rotate(-0 ")):
        del attributes["transform"]
    if "style" in attributes:
        attributes["style"] = re.sub(r"font-family: [^;]*(; |$)", "", attributes["style"])
    copied = ElementTree.Element(tag, attributes)
    copied.text = element.text if tag == "text" else None
    return copied


def _rounded(text: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), 2):g}", text)


def _style(axes: Axes) -> Axes:
    """Remove the frame, the background and the tick marks."""
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=6)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def _text_width(text: str) -> float:
    """Estimate the width of a line of text in pixels."""
    return 0.62 * FONT_SIZE * len(text)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y)]


# axes


def _scale_axis(axes: Axes, which: str, values: Sequence[float], log: bool, margin: float) -> None:
    """Set the scale, limits and ticks of an axis that shows `values`, with a relative margin beyond them."""
    axis: Axis = getattr(axes, f"{which}axis")
    low, high = _limits(values, log, margin)
    axes.set(**{f"{which}scale": "log" if log else "linear"})
    axes.set(**{f"{which}lim": (low, high)})
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())
    if not log:
        whole = bool(values) and which == "x" and all(float(value).is_integer() for value in values)
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole))
        return
    distinct = sorted(set(values))
    gaps = [math.log(b / a) / math.log(high / low) for a, b in pairwise(distinct)]
    if which == "x" and 0 < len(distinct) <= 7 and min(gaps, default=1.0) >= 0.11:
        axis.set_major_locator(FixedLocator(distinct))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=7))


def _limits(values: Sequence[float], log: bool, margin: float) -> tuple[float, float]:
    if not values:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(values), max(values)
    if log:
        factor = 10 ** (margin * (math.log10(high / low) or 1.0))
        return (low / factor, high * factor) if high * factor > low / factor else (low / 2, high * 2)
    room = (high - low or abs(high) or 1.0) * margin
    if high == low and not margin:
        return low - 0.5, high + 0.5
    return (low - room if low < 0 or low > room else 0.0), high + room


def number(value: float) -> str:
    """Format a tick label; small and large powers of ten are written as such."""
    value = float(f"{value:.6g}")
    if value <= 0 or 1e-3 <= value < 1e5:
        return f"{value:g}"
    factor, _, power = f"{value:e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if float(factor) == 1 else f"{float(factor):g}·10{raised}"


# lines


def _draw_curve(chart: _Chart, axes: Axes, points: Sequence[tuple[float, float]], color: str) -> None:
    if not points:
        return
    (line,) = axes.plot(*zip(*points, strict=True), color=PLACEHOLDERS[color], linewidth=1.8)
    chart.annotate(line, "curve")
    if len(points) <= MAX_MARKED_POINTS:
        line.set(marker="o", markersize=6, markeredgecolor=PLACEHOLDERS["card"], markeredgewidth=1)


def _draw_band(chart: _Chart, axes: Axes, band: Band, color: str) -> None:
    outline = [*((x, low) for x, low, _ in band), *((x, high) for x, _, high in reversed(band))]
    (area,) = axes.fill(*zip(*outline, strict=True), facecolor=(PLACEHOLDERS[color], 0.18), edgecolor="none")
    chart.annotate(area, "band")


def _draw_legend(chart: _Chart, colors: Mapping[str, str]) -> None:
    handles = [Line2D([], [], color=PLACEHOLDERS[color], linewidth=1.8) for color in colors.values()]
    longest = max(36 + _text_width(name) for name in colors)
    chart.figure.legend(
        handles, list(colors), loc="outside upper left", ncols=max(1, int((LINES_WIDTH - 20) // longest)),
        frameon=False, handlelength=1.5, handletextpad=0.5, columnspacing=1.3, borderpad=0, labelspacing=0.3,
    )  # fmt: skip


def _add_tooltips(
    chart: _Chart, axes: Axes, curves: Mapping[str, Sequence[Sequence[tuple[float, float]]]], x_label: str
) -> None:
    """Cover the chart with strips that show the values of the curves at the nearest x."""
    by_x: dict[float, dict[str, list[str]]] = {}
    for name, group in curves.items():
        for curve in group:
            for x, y in curve:
                by_x.setdefault(x, {}).setdefault(name, []).append(f"{y:.4g}")
    every = -(-len(by_x) // MAX_TOOLTIPS) or 1
    xs = sorted(by_x)[::every]
    log = axes.get_xscale() == "log"
    middles = [math.sqrt(a * b) if log else (a + b) / 2 for a, b in pairwise(xs)]
    low, high = axes.get_xlim()
    for x, (left, right) in zip(xs, pairwise([low, *middles, high]), strict=True) if xs else ():
        text = [f"{x_label} {x:g}", *(f"{name}: {', '.join(values)}" for name, values in by_x[x].items())]
        chart.tooltip(axes, left, 0, right - left, 1, text, axes.get_xaxis_transform())


# bars


def _mean_text(mean: float | None, deviation: float | None) -> str:
    if not _is_finite(mean):
        return "diverged"
    if deviation is None:
        return f"{mean:.4g}"
    return f"{mean:.4g} ± {0 if deviation < 1e-6 * abs(mean or 0.0) else deviation:.2g}"  # rounding is no deviation


def _draw_mean(chart: _Chart, axes: Axes, y: float, mean: float, deviation: float | None, color: str) -> None:
    if deviation is not None:
        low, high = mean - deviation, mean + deviation
        cap = 5 / BAR_ROW
        xs, ys = [low, low, math.nan, low, high, math.nan, high, high], [y - cap, y + cap, math.nan, y, y, math.nan]
        (whiskers,) = axes.plot(xs, [*ys, y - cap, y + cap], color=PLACEHOLDERS[color], linewidth=1.8)
        chart.annotate(whiskers, "whiskers")
    (dot,) = axes.plot([mean], [y], "o", color=PLACEHOLDERS[color], markersize=10)
    dot.set(markeredgecolor=PLACEHOLDERS["card"], markeredgewidth=1)
    chart.annotate(dot, "dot")


def _draw_diamond(chart: _Chart, axes: Axes, x: float, y: float) -> None:
    (diamond,) = axes.plot([x], [y], "D", markersize=7.5, markerfacecolor="none")
    diamond.set(markeredgecolor=PLACEHOLDERS["ink"], markeredgewidth=1.4)
    chart.annotate(diamond, "paper")


def _annotate(axes: Axes, x: float, y: float, text: str, offset: float, strong: bool = False) -> None:
    """Write a text beside the row at `y`; a negative offset places it to the left of `x`."""
    side = "right" if offset < 0 else "left"
    label = axes.annotate(text, (x, y), (offset, 0), axes.get_yaxis_transform(), "offset points", ha=side, va="center")
    if strong:
        label.set(color=PLACEHOLDERS["ink"], fontweight="bold")


# heatmap


def _has_color(value: float, log: bool) -> bool:
    return math.isfinite(value) and not (log and value <= 0)


def _scale_step(value: float, low: float, high: float, log: bool) -> int:
    """Return the color: 0 for the lowest value to SCALE_STEPS for the highest; the middle if all are equal."""
    if low == high:
        return SCALE_STEPS // 2
    low, high, value = (math.log(x) if log else x for x in (low, high, value))
    return min(max(round((value - low) / (high - low) * SCALE_STEPS), 0), SCALE_STEPS)


def _name_columns(axes: Axes, columns: Sequence[str], width: float) -> None:
    """Write the names below the cells: slanted if they are long, and not all of them if they would overlap."""
    fits = max(map(_text_width, columns), default=0) + 4 <= width
    every = 1 if fits else math.ceil(18 / width)
    shown = range(0, len(columns), every)
    slanted: dict[str, Any] = {} if fits else {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks([j + 0.5 for j in shown], [columns[j] for j in shown], **slanted)


def _cell(top: float, column: int, width: float, **options: Any) -> Rectangle:
    """Return the rectangle of a cell, one pixel inside its place."""
    x, y = 1 / width, 1 / CELL_HEIGHT
    return Rectangle((column + x, top + y), 1 - 2 * x, 1 - 2 * y, **options)


def _draw_cell(axes: Axes, top: float, column: int, width: float, step: int | None, text: str) -> Rectangle:
    if step is None:
        outline = {"facecolor": "none", "edgecolor": PLACEHOLDERS["none"], "linestyle": (0, (3, 3))}
        return axes.add_patch(_cell(top, column, width, **outline))
    axes.text(column + 0.5, top + 0.5, text, ha="center", va="center_baseline", color=PLACEHOLDERS[f"t{step}"])
    return axes.add_patch(_cell(top, column, width, facecolor=PLACEHOLDERS[f"s{step}"], edgecolor="none"))


def _draw_scale(chart: _Chart, left: float, height: float, ends: Sequence[str]) -> None:
    """Draw the color scale, the lowest value at the bottom."""
    axes = _style(chart.add_axes(left, 0, 12, max(height, 1)))
    axes.set(xlim=(0, 1), ylim=(0, SCALE_STEPS + 1))
    axes.set_axis_off()
    for i in range(SCALE_STEPS + 1):
        step = Rectangle((0, i), 1, 1.05, facecolor=PLACEHOLDERS[f"s{i}"], edgecolor="none")
        chart.annotate(axes.add_patch(step), "key")
    low, high = ends
    if height < 2 * FONT_SIZE + 2:  # two labels would overlap
        place, text = ((0.5, "center"),), (f"{low} to {high}" if high != low else low,)
        labels: Sequence[tuple[tuple[float, str], str]] = list(zip(place, text, strict=True))
    else:
        labels = [((0, "bottom"), low), ((1, "top"), high)]
    for (y, alignment), label in labels:
        axes.text(1.4, y, label, transform=axes.transAxes, ha="left", va=alignment)


# pictures


def _as_matrix(matrix: Any, title: str) -> np.ndarray:
    rows = [[float(value) for value in row] for row in matrix]
    lengths = [len(row) for row in rows]
    if not rows or len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"the matrix {title!r} must have rows of one length, got rows of {lengths}")
    return np.array(rows)


def _picture_size(table: np.ndarray) -> tuple[float, float]:
    """Return width and height for square pixels, the longer side PICTURE_SIZE."""
    rows, columns = table.shape
    return PICTURE_SIZE * min(1.0, columns / rows), PICTURE_SIZE * min(1.0, rows / columns)


def _draw_pixels(chart: _Chart, box: tuple[float, float, float, float], table: np.ndarray, limit: float) -> Axes:
    axes = _style(chart.add_axes(*box))
    axes.imshow(_pixels(table, limit), aspect="auto", interpolation="none")
    axes.set(xticks=[], yticks=[])
    frame = Rectangle((0, 0), 1, 1, transform=axes.transAxes, facecolor="none", edgecolor=PLACEHOLDERS["line"])
    axes.add_patch(frame)
    return axes


def _pixels(table: np.ndarray, limit: float) -> np.ndarray:
    """Return the colors [rows, columns, 4] as bytes; opacity is the square root of the share of `limit`."""
    pixels = np.empty((*table.shape, 4), np.uint8)
    finite = np.isfinite(table)
    values = np.where(finite, table, 0.0)
    pixels[..., :3] = np.where((values < 0)[..., None], rgb(BELOW), rgb(ABOVE))
    pixels[..., 3] = np.round(255 * np.sqrt(np.abs(values) / (limit or 1.0)))
    pixels[~finite] = (*rgb(NOT_FINITE), 255)
    return pixels
