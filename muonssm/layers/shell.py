"""`Shell`: what Mamba and LongHorn put around their memory.

x, z = in_proj(x);   x = silu(conv(x));   dt, k, q = x_proj(x)
y = out_proj((memory(x, dt, k, q) + D x) * silu(z))
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.ops import MemoryState

from .mixer import Call, Mixer, Projected, check_size
from .modules import ShortConvolution


class Shell(Mixer):
    """A backbone adds `answer`, its memory. Names and shapes are those of Mamba's release."""

    def __init__(
        self,
        d_model: int,
        d_state: int,
        expand: float,
        dt_rank: int | None,
        conv_size: int,
        bias: bool,
        bidirectional: bool,
    ) -> None:
        super().__init__(check_size("d_model", d_model), bidirectional)
        self.d_state = check_size("d_state", d_state)
        self.d_inner = check_size("expand * d_model", round(expand * d_model))
        self.dt_rank = check_size("dt_rank", math.ceil(d_model / 16) if dt_rank is None else dt_rank)
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias)
        self.conv1d = ShortConvolution(self.d_inner, check_size("conv_size", conv_size), bias=True)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False)
        self.D = nn.Parameter(torch.ones(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias)

    @abstractmethod
    def answer(self, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, call: Call) -> tuple[Tensor, MemoryState]:
        """What the memory says to x, `[B, L, d_inner]` both; dt `[B, L, dt_rank]`, k and q `[B, L, d_state]`."""

    def project(self, x: Tensor) -> Projected:
        channels, z = self.in_proj(x).chunk(2, dim=-1)
        return Projected(channels, (), z)

    def recall(self, channels: Tensor, gates: tuple[Tensor, ...], call: Call) -> tuple[Tensor, MemoryState]:
        dt, k, q = self.x_proj(channels).split([self.dt_rank, self.d_state, self.d_state], dim=-1)
        y, state = self.answer(channels, dt, k, q, call)
        return torch.addcmul(y, channels, self.D.to(y.dtype)), state

    def readout(self, y: Tensor, output: Tensor | None) -> Tensor:
        assert output is not None
        return self.out_proj(y * F.silu(output))
