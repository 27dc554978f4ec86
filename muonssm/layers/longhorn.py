"""LongHorn: the write that solves an online regression in closed form, in Mamba's shell.

    s = sigmoid(dt_head(dt)),   eps = s / (1 + s k.k)              x, dt, k and q as in `shell`
    matrix      S_t = S_{t-1} (I - eps_t k_t k_t^T) + M_t          the paper's table; one eps a head
    diagonal    S_t = (1 - eps_t k_t^2) * S_{t-1} + M_t            the released model; one eps a channel
    M_t = gamma_t M_{t-1} + NS(tau eps_t x_t k_t^T),   y_t = S_t q_t

Both forms have the same parameters, named and shaped as in the release. In the matrix form a head's logit is the mean
of its channels'; with `head_dim=1` every channel has its own again.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan
from muonssm.ops.dtypes import compute_dtype

from .mixer import Call, head_dim_of
from .momentum import Momentum
from .shell import Shell

FORMS = ("matrix", "diagonal")


class LongHorn(Shell):
    """LongHorn's mixer, plain (`Muon.off()`) or with Muon.

    Args:
        d_model: width of x and y.
        d_state: size of keys and queries, which all heads share.
        expand: channels are `expand * d_model`.
        dt_rank: rank of the write gate's projection; `ceil(d_model / 16)` by default.
        conv_size: length of the convolution's filters.
        form: `"matrix"` or `"diagonal"`.
        head_dim: channels a head of the matrix form; by default the largest divisor of the channels up to 64.
        muon, momentum, bidirectional: see `Mixer` and `Momentum`; the diagonal form has one gamma.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        expand: float = 2,
        dt_rank: int | None = None,
        conv_size: int = 4,
        form: str = "matrix",
        head_dim: int | None = None,
        muon: Muon = Muon(),  # noqa: B008  a frozen value
        momentum: str = "fixed",
        bidirectional: bool = False,
    ) -> None:
        if form not in FORMS:
            raise ValueError(f"form is {form!r}; it may be one of {FORMS}")
        super().__init__(d_model, d_state, expand, dt_rank, conv_size, False, bidirectional)
        self.form = form
        self.head_dim = head_dim_of(self.d_inner, head_dim)
        self.heads = self.d_inner // self.head_dim if form == "matrix" else 1
        self.momentum = Momentum(d_model, self.heads, muon, momentum)
        self.dt_head = nn.Linear(self.dt_rank, self.d_inner)

    def answer(self, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, call: Call) -> tuple[Tensor, MemoryState]:
        eps = self.write_gate(dt, k)
        if self.form == "diagonal":
            return muon_selective_scan(x, eps, None, k, q, **call._asdict())
        q, k = (t[:, :, None].expand(-1, -1, self.heads, -1) for t in (q, k))
        v = x.unflatten(2, (self.heads, self.head_dim))
        y, state = muon_memory(q, k, v, torch.zeros_like(eps), eps, **call._asdict())
        return y.flatten(2), state

    def write_gate(self, dt: Tensor, k: Tensor) -> Tensor:
        """eps `[B, L, heads]`, or `[B, L, d_inner]` in the diagonal form, from dt `[B, L, dt_rank]` and the keys."""
        weight: Tensor = self.dt_head.weight
        bias: Tensor = self.dt_head.bias
        if self.form == "matrix":  # the mean of a head's logits, by the mean of their weights
            weight = weight.view(self.heads, self.head_dim, -1).mean(1)
            bias = bias.view(self.heads, self.head_dim).mean(1)
        dtype = compute_dtype(dt)
        s = torch.sigmoid(F.linear(dt, weight).to(dtype) + bias.to(dtype))
        return s / (1 + s * k.to(dtype).square().sum(-1, keepdim=True))
