"""Weights in the formats that csrc/decode.h reads: float32 as they are, bfloat16 and int8 in tiles.

    float32     a parameter's own memory, [rows, columns]
    bfloat16    [rows / 16, columns / 2, 16, 2]
    int8        [rows / 16, columns / 4, 16, 4], and bfloat16 scales [rows / 16, columns / 32, 16]:
                w = scale q with |q| <= 127, one scale per row and 32 columns

Rows and columns are padded with zeros to whole tiles of 16 and whole blocks of 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.checks import check_choice
from muonssm.ops.decode_steps import BFLOAT16_TILES, BLOCK, FLOAT32_ROWS, INT8_TILES, TILE
from muonssm.ops.launch import empty

FORMATS = {"float32": FLOAT32_ROWS, "bfloat16": BFLOAT16_TILES, "int8": INT8_TILES}
LARGEST = 127
CHUNK = 64 << 20  # bytes
CACHE_LINE = 64
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class PackedMatrix(NamedTuple):
    """A matrix in one of the formats; `scales` are there for int8 alone."""

    format: int
    rows: int
    data: Tensor
    scales: Tensor | None = None

    def bytes(self) -> int:
        """Return the size of the numbers."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scales) if t is not None)


class LargePages:
    """Allocates packed matrices one behind the other in large pages, which memory is read from faster."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor that starts at a whole cache line."""
        size = math.prod(shape) * dtype.itemsize
        skip = -self._left.data_ptr() % CACHE_LINE
        if skip + size > self._left.numel():
            self._left = empty(self._left, (max(size + CACHE_LINE, CHUNK),))
            skip = -self._left.data_ptr() % CACHE_LINE
        result, self._left = self._left[skip : skip + size], self._left[skip + size :]
        return result.view(dtype).view(shape)


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def check_weights(weights: str) -> str:
    """Check the name of a format."""
    return check_choice("weights", weights, tuple(FORMATS))


def pack(weight: Tensor, weights: str, allocate: Allocate = _empty) -> PackedMatrix:
    """Bring a float32 matrix `[rows, columns]` into the format `weights`; `allocate` gives memory for the result."""
    rows, columns = weight.shape
    if weights == "float32":
        return PackedMatrix(FLOAT32_ROWS, rows, weight)
    padded = F.pad(weight.detach(), (0, -columns % BLOCK, 0, -rows % TILE))
    if weights == "bfloat16":
        return PackedMatrix(BFLOAT16_TILES, rows, _tiles(padded.to(torch.bfloat16), 2, allocate))
    blocks = padded.unflatten(1, (-1, BLOCK))
    scales = _block_scales(blocks)
    divisor = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (blocks / divisor[..., None]).round().clamp(-LARGEST, LARGEST).to(torch.int8).flatten(1)
    return PackedMatrix(INT8_TILES, rows, _tiles(numbers, 4, allocate), _tiles(scales, 1, allocate))


def unpack(matrix: PackedMatrix, columns: int) -> Tensor:
    """Return the float32 matrix `[rows, columns]` that a packed one stands for."""
    if matrix.format == FLOAT32_ROWS:
        return matrix.data
    wide = matrix.data.transpose(1, 2).flatten(2).flatten(0, 1).float()
    if matrix.scales is not None:
        scales = matrix.scales.transpose(1, 2).flatten(2).flatten(0, 1).float()
        wide = wide * scales.repeat_interleave(BLOCK, dim=1)
    return wide[: matrix.rows, :columns]


def _tiles(x: Tensor, group: int, allocate: Allocate) -> Tensor:
    """Order `[rows, columns]` as `[rows / 16, columns / group, 16, group]`."""
    tiles = x.unflatten(1, (-1, group)).unflatten(0, (-1, TILE)).transpose(1, 2)
    return allocate(tuple(tiles.shape), tiles.dtype).copy_(tiles)


def _block_scales(blocks: Tensor) -> Tensor:
    """Return the scale of each block `[..., 32]` in bfloat16, rounded up so that no number exceeds 127."""
    exact = blocks.abs().amax(dim=-1) / LARGEST
    scales = exact.to(torch.bfloat16)
    above = (exact * (1 + 2**-7)).to(torch.bfloat16)
    return torch.where(scales.float() < exact, above, scales)
