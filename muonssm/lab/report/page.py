"""One HTML page without scripts or outside files: its pieces, rendered by the templates in templates/ with style.css.

    section = page.Section("scores", "Scores", page.join(page.paragraph("By `seed`:"), page.table(head, rows)))
    text = page.render("A run", [page.Article("A run", "", [section])])

Every piece is escaped `Markup`. In paragraphs, `...` becomes code and **...** becomes bold.
"""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from muonssm.lab.core.untrusted import UntrustedFileError, read_bytes

from .chart import PHONE_WIDTH
from .colors import DARK, LIGHT, css_variables

HERE = Path(__file__).parent
MIN_WIDTH = 300  # pixels of a figure, so that its caption has room
PADDING = 28  # of a figure, both sides
PNG, PNG_HEADER = b"\x89PNG\r\n\x1a\n", 33  # how a PNG file begins; bytes up to the end of its first chunk
MAX_PICTURE = 1 << 26  # bytes of a PNG file
LONG_JSON = 20  # lines; longer JSON is printed in columns


class Section(NamedTuple):
    """A part of the page with a heading: the name that links use, the heading, and its content."""

    slug: str
    title: str
    body: Markup


class Article(NamedTuple):
    """The sections of one experiment; the heading is shown only on a page with several."""

    title: str
    introduction: str
    sections: Sequence[Section]


def render(
    title: str,
    articles: Sequence[Article],
    introduction: str = "",
    navigation: bool = True,
    footer: str = "",
) -> str:
    """Return the page as HTML text; an introduction that is not `Markup` is escaped."""
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            title=title, articles=articles, introduction=introduction, navigation=navigation, footer=footer,
            light_colors=css_variables(LIGHT), dark_colors=css_variables(DARK),
            style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        )
    )  # fmt: skip


def join(*pieces: Markup) -> Markup:
    """Put pieces one after another."""
    return Markup("\n").join(piece for piece in pieces if piece)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which has an s unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def paragraph(text: str, soft: bool = False) -> Markup:
    """A paragraph; `soft` is for remarks."""
    return _piece("paragraph", text, soft)


def bullets(texts: Sequence[str]) -> Markup:
    """A list of sentences; a single one is a paragraph."""
    return _piece("bullets", texts) if len(texts) > 1 else join(*map(paragraph, texts))


def quote(source: str, text: str) -> Markup:
    """A statement of someone else."""
    return _piece("quote", source, text)


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    paper: Sequence[Sequence[Any]] = (),
    caption: str = "",
    is_text: bool = False,
) -> Markup:
    """A table; the rows of `paper` come last in a softer color. `is_text` aligns cells to the left."""
    return _piece("table", head, rows, paper, caption, is_text)


def figure(caption: str, picture: str) -> Markup:
    """A figure of `figures` with its caption; the text of an .svg file, which has its own style, becomes an image."""
    view_box = re.search(r'viewBox="[\d.-]+ [\d.-]+ ([\d.]+)', picture)
    is_file = picture.startswith("<svg xmlns")
    content = _image("image/svg+xml", picture.encode(), caption) if is_file else Markup(picture)
    return _figure(caption, content, float(view_box[1]) if view_box else PHONE_WIDTH, scrolls=True)


def photo(caption: str, path: Path) -> Markup:
    """A PNG file with its caption."""
    content = read_bytes(path, MAX_PICTURE, f"{__name__}.MAX_PICTURE")
    if not content.startswith(PNG) or len(content) < PNG_HEADER:
        raise UntrustedFileError(path, f"must be a PNG file, got one that begins with {content[:8]!r}")
    width = int.from_bytes(content[16:20], "big")  # the first chunk of a PNG file starts with its size
    return _figure(caption, _image("image/png", content, caption), width, scrolls=False)


def figures(figures: Iterable[Markup]) -> Markup:
    """Figures side by side, as many as fit."""
    return _piece("figures", list(figures))


def details(title: str, content: Any) -> Markup:
    """A block that unfolds: text as it is, anything else as JSON."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
    is_long = not isinstance(content, str) and text.count("\n") > LONG_JSON
    return _piece("details", title, text, is_long)


def _figure(caption: str, content: Markup, width: float, scrolls: bool) -> Markup:
    return _piece("figure", caption, content, round(max(width, MIN_WIDTH) + PADDING), width > PHONE_WIDTH, scrolls)


def _image(media_type: str, content: bytes, alt: str) -> Markup:
    return _piece("image", media_type, base64.b64encode(content).decode(), alt)


def _piece(name: str, *arguments: Any) -> Markup:
    return getattr(_environment().get_template("pieces.html.j2").module, name)(*arguments)


def _inline(text: str) -> Markup:
    """Escape a text and apply its marks for code and bold."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", marked))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["inline"] = _inline
    return environment
