"""Matrices as small pictures, a pixel for each number.

Below 0 is blue, above 0 orange, and 0 is clear: the page shows through, light or dark. All share one scale, on which
a quarter of the most has half of its strength, so that a few large numbers do not hide the others. The pixels are PNG
images inside the SVG: thousands of them weigh little.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from .colours import rgb
from .frame import frame, text, titled

BELOW, ABOVE, UNKNOWN = "#2563eb", "#ea580c", "#6b7280"  # each is told from a light and from a dark page
LEVELS = 127  # on each side of 0
SIDE, GAP, NAME = 104, 14, 18  # of a picture; between them; of the line above it
SCALE = 34


def pictures(matrices: Sequence[Any], titles: Sequence[str], *, columns: int = 6) -> str:
    """One picture for each matrix, in rows of `columns`.

    Args:
        matrices: lists of rows, arrays or tensors `[rows, columns]`; what is not a number is grey.
        titles: what stands above them.
        columns: how many beside each other.
    """
    if len(matrices) != len(titles):
        raise ValueError(f"titles has {len(titles)} names; it may have {len(matrices)}, one for each matrix")
    if columns < 1:
        raise ValueError(f"columns is {columns}; it may be 1 or more")
    tables = [[[float(value) for value in row] for row in matrix] for matrix in matrices]
    for title, table in zip(titles, tables, strict=True):
        if not table or len({len(row) for row in table}) != 1 or not table[0]:
            raise ValueError(
                f"the matrix {title!r} has rows of {[len(row) for row in table]}; they may be of one length"
            )
    limit = max((abs(x) for table in tables for row in table for x in row if math.isfinite(x)), default=0.0)
    across, parts = min(columns, max(1, len(tables))), []
    heights = _heights(tables, across)
    y = 0.0
    for i, (title, table) in enumerate(zip(titles, tables, strict=True)):
        if i and i % across == 0:
            y += NAME + heights[i // across - 1] + GAP
        parts.append(_picture(2 + (i % across) * (SIDE + GAP), y, title, table, limit))
    bottom = y + NAME + heights[-1] + GAP if heights else 0.0
    parts.append(_scale(2, bottom, limit))
    width = max(2 + across * (SIDE + GAP) - GAP + 2, 200)
    return frame(width, bottom + SCALE, f"matrices: {', '.join(titles)}", parts)


def _heights(tables: Sequence[Any], across: int) -> list[float]:
    """Of each row of pictures."""
    heights = [_size(table)[1] for table in tables]
    return [max(heights[i : i + across]) for i in range(0, len(heights), across)]


def _size(table: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Square pixels, and no longer side than SIDE."""
    rows, columns = len(table), len(table[0])
    return SIDE * min(1.0, columns / rows), SIDE * min(1.0, rows / columns)


def _picture(x: float, y: float, title: str, table: Sequence[Sequence[float]], limit: float) -> str:
    width, height = _size(table)
    place = f'x="{x:.1f}" y="{y + NAME:.1f}" width="{width:.1f}" height="{height:.1f}"'
    uri = "data:image/png;base64," + base64.b64encode(png(table, limit)).decode()
    style = 'preserveAspectRatio="none" style="image-rendering: pixelated"'
    image = f'<image {place} {style} href="{uri}"/><rect class="frame" {place}/>'
    said = [title, f"{len(table)} x {len(table[0])}"]
    return titled(text(x, y + 12, title) + image, said)


def png(table: Sequence[Sequence[float]], limit: float) -> bytes:
    """A PNG file with a palette: entry 128 + n is n of 127 parts of the way from 0 to `limit`, entry 0 no number."""
    palette, opacity = bytearray(rgb(UNKNOWN)), bytearray([255])
    for n in range(-LEVELS, LEVELS + 1):
        palette += bytes(rgb(BELOW if n < 0 else ABOVE))
        opacity.append(round(255 * math.sqrt(abs(n) / LEVELS)))
    pixels = b"".join(b"\0" + bytes(_entry(value, limit) for value in row) for row in table)
    size = struct.pack(">IIBBBBB", len(table[0]), len(table), 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", size),
        (b"PLTE", palette),
        (b"tRNS", opacity),
        (b"IDAT", zlib.compress(pixels, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, bytes(data)) for name, data in chunks)


def _entry(value: float, limit: float) -> int:
    if not math.isfinite(value):
        return 0
    return LEVELS + 1 + round(value / (limit or 1.0) * LEVELS)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _scale(x: float, y: float, limit: float) -> str:
    """From blue over nothing to orange, with its ends."""
    ramp = [[float(i) for i in range(-LEVELS, LEVELS + 1)]]
    uri = "data:image/png;base64," + base64.b64encode(png(ramp, LEVELS)).decode()
    place = f'x="{x:.1f}" y="{y:.1f}" width="140" height="10"'
    bar = f'<image {place} preserveAspectRatio="none" href="{uri}"/><rect class="frame" {place}/>'
    ends = ((x, f"{-limit:.3g}", "start"), (x + 70, "0", "middle"), (x + 140, f"{limit:.3g}", "end"))
    return bar + "".join(text(at, y + 23, said, anchor) for at, said, anchor in ends)
