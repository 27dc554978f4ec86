"""`Chart`: a matplotlib figure that becomes SVG text for a page, with CSS colors, CSS classes and tooltips.

The same drawing gives the same text. The text has no ids, so that several charts can stand on one page, no scripts,
no links, and its colors are the CSS variables of `colors`.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .colors import DARK, LIGHT, css_variables

PHONE_WIDTH = 440  # pixels; a wider figure scrolls inside its box on a phone instead of shrinking further
FONT_SIZE = 11
VARIABLES = list(LIGHT)
SVG = "http://www.w3.org/2000/svg"


def css(name: str) -> str:
    """Return the color that stands for a CSS variable: matplotlib knows none, so `Chart.svg` replaces it."""
    return f"#fade{VARIABLES.index(name):02x}"


SETTINGS = {
    "svg.fonttype": "none", "svg.hashsalt": "muonssm", "text.parse_math": False, "path.simplify": False,
    "font.size": FONT_SIZE, "axes.labelsize": FONT_SIZE, "axes.titlesize": FONT_SIZE, "legend.fontsize": FONT_SIZE,
    "xtick.labelsize": FONT_SIZE, "ytick.labelsize": FONT_SIZE, "xtick.major.size": 0, "ytick.major.size": 0,
    "xtick.major.pad": 6, "ytick.major.pad": 6, "text.color": css("soft"), "axes.labelcolor": css("soft"),
    "xtick.labelcolor": css("soft"), "ytick.labelcolor": css("soft"), "grid.color": css("line"), "grid.linewidth": 1,
    "axes.axisbelow": True, "axes.facecolor": "none", "figure.facecolor": "none", "savefig.facecolor": "none",
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.spines.bottom": False,
    "lines.solid_capstyle": "butt", "lines.linewidth": 1.8, "patch.linewidth": 1,
}  # fmt: skip
# Decorator of functions that draw. "default" undoes the user's matplotlibrc: the same data gives the same figure.
with_settings = style.context(["default", SETTINGS])


class Chart:
    """A figure measured in pixels from its top left corner."""

    def __init__(self, width: float, height: float, layout: Any = None) -> None:
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout=layout)
        self._annotations: dict[str, tuple[str, str]] = {}

    def add_axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes at a place of the figure."""
        bottom = self.height - top - height
        return self.figure.add_axes((left / self.width, bottom / self.height, width / self.width, height / self.height))

    def annotate(self, artist: Artist, css_class: str, tooltip: str = "") -> None:
        """Give an artist a CSS class and a tooltip."""
        key = f"annotation-{len(self._annotations)}"
        self._annotations[key] = (css_class, tooltip)
        artist.set_gid(key)

    def add_tooltip(
        self, axes: Axes, left: float, bottom: float, right: float, top: float, lines: Sequence[str], transform: Any
    ) -> None:
        """Add an invisible rectangle that shows lines of text while the pointer is over it."""
        area = Rectangle((left, bottom), right - left, top - bottom, transform=transform, fc="none", ec="none")
        self.annotate(axes.add_patch(area), "hover", "\n".join(lines))

    def svg(self, label: str, crop: bool = False) -> str:
        """Return the SVG text; `crop` fits the size to what was drawn."""
        buffer = io.StringIO()
        options: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 4 / 72} if crop else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph")  # the browser has more fonts than matplotlib
            self.figure.savefig(buffer, format="svg", metadata={"Date": None}, **options)
        drawn = ElementTree.fromstring(buffer.getvalue())
        *_, width, height = (round(float(x), 1) for x in drawn.get("viewBox", "").split())
        root = ElementTree.Element("svg", _root_attributes(width, height, label))
        root.extend(self._simplified(drawn, _markers(drawn)))
        return ElementTree.tostring(root, encoding="unicode")

    def _simplified(self, parent: ElementTree.Element, markers: Mapping[str, str]) -> list[ElementTree.Element]:
        """Return what is drawn below `parent`, in groups only where there is an annotation."""
        elements: list[ElementTree.Element] = []
        for child in parent:
            tag = _local(child.tag)
            if tag == "g":
                inner = self._simplified(child, markers)
                annotation = self._annotations.get(child.get("id", ""))
                elements += [_group(inner, *annotation)] if annotation and inner else inner
            elif tag not in ("metadata", "defs"):
                elements.append(_plain_element(child, tag, markers))
        return elements


def side_by_side(drawn: Sequence[str], label: str) -> str:
    """Put the SVG texts of several charts beside each other in one."""
    if not drawn:
        raise ValueError("drawn must have at least one figure, got none")
    root, left, bottom = ElementTree.Element("svg"), 0.0, 0.0
    for figure in drawn:
        width, height = _size(figure)
        inner = ElementTree.fromstring(figure)
        inner.attrib |= {"x": f"{left:g}", "width": f"{width:g}", "height": f"{height:g}"}
        root.append(inner)
        left, bottom = left + width, max(bottom, height)
    root.attrib |= _root_attributes(left, bottom, label)
    return ElementTree.tostring(root, encoding="unicode")


def standalone(figure: str) -> str:
    """Return a figure as the text of an .svg file, with its own colors for light and dark mode.

    Each element also gets its light color as an attribute, for programs that know no CSS variables. The text of an
    .svg file is returned unchanged.
    """
    if figure.startswith("<svg xmlns="):
        return figure
    width, height = _size(figure)
    root = ElementTree.fromstring(figure)
    names = {"card"}
    for element in root.iter():
        for key, name in re.findall(r"([\w-]+): var\(--(\w+)\)", element.get("style", "")):
            element.set(key, LIGHT[name])
            names.add(name)
    light, dark = (css_variables({name: colors[name] for name in sorted(names)}) for colors in (LIGHT, DARK))
    rules = ElementTree.Element("style")
    rules.text = f"svg {{ {light} background: var(--card); }}\n"
    rules.text += f"@media screen and (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    root.insert(0, rules)
    root.attrib = {"xmlns": SVG, "width": f"{width:g}", "height": f"{height:g}", **root.attrib}
    return ElementTree.tostring(root, encoding="unicode")


def _size(figure: str) -> tuple[float, float]:
    head = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"', figure)
    if head is None:
        raise ValueError(f"figure must be the result of a function of figures.py, got {figure[:40]!r}")
    return float(head[1]), float(head[2])


def _root_attributes(width: float, height: float, label: str) -> dict[str, str]:
    """Return the attributes of <svg>: it shrinks with the page, a wide one only as far as its text is readable."""
    min_width = f"min-width:{0.75 * width:.0f}px;" if width > PHONE_WIDTH else ""
    return {
        "viewBox": f"0 0 {width:g} {height:g}", "style": f"{min_width}max-width:{width:g}px",
        "role": "img", "aria-label": label, "font-family": "system-ui, sans-serif",
        "stroke-linejoin": "round", "pointer-events": "none",
    }  # fmt: skip


def _variable(color: re.Match[str]) -> str:
    """Return what stands for a color of `css`."""
    return f"var(--{VARIABLES[int(color[1], 16)]})"


def _local(name: str) -> str:
    """Remove the XML namespace."""
    return name.rpartition("}")[2]


def _markers(root: ElementTree.Element) -> dict[str, str]:
    """Return the paths that matplotlib defines once and uses at several places, by id."""
    definitions = [element for element in root.iter() if _local(element.tag) == "defs"]
    return {path.get("id", ""): path.get("d", "") for element in definitions for path in element}


def _group(inner: Sequence[ElementTree.Element], css_class: str, tooltip: str) -> ElementTree.Element:
    group = ElementTree.Element("g", {"class": css_class})
    if tooltip:
        group.set("pointer-events", "all")
        ElementTree.SubElement(group, "title").text = tooltip
    group.extend(inner)
    return group


def _plain_element(element: ElementTree.Element, tag: str, markers: Mapping[str, str]) -> ElementTree.Element:
    """Copy an element without its id, clip path and font, with rounded numbers; a used marker becomes a path."""
    attributes = {_local(key): value for key, value in element.items() if key not in ("id", "clip-path")}
    if tag == "use":
        tag, attributes["d"] = "path", markers[attributes.pop("href").removeprefix("#")]
        attributes["transform"] = f"translate({attributes.pop('x')} {attributes.pop('y')})"
    for key in attributes.keys() & {"d", "x", "y", "width", "height", "transform"}:
        text = " ".join(attributes[key].split())
        attributes[key] = re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), 2):g}", text)
    if attributes.get("transform", "").startswith(("rotate(0 ", "rotate(-0 ")):
        del attributes["transform"]
    if "style" in attributes:
        look = re.sub(r"font-family: [^;]*(; |$)", "", attributes["style"])
        attributes["style"] = re.sub(r"#fade([0-9a-f]{2})", _variable, look)
    copied = ElementTree.Element(tag, attributes)
    copied.text = element.text if tag == "text" else None
    return copied
