"""The articles of enwik8 as plain English: the pages of the dump without their markup.

    source = open_wikipedia("enwik8.gz")
    for item in source.items():                 # a Document per article; redirects and other pages are Unusable

Templates, tables, references, pictures, and links to categories and other languages are dropped; links keep their text.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from muonssm.checks import is_int

from .corpora import Document, Item, Position, Unusable, check_document
from .enwik8 import read_enwik8

MAX_PAGE = 1_000_000  # characters; the longest of enwik8 has a tenth
NESTED = 4  # links and templates within each other
# No pattern reads past a second beginning of what it looks for, so that the time is linear in the length of a page.
COMMENT = re.compile(r"<!--(?:[^<]|<(?!!--))*+-->")
DROPPED = re.compile(r"<(ref|math|gallery|table|timeline|pre|code|div)\b[^<>]*+>(?:[^<]|<(?!/?\1\b))*+</\1>", re.I)
TEMPLATE = re.compile(r"\{\{[^{}]*+\}\}")
TABLE = re.compile(r"\{\|(?:[^{|]|\|(?!\})|\{(?!\|))*+\|\}")
LINK = re.compile(r"\[\[([^\[\]]*+)\]\]")
ADDRESS = re.compile(r"\[(?:https?|ftp)://[^\s\[\]]*+\s*+([^\[\]]*+)\]|(?:https?|ftp)://\S++")
TAG = re.compile(r"<[^<>]{1,300}>")
HEADING = re.compile(r"^=++ *+([^=\n]++)=++ *+$", re.M)
MARKS = re.compile(r"'{2,}|^[*#:;]+ *|^----+", re.M)
SPECIAL = re.compile(r"[A-Za-z][\w-]*:")  # Image:, Category:, de:
LONG_NUMBER = re.compile(r"&#[0-9]{100,}")  # no character; Python converts no number of thousands of digits


class WikipediaSource:
    """The pages of a dump; a position is the number of the next page."""

    def __init__(self, content: str, metadata: dict[str, Any]) -> None:
        self.pages = content.split("<page>")[1:]
        self.metadata = metadata
        self.total: int | None = len(self.pages)
        self.left_out: list[Unusable] = []
        self._position = 0

    def items(self, position: Position = None) -> Iterator[Item]:
        """Yield all pages, or those from `position` on."""
        start = position or 0
        for number, page in enumerate(islice(self.pages, start, None), start + 1):
            self._position = number
            yield read_page(page, f"page {number}")

    def position(self) -> Position:
        """The number of the next page."""
        return self._position

    def has_position(self, position: Position) -> bool:
        """Whether `items` can begin there."""
        return position is None or (is_int(position, 0) and position <= len(self.pages))


def open_wikipedia(file: str | None, other_file: bool = False) -> WikipediaSource:
    """Open enwik8; `other_file` accepts another dump."""
    if file is None:
        raise ValueError("--from must be the file enwik8 or enwik8.gz for the source 'enwik8-text', got none")
    content, md5 = read_enwik8(Path(file), other_file)
    return WikipediaSource(content.decode("utf-8", errors="replace"), {"bytes": len(content), "md5": md5})


def read_page(page: str, name: str) -> Item:
    """The article on a page, with its title in the first line."""
    title = _unescape(page.partition("<title>")[2].partition("</title>")[0])
    text = page.partition("<text")[2].partition(">")[2].partition("</text>")[0]
    if len(text) > MAX_PAGE:
        return Unusable(name, f"a page of more than {MAX_PAGE} characters")
    if text.lstrip()[:9].upper() == "#REDIRECT":
        return Unusable(name, "a redirect")
    if not title or SPECIAL.match(title) or not text:
        return Unusable(name, "not an article")
    article = plain_text(_unescape(text))
    return check_document(Document(name, f"{title}\n\n{article}\n")) if article else Unusable(name, "not an article")


def plain_text(markup: str) -> str:
    """The text of an article without its markup."""
    text = DROPPED.sub("", COMMENT.sub("", _unescape(markup)))
    for _ in range(NESTED):
        text = LINK.sub(_label, TABLE.sub("", TEMPLATE.sub("", text)))
    text = MARKS.sub("", HEADING.sub(r"\1", TAG.sub("", ADDRESS.sub(r"\1", text))))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n\n".join(line for line in lines if any(map(str.isalnum, line)))


def _unescape(text: str) -> str:
    """Replace references to characters, such as &amp;; numbers that are none become U+FFFD."""
    return html.unescape(LONG_NUMBER.sub("&#0", text))


def _label(link: re.Match[str]) -> str:
    """What a reader sees of a link: its last part; nothing of a picture, a category or another language."""
    target, _, label = link[1].partition("|")
    return "" if SPECIAL.match(target) else label.rpartition("|")[2] or target.lstrip(":")
