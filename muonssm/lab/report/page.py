"""The page: its style, and the pieces it is made of, each as text. One file, no scripts, nothing from outside.

It follows the reader's setting for light or dark, fits a phone without moving sideways (what is wide moves inside its
own box), and is black on white on paper, with everything that folds unfolded.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from .svg.colours import DARK, LIGHT, variables
from .svg.frame import READABLE, RULES, RULES_DARK, RULES_LIGHT

LEAST = 300  # pixels of a figure, for its caption
COLUMN = 20  # lines of JSON from which paper has it in columns
STYLE = f"""
:root {{ color-scheme: light dark; {variables(LIGHT)} }}
{RULES}{RULES_LIGHT}
@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables(DARK)} }}
{RULES_DARK}}}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{ margin: 0 auto; max-width: 1180px; padding: 28px 18px 60px; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; }}
h2 {{ font-size: 1.22rem; line-height: 1.3; margin: 38px 0 8px; }} h3 {{ font-size: 1.05rem; margin: 28px 0 6px; }}
h1 + p, h2 + p, h3 + p {{ margin-top: 0; }} p, ul {{ margin: 8px 0; max-width: 46rem; }} ul {{ padding-left: 20px; }}
article + article {{ border-top: 2px solid var(--line); margin-top: 48px; padding-top: 4px; }}
.soft, .soft td {{ color: var(--soft); }} code {{ font-size: 0.92em; }} a {{ color: var(--c2); }}
nav {{ margin: 18px 0 0; padding: 12px 16px; background: var(--card); border-radius: 10px; }}
nav ul {{ list-style: none; margin: 0; padding: 0; max-width: none; display: flex; flex-wrap: wrap; gap: 2px 18px; }}
nav p {{ margin: 8px 0 0; font-weight: 600; }} nav p:first-child {{ margin-top: 0; }}
nav a {{ text-decoration: none; }} nav a:hover {{ text-decoration: underline; }}
blockquote {{ margin: 10px 0; padding: 2px 0 2px 14px; border-left: 3px solid var(--line); color: var(--soft);
  max-width: 46rem; }}
.figures {{ display: flex; flex-wrap: wrap; align-items: flex-start; gap: 16px; margin: 14px 0; }}
figure {{ margin: 0; padding: 14px; background: var(--card); border-radius: 10px; min-width: 0;
  width: min(100%, var(--width)); }}
figcaption {{ font-weight: 600; margin-bottom: 8px; line-height: 1.4; }}
.wide {{ overflow-x: auto; margin: 12px 0; }} figure .wide {{ margin: 0; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
table:has(caption) {{ min-width: min(100%, 30rem); }}
caption {{ text-align: left; font-weight: 600; padding-bottom: 4px; }}
th, td {{ padding: 5px 18px 5px 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }}
th:last-child, td:last-child {{ padding-right: 2px; }}
th:first-child, td:first-child {{ text-align: left; }} th {{ color: var(--soft); font-weight: 600; }}
svg:not(.hm) {{ width: 100%; height: auto; display: block; }} svg.hm {{ height: auto; display: block; }}
.answers :is(td, th) {{ text-align: left; }} .answers td:last-child {{ white-space: normal; overflow-wrap: anywhere; }}
img {{ max-width: 100%; height: auto; display: block; border-radius: 4px; }}
details {{ margin-top: 10px; }} summary {{ cursor: pointer; }}
pre {{ overflow-x: auto; background: var(--card); padding: 12px; border-radius: 10px; font-size: 12.5px;
  margin: 8px 0; }}
footer {{ margin-top: 48px; border-top: 1px solid var(--line); padding-top: 8px; color: var(--soft);
  font-size: 13px; }}
@media (max-width: 640px) {{ th, td {{ padding-right: 10px; }} th, td:first-child {{ white-space: normal; }}
  td:first-child {{ min-width: 7.5em; }} caption {{ max-width: calc(100vw - 36px); }} }}
@page {{ margin: 16mm 14mm; }}
@media print {{
  :root {{ color-scheme: light; --card: #ffffff; --ink: #000000; --soft: #333333; }}
  body {{ max-width: none; padding: 0; font-size: 10.5pt; }}
  figure {{ border: 1px solid var(--line); width: calc(50% - 8px); }} figure.full {{ width: 100%; }}
  figure, tr, blockquote {{ break-inside: avoid; }} h1, h2, h3, caption {{ break-after: avoid; }}
  svg {{ min-width: 0 !important; }} .wide, pre {{ overflow: visible; }}
  pre {{ white-space: pre-wrap; font-size: 8pt; }} pre.long {{ columns: 3; }}
  :is(h1, h2, h3) + p {{ break-after: avoid; }}
  th, td {{ white-space: normal; padding-right: 10px; }} a {{ color: inherit; }}
  details::details-content {{ content-visibility: visible; block-size: auto; display: block; }}
  article + article {{ break-before: page; border: 0; }}
}}
"""


class Section(NamedTuple):
    """A part with a heading: what links call it, the heading, and its HTML."""

    slug: str
    title: str
    body: str


def document(title: str, body: str) -> str:
    """The whole file."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], paper: Sequence[Sequence[str]] = (), caption: str = ""
) -> str:
    """Cells of text; the rows of `paper` stand last, in a softer colour."""
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    heads = "".join(f'<th scope="col">{escape(str(text))}</th>' for text in head)
    lines = [_row(row, "") for row in rows] + [_row(row, ' class="soft"') for row in paper]
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="wide"><table>{named}{body}</table></div>'


def _row(cells: Sequence[str], kind: str) -> str:
    return f"<tr{kind}>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"


def figure(caption: str, picture: str) -> str:
    """A picture of `svg` under its caption; one that is a whole file, with a style of its own, stands as an image."""
    size = re.search(r'viewBox="[\d.-]+ [\d.-]+ ([\d.]+)', picture)
    width = float(size[1]) if size else READABLE
    if picture.startswith("<svg xmlns") and 'class="hm"' not in picture.partition(">")[0]:
        picture = _image("image/svg+xml", picture.encode(), caption)
    return _figure(caption, f'<div class="wide">{picture}</div>', width)


def photo(caption: str, path: Path) -> str:
    """A PNG file as a figure."""
    content = path.read_bytes()
    width = int.from_bytes(content[16:20], "big")  # the first chunk of a PNG file begins with its size
    return _figure(caption, _image("image/png", content, caption), width)


def _figure(caption: str, content: str, width: float) -> str:
    kind = ' class="full"' if width > READABLE else ""
    room = f"--width:{max(width, LEAST) + 28:.0f}px"  # and its padding
    return f'<figure{kind} style="{room}"><figcaption>{escape(caption)}</figcaption>{content}</figure>'


def _image(kind: str, content: bytes, text: str) -> str:
    return f'<img alt="{escape(text)}" src="data:{kind};base64,{base64.b64encode(content).decode()}">'


def figures(all_of_them: Sequence[str]) -> str:
    """Figures beside each other as far as there is room."""
    return f'<div class="figures">{"".join(all_of_them)}</div>' if all_of_them else ""


def paragraph(text: str, kind: str = "") -> str:
    """Text, in which what stands between `...` is code."""
    code = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{code}</p>"


def details(title: str, content: Any) -> str:
    """What unfolds: text as it is, or anything else as JSON."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
    long = ' class="long"' if text.count("\n") > COLUMN and text is not content else ""
    return f"<details><summary>{escape(title)}</summary><pre{long}>{escape(text)}</pre></details>"
