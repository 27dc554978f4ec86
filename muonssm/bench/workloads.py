"""The jobs that are timed: inputs of `muon_memory` as a layer would make them, and who can do them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Muon, muon_memory

PEER = "transformers chunked"
"""transformers' `torch_chunk_gated_delta_rule`: no momentum, no normalisation."""


@dataclass(frozen=True)
class MemoryWorkload:
    """Inputs for B sequences of L steps and H heads, float32: unit keys, gates in their usual range."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor

    @classmethod
    def make(cls, B: int, L: int, H: int, d: int, m: int, seed: int = 0) -> MemoryWorkload:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(B, L, H, n, generator=generator) for n in (m, m, d))
        log_alpha, beta = -torch.rand(B, L, H, generator=generator), torch.rand(B, L, H, generator=generator)
        tensors = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, log_alpha, beta)
        return cls(*(x.requires_grad_() for x in tensors))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.log_alpha, self.beta

    def ours(self, impl: str, muon: Muon, eta: float = 1.0) -> Callable[[], Tensor]:
        """Our operator with `impl`, as a function without arguments."""
        return lambda: muon_memory(*self.inputs, eta=eta, muon=muon, impl=impl)[0]

    def transformers_chunked(self) -> Callable[[], Tensor]:
        """The peer on the same inputs; it scales the queries itself."""
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        scale = self.q.shape[-1] ** 0.5
        return lambda: torch_chunk_gated_delta_rule(self.q * scale, self.k, self.v, g=self.log_alpha, beta=self.beta)[0]


def check(name: str, found: Tensor, wanted: Tensor, tolerance: float = 1e-4) -> None:
    """No speed is reported for a wrong result."""
    error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    if not error <= tolerance:
        raise RuntimeError(f"{name} is off by {error:.2e} (it may be {tolerance:g}): no speed is reported")
