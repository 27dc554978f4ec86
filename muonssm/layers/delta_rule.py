"""`DeltaRule`: what DeltaNet and Gated DeltaNet share: heads, unit queries and keys, the normalised answer.

q, k, v = silu(conv(in_proj(x)));   q, k unit vectors, q times key_dim^-0.5
S_t = alpha_t S_{t-1} (I - beta_t k_t k_t^T) + M_t,   M_t = gamma_t M_{t-1} + NS(tau beta_t v_t k_t^T)
y = out_proj(RMSNorm(S q) * silu(gate))                 a norm of its own for every head; the gate may be absent
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from muonssm.ops import MemoryState, muon_memory

from .mixer import Call, Mixer, Projected, check_size
from .modules import RMSNorm, ShortConvolution, unit
from .momentum import Momentum


@dataclass(frozen=True)
class Heads:
    """Sizes of the memory: `keys` heads of queries and keys, each read by `values / keys` heads of values."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        check_size("num_heads", self.keys)
        check_size("head_k_dim", self.key_dim)
        check_size("head_v_dim", self.value_dim)
        check_size("num_value_heads", self.values)
        if self.values % self.keys:
            raise ValueError(f"num_value_heads is {self.values}; it may be a multiple of num_heads = {self.keys}")

    @property
    def widths(self) -> list[int]:
        """Of q, k and v, all heads together."""
        return [self.keys * self.key_dim, self.keys * self.key_dim, self.values * self.value_dim]


def head_size(name: str, given: int | None, total: float, num_heads: int) -> int:
    """The size of a head: as given, or its share of `total`, which must then come out even."""
    if given is not None:
        return given
    check_size("num_heads", num_heads)
    if total % num_heads:
        raise ValueError(f"num_heads is {num_heads}; it may be a divisor of {total:g}, or give {name}")
    return int(total) // num_heads


class DeltaRule(Mixer):
    """A mixer on the delta rule; a backbone adds its gates. One projection makes q, k, v and all of `others`."""

    def __init__(
        self, d_model: int, heads: Heads, others: Sequence[int], conv_size: int, momentum: Momentum, bidirectional: bool
    ) -> None:
        super().__init__(d_model, bidirectional)
        self.heads = heads
        self.momentum = momentum
        self.others = list(others)
        self.in_proj = nn.Linear(d_model, sum(heads.widths) + sum(others), bias=False)
        self.conv1d = ShortConvolution(sum(heads.widths), check_size("conv_size", conv_size), bias=False)
        self.norm = RMSNorm(heads.value_dim)
        self.out_proj = nn.Linear(heads.widths[2], d_model, bias=False)

    @abstractmethod
    def log_alpha_and_beta(self, gates: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The gates of the memory `[B, L, value heads]`, in float32."""

    def project(self, x: Tensor) -> Projected:
        channels, *others = self.in_proj(x).split([sum(self.heads.widths), *self.others], dim=-1)
        return self.gated(channels, others)

    @abstractmethod
    def gated(self, channels: Tensor, others: list[Tensor]) -> Projected:
        """`others` sorted into gates of the memory and the gate of the output."""

    def recall(self, channels: Tensor, gates: tuple[Tensor, ...], call: Call) -> tuple[Tensor, MemoryState]:
        heads = self.heads
        q, k, v = channels.split(heads.widths, dim=-1)
        q, k = (t.unflatten(2, (heads.keys, heads.key_dim)) for t in (q, k))
        q, k = unit(q, heads.key_dim**-0.5), unit(k)
        if heads.values > heads.keys:
            q, k = (t.repeat_interleave(heads.values // heads.keys, dim=2) for t in (q, k))
        v = v.unflatten(2, (heads.values, heads.value_dim))
        log_alpha, beta = self.log_alpha_and_beta(gates)
        return muon_memory(q, k, v, log_alpha, beta, **call._asdict())

    def readout(self, y: Tensor, output: Tensor | None) -> Tensor:
        gate = None if output is None else output.unflatten(2, (self.heads.values, self.heads.value_dim))
        return self.out_proj(self.norm(y, gate).flatten(2))
