"""Figures as SVG text, drawn by matplotlib with the CSS colors of the page they stand on (light, dark or print).

figures.lines({"plain": [points], "muon": [points]}, "epoch", "loss")        # curves, one or more per name
figures.heatmap(values, ["0.5", "0.9"], ["1", "2"], "gamma", "tau")          # a table as colored cells
figures.bars({"plain": (72.0, 0.6), "muon": (74.1, None)}, "accuracy, %")    # means with standard deviations
figures.pictures([S, M], ["memory", "momentum"])                             # matrices, one pixel per entry
figures.confusion(counts, classes)                                           # a confusion matrix
figures.side_by_side([one, two], "both")                                     # several in one
figures.standalone(figure)                                                   # the same as the text of an .svg file
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from .chart import FONT_SIZE, Chart, css, side_by_side, standalone, with_settings
from .colors import MAX_SERIES, SCALE_STEPS, rgb, series_colors, series_styles

__all__ = ["bars", "confusion", "heatmap", "lines", "pictures", "side_by_side", "standalone"]

LINES_WIDTH, LINES_HEIGHT = 340, 230
MAX_MARKED_POINTS = 12  # curves of up to so many points have a dot at each
MAX_TOOLTIPS = 60  # along the x-axis of a line chart
BAR_ROW, BAR_WIDTH, NAME_ROW, LONGEST_NAME = 28, 250, 18, 96  # pixels; longer names stand above their row
CELL_HEIGHT, MIN_CELL_WIDTH, MAX_CELL_WIDTH, MAX_CELLS_WIDTH = 26, 14, 52, 460
MAX_COUNTED_CLASSES = 12  # confusion matrices of up to so many classes show the counts
PICTURE_SIZE, PICTURE_GAP, PICTURE_TITLE = 104, 14, 18
NEGATIVE, POSITIVE, NOT_FINITE = "#2563eb", "#ea580c", "#6b7280"  # each is visible on a light and on a dark page

Points = Sequence[tuple[float, float | None]]
Visible = Mapping[str, Sequence[Sequence[tuple[float, float]]]]  # curves by name
Band = Sequence[tuple[float, float, float]]
Styles = Mapping[str, tuple[str, Any]]  # color and dash pattern by name


# ---- line charts


@with_settings
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

    There are eight colors. The names after the eighth have the same colors, dashed, then dotted.

    Points whose y is None or not finite are left out, as are points that a logarithmic axis cannot show; the figure
    states the number of the latter.

    Args:
        curves: points `(x, y)` of each curve; at most 24 names.
        x_label, y_label: labels of the axes.
        log_x, log_y: whether an axis is logarithmic.
        bands: `(x, low, high)` by name, drawn as a translucent area in the color of the name.
        legend: whether to draw a legend if there is more than one name.
    """

    def is_visible(x: float, *ys: float) -> bool:
        return not (log_x and x <= 0) and not (log_y and min(ys) <= 0)

    bands = {name: [p for p in band if is_visible(*p)] for name, band in (bands or {}).items()}
    styles = series_styles(list(dict.fromkeys([*curves, *bands])), "curves")
    finite = {name: [_finite(curve) for curve in group] for name, group in curves.items()}
    visible = {name: [[p for p in curve if is_visible(*p)] for curve in group] for name, group in finite.items()}
    chart = Chart(LINES_WIDTH, LINES_HEIGHT, layout="constrained")
    axes = chart.figure.add_subplot()
    axes.grid(axis="y")
    axes.margins(x=0, y=0.05)
    axes.set(xlabel=x_label, ylabel=y_label, xscale="log" if log_x else "linear", yscale="log" if log_y else "linear")
    _draw_bands(chart, axes, bands, styles)
    _draw_curves(chart, axes, visible, styles)
    xs = [x for group in visible.values() for curve in group for x, _ in curve]
    _set_ticks(axes.xaxis, xs)
    _set_ticks(axes.yaxis)
    if legend and len(styles) > 1:
        _draw_legend(chart, styles)
    _add_tooltips(chart, axes, visible, x_label)
    hidden = sum(len(curve) for group in finite.values() for curve in group) - len(xs)
    note = f"{hidden} not above 0, not shown" if hidden else "" if xs or any(bands.values()) else "no points"
    axes.text(1, 1, note, transform=axes.transAxes, ha="right", va="top")
    return chart.svg(f"{y_label} against {x_label}")


def _finite(points: Points) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y)]


def _draw_curves(chart: Chart, axes: Axes, curves: Visible, styles: Styles) -> None:
    for name, group in curves.items():
        color, dash = styles[name]
        for curve in filter(None, group):
            (line,) = axes.plot(*zip(*curve, strict=True), color=css(color), linestyle=dash)
            chart.annotate(line, "curve")
            if len(curve) <= MAX_MARKED_POINTS:
                line.set(marker="o", markersize=6, markeredgecolor=css("card"), markeredgewidth=1)
    if axes.get_yscale() == "linear" and axes.dataLim.y0 >= 0 > axes.get_ylim()[0]:
        axes.set_ylim(bottom=0)  # the margin does not go below 0


def _draw_bands(chart: Chart, axes: Axes, bands: Mapping[str, Band], styles: Styles) -> None:
    for name, band in bands.items():
        outline = [*((x, low) for x, low, _ in band), *((x, high) for x, _, high in reversed(band))]
        if outline:
            (area,) = axes.fill(*zip(*outline, strict=True), fc=(css(styles[name][0]), 0.18), ec="none")
            chart.annotate(area, "band")


def _draw_legend(chart: Chart, styles: Styles) -> None:
    handles = [Line2D([], [], color=css(color), linestyle=dash) for color, dash in styles.values()]
    longest = max(36 + _text_width(name) for name in styles)
    chart.figure.legend(
        handles, list(styles), loc="outside upper left", ncols=max(1, int((LINES_WIDTH - 20) // longest)),
        frameon=False, handlelength=1.5, handletextpad=0.5, columnspacing=1.3, borderpad=0, labelspacing=0.3,
    )  # fmt: skip


def _add_tooltips(chart: Chart, axes: Axes, curves: Visible, x_label: str) -> None:
    """Cover the chart with strips that show the values of the curves at the nearest x."""
    by_x: dict[float, dict[str, list[str]]] = {}
    for name, group in curves.items():
        for curve in group:
            for x, y in curve:
                by_x.setdefault(x, {}).setdefault(name, []).append(f"{y:.4g}")
    xs = sorted(by_x)[:: -(-len(by_x) // MAX_TOOLTIPS) or 1]
    is_log = axes.get_xscale() == "log"
    middles = [math.sqrt(a * b) if is_log else (a + b) / 2 for a, b in pairwise(xs)]
    low, high = axes.get_xlim()
    for x, left, right in zip(xs, [low, *middles], [*middles, high], strict=False):
        text = [f"{x_label} {x:g}", *(f"{name}: {', '.join(values)}" for name, values in by_x[x].items())]
        chart.add_tooltip(axes, left, 0, right, 1, text, axes.get_xaxis_transform())


def _set_ticks(axis: Axis, values: Sequence[float] = ()) -> None:
    """Choose round ticks; a logarithmic axis has them at `values` if those are few and far enough apart."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_locator(NullLocator())
    distinct = sorted(set(values))
    if not axis.axes.has_data() or len(distinct) == 1:
        axis.set_ticks(distinct)
        return
    if axis.get_scale() != "log":
        are_whole = bool(values) and all(float(value).is_integer() for value in values)
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=are_whole))
        return
    low, high = axis.get_view_interval()
    gaps = [math.log(b / a) / math.log(high / low) for a, b in pairwise(distinct)]
    if distinct and len(distinct) <= 7 and min(gaps, default=1.0) >= 0.11:
        axis.set_major_locator(FixedLocator(distinct))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 100 else (1.0,), numticks=7))


def number(value: float) -> str:
    """Format a tick label; small and large numbers are written with a power of ten."""
    value = float(f"{value:.6g}")
    if value <= 0 or 1e-3 <= value < 1e5:
        return f"{value:g}"
    factor, _, power = f"{value:e}".partition("e")
    raised = str(int(power)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if float(factor) == 1 else f"{float(factor):g}·10{raised}"


def _text_width(text: str) -> float:
    """Estimate the width of a line of text in pixels."""
    return 0.62 * FONT_SIZE * len(text)


# ---- means and deviations


@with_settings
def bars(
    groups: Mapping[str, tuple[float | None, float | None]], y_label: str, *, paper: Mapping[str, float] | None = None
) -> str:
    """Draw one row per name: a dot at the mean, whiskers of one standard deviation, and the numbers beside it.

    The marks are dots because the axis need not start at 0. A diamond shows the paper's value.

    Args:
        groups: name to `(mean, standard deviation)`; the mean of diverged runs and the deviation of a single run are
            None.
        y_label: the name of the measured value.
        paper: the paper's values, by name.
    """
    paper = {name: value for name, value in (paper or {}).items() if name in groups}
    colors = series_colors(list(groups), "groups") if len(groups) <= MAX_SERIES else dict.fromkeys(groups, "c2")
    is_long = any(1.1 * _text_width(name) > LONGEST_NAME for name in groups)  # a phone has no room beside such names
    row = BAR_ROW + (NAME_ROW if is_long else 0)
    height = row * max(1, len(groups))
    chart = Chart(BAR_WIDTH, height)
    axes = chart.add_axes(0, 0, BAR_WIDTH, height)
    axes.grid(axis="x")
    axes.margins(x=0.05)
    axes.set(xlabel=y_label, ylim=(height, 0), yticks=[])
    for i, (name, (mean, deviation)) in enumerate(groups.items()):
        y, text = row * (i + 1) - BAR_ROW / 2, _mean_text(mean, deviation)
        if mean is not None and math.isfinite(mean):
            _draw_mean(chart, axes, y, mean, deviation, css(colors[name]))
        if name in paper:
            (diamond,) = axes.plot([paper[name]], [y], "D", ms=7.5, mfc="none", mec=css("ink"), mew=1.4)
            chart.annotate(diamond, "paper")
        _write_beside(axes, 0, row * i + NAME_ROW / 2 + 1 if is_long else y, name, 0 if is_long else -8)
        _write_beside(axes, 1, y, text, 10)
        tooltip = [f"{name}: {text}", *([f"paper: {paper[name]:g}"] if name in paper else [])]
        chart.add_tooltip(axes, 0, row * i, 1, row * (i + 1), tooltip, axes.get_yaxis_transform())
    _set_ticks(axes.xaxis)
    if paper:
        _write_beside(axes, 1, height + 28, "◇ paper", 10)
    return chart.svg(y_label, crop=True)


def _mean_text(mean: float | None, deviation: float | None) -> str:
    if mean is None or not math.isfinite(mean):
        return "diverged"
    if deviation is None:
        return f"{mean:.4g}"
    return f"{mean:.4g} ± {0 if deviation < 1e-6 * abs(mean) else deviation:.2g}"  # a rounding error is no deviation


def _draw_mean(chart: Chart, axes: Axes, y: float, mean: float, deviation: float | None, color: str) -> None:
    if deviation is not None:
        low, high, gap = mean - deviation, mean + deviation, math.nan
        xs, ys = [low, low, gap, low, high, gap, high, high], [y - 5, y + 5, gap, y, y, gap, y - 5, y + 5]
        (whiskers,) = axes.plot(xs, ys, color=color)
        chart.annotate(whiskers, "whiskers")
    (dot,) = axes.plot([mean], [y], "o", ms=10, color=color, mec=css("card"), mew=1)
    chart.annotate(dot, "dot")


def _write_beside(axes: Axes, x: float, y: float, text: str, offset: float) -> None:
    """Write a text at the left (`x` 0, the row's name) or right (`x` 1, its values) end of a row."""
    place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    label = axes.annotate(text, (x, y), (offset, 0), va="center", ha="right" if offset < 0 else "left", **place)  # type: ignore[arg-type]
    if x == 0:
        label.set(color=css("ink"), fontweight="bold")


# ---- tables as colored cells


@with_settings
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
    tops = [i + (0.3 if total_row and i == len(rows) - 1 else 0.0) for i in range(len(rows))]
    bottom, right = (tops[-1] + 1 if tops else 1.0), max(1, len(columns))
    chart = Chart(width * right, CELL_HEIGHT * bottom)
    axes = chart.add_axes(0, 0, width * right, CELL_HEIGHT * bottom)
    axes.set(xlim=(0, right), ylim=(bottom, 0), xlabel=column_label, ylabel=row_label)
    axes.set_title(title, loc="left", fontweight="bold", color=css("ink"))
    axes.set_yticks([top + 0.5 for top in tops], rows)
    _name_columns(axes, columns, width)
    numbers_fit = show and all(_text_width(format.format(x)) + 4 <= width for x in colored)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            text = "no value" if value is None else format.format(value)
            tooltip = f"{row_label} {rows[i]}, {column_label} {columns[j]}: {text}"
            step = None if value is None or not _has_color(value, log) else _scale_step(value, low, high, log)
            cell = _draw_cell(axes, (tops[i], j), width, step, text if numbers_fit else "")
            chart.annotate(cell, "none" if step is None else "cell", tooltips[i][j] if tooltips else tooltip)
    for i, j in sorted(marks):
        chart.annotate(axes.add_patch(_cell((tops[i], j), width, ec=css("c1"), lw=2.5)), "mark")
    _draw_scale(chart, *(format.format(x) if colored or limits else "" for x in (low, high)))
    return chart.svg(f"by {row_label} and {column_label}", crop=True)


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
    shown = range(0, len(columns), 1 if fits else math.ceil(18 / width))
    slanted: dict[str, Any] = {} if fits else {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks([j + 0.5 for j in shown], [columns[j] for j in shown], **slanted)


def _cell(place: tuple[float, int], width: float, fc: str = "none", ec: str = "none", **options: Any) -> Rectangle:
    """Return the rectangle of a cell, one pixel inside its place (top, column)."""
    x, y = 1 / width, 1 / CELL_HEIGHT
    return Rectangle((place[1] + x, place[0] + y), 1 - 2 * x, 1 - 2 * y, fc=fc, ec=ec, **options)


def _draw_cell(axes: Axes, place: tuple[float, int], width: float, step: int | None, text: str) -> Patch:
    if step is None:
        return axes.add_patch(_cell(place, width, ec=css("none"), linestyle=(0, (3, 3))))
    axes.text(place[1] + 0.5, place[0] + 0.5, text, ha="center", va="center_baseline", color=css(f"t{step}"))
    return axes.add_patch(_cell(place, width, fc=css(f"s{step}")))


def _draw_scale(chart: Chart, low: str, high: str) -> None:
    """Draw the color scale to the right of the cells, the lowest value at the bottom."""
    axes = chart.add_axes(chart.width + 18, 0, 12, chart.height)
    axes.set(xlim=(0, 1), ylim=(0, SCALE_STEPS + 1))
    axes.set_axis_off()
    for i in range(SCALE_STEPS + 1):
        chart.annotate(axes.add_patch(Rectangle((0, i), 1, 1.05, fc=css(f"s{i}"), ec="none")), "key")
    labels = [(0.0, "bottom", low), (1.0, "top", high)]
    if chart.height < 2 * FONT_SIZE + 6:  # two labels would overlap
        labels = [(0.5, "center", f"{low} to {high}" if low != high else low)]
    for y, alignment, label in labels:
        axes.text(1.4, y, label, transform=axes.transAxes, ha="left", va=alignment)


@with_settings
def confusion(matrix: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Draw counts by true class (rows) and predicted class (columns), shaded by their share of the row."""
    count = max(1, len(names))
    size = 38 if count <= MAX_COUNTED_CLASSES else 18
    chart = Chart(size * count, size * count)
    axes = chart.add_axes(0, 0, size * count, size * count)
    axes.set(xlim=(0, count), ylim=(count, 0))
    axes.xaxis.tick_top()
    centers = [i + 0.5 for i in range(len(names))]
    axes.set_xticks(centers, names, rotation=40, ha="left", rotation_mode="anchor")
    axes.set_yticks(centers, names)
    side = 1 - 1 / size
    for i, row in enumerate(matrix):
        for j, items in enumerate(row):
            share, css_class = items / max(1, sum(row)), "right" if i == j else "wrong"
            cell = Rectangle((j, i), side, side, fc=(css(css_class), round(share, 3)), ec=css("line"))
            tooltip = f"{names[i]} predicted as {names[j]}: {items} of {sum(row)}"
            chart.annotate(axes.add_patch(cell), css_class, tooltip)
            if items and count <= MAX_COUNTED_CLASSES:
                strong: dict[str, Any] = {"color": css("page"), "fontweight": "bold"}
                look = strong if share > 0.55 else {"color": css("ink")}
                axes.text(j + side / 2, i + side / 2, str(items), ha="center", va="center_baseline", **look)
    return chart.svg("confusion matrix, rows are true classes", crop=True)


# ---- matrices as pictures


@with_settings
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
    chart = Chart(width, tops[-1] + 34)
    for i, (table, title, size) in enumerate(zip(tables, titles, sizes, strict=True)):
        left, top = 2 + (i % columns) * (PICTURE_SIZE + PICTURE_GAP), tops[i // columns]
        axes = _draw_pixels(chart, (left, top + PICTURE_TITLE, *size), table, limit)
        axes.set_title(title, loc="left", pad=5)
        shape = f"{table.shape[0]} x {table.shape[1]}"
        chart.add_tooltip(axes, 0, 0, 1, 1, [title, shape], axes.transAxes)
    axes = _draw_pixels(chart, (2, tops[-1], 140, 10), np.linspace(-1.0, 1.0, 255)[None], 1.0)
    for x, alignment, value in ((0, "left", -limit), (0.5, "center", 0.0), (1, "right", limit)):
        axes.text(x, -0.5, f"{value:.3g}", transform=axes.transAxes, ha=alignment, va="top")
    return chart.svg(f"matrices: {', '.join(titles)}")


def _as_matrix(matrix: Any, title: str) -> np.ndarray:
    rows = [[float(value) for value in row] for row in matrix]
    lengths = [len(row) for row in rows]
    if not rows or len(set(lengths)) != 1 or not lengths[0]:
        raise ValueError(f"matrices must have rows of one length, got rows of {lengths} in {title!r}")
    return np.array(rows)


def _picture_size(table: np.ndarray) -> tuple[float, float]:
    """Return width and height for square pixels, the longer side PICTURE_SIZE."""
    rows, columns = table.shape
    return PICTURE_SIZE * min(1.0, columns / rows), PICTURE_SIZE * min(1.0, rows / columns)


def _draw_pixels(chart: Chart, box: tuple[float, float, float, float], table: np.ndarray, limit: float) -> Axes:
    axes = chart.add_axes(*box)
    axes.imshow(_pixels(table, limit), aspect="auto", interpolation="none")
    axes.set(xticks=[], yticks=[])
    axes.add_patch(Rectangle((0, 0), 1, 1, transform=axes.transAxes, fc="none", ec=css("line")))
    return axes


def _pixels(table: np.ndarray, limit: float) -> np.ndarray:
    """Return the colors [rows, columns, 4] as bytes; the opacity is the square root of the share of `limit`."""
    is_finite = np.isfinite(table)
    values = np.where(is_finite, table, 0.0)
    pixels = np.empty((*table.shape, 4), np.uint8)
    pixels[..., :3] = np.where((values < 0)[..., None], rgb(NEGATIVE), rgb(POSITIVE))
    pixels[..., 3] = np.round(255 * np.sqrt(np.abs(values) / (limit or 1.0)))
    pixels[~is_finite] = (*rgb(NOT_FINITE), 255)
    return pixels
