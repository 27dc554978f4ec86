"""The jobs that are timed: inputs as a layer would make them, our implementations, and the peers on the same inputs.

Peers come from installed packages. A contender's output is compared with a float64 reference of what it computes before
it is timed: `muon` with momentum and normalisation, `plain` without, `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan

TOLERANCE = 1e-4  # relative RMS to float64 that a contender may be off


@dataclass(frozen=True)
class Contender:
    """Somebody who does the job, and what its output is to be compared with."""

    name: str
    run: Callable[[], Tensor]
    computes: str = "muon"


@dataclass(frozen=True)
class MemoryWorkload:
    """B sequences of L steps, H heads, float32: unit queries and keys, gates in their usual range."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_alpha: Tensor
    beta: Tensor

    @classmethod
    def make(cls, B: int, L: int, H: int, d: int, m: int, gradients: bool = True) -> MemoryWorkload:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(B, L, H, n, generator=generator) for n in (m, m, d))
        log_alpha, beta = -torch.rand(B, L, H, generator=generator), torch.rand(B, L, H, generator=generator)
        tensors = (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, log_alpha, beta)
        return cls(*(x.requires_grad_(gradients) for x in tensors))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.log_alpha, self.beta

    def ours(self, impl: str, muon: Muon, eta: float = 1.0) -> Callable[[], Tensor]:
        """Our operator with `impl`, as a function without arguments."""
        return lambda: muon_memory(*self.inputs, eta=eta, muon=muon, impl=impl)[0]

    def contender(self, impl: str) -> Contender:
        return Contender(impl, self.ours(impl, Muon()))

    def plain(self, impl: str) -> Contender:
        return Contender(f"{impl}, plain", self.ours(impl, Muon.off()), "plain")

    def gated_delta_rule(self, kind: str) -> Contender:
        """transformers' `torch_{chunk,recurrent}_gated_delta_rule`: no momentum, no normalisation. Scales q itself."""
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

        rule = getattr(qwen3_next, f"torch_{kind}_gated_delta_rule")
        scale = self.q.shape[-1] ** 0.5
        return Contender(
            f"transformers {kind}",
            lambda: rule(self.q * scale, self.k, self.v, g=self.log_alpha, beta=self.beta, initial_state=None,
                         output_final_state=True)[0],
            "plain",
        )  # fmt: skip

    def attention(self) -> Contender:
        """torch's causal `scaled_dot_product_attention`."""

        def run() -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return Contender("causal attention", run, "attention")

    def wanted(self, computes: str) -> Tensor:
        """The float64 truth for `computes`."""
        wide = [x.detach().double() for x in self.inputs]
        if computes == "attention":
            q, k, v = (x.transpose(1, 2) for x in wide[:3])
            later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            weight = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf).softmax(-1)
            return (weight @ v).transpose(1, 2)
        return muon_memory(*wide, muon=Muon() if computes == "muon" else Muon.off(), impl="reference")[0]


@dataclass(frozen=True)
class SelectiveWorkload:
    """B sequences of L steps, D channels, N states, float32, as in Mamba."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor

    @classmethod
    def make(cls, B: int, L: int, D: int, N: int) -> SelectiveWorkload:
        generator = torch.Generator().manual_seed(0)
        x, dt = torch.randn(B, L, D, generator=generator), 0.1 * torch.rand(B, L, D, generator=generator)
        A = -torch.arange(1.0, N + 1).expand(D, N).contiguous()
        tensors = (x, dt, A, *torch.randn(2, B, L, N, generator=generator))
        return cls(*(t.clone().requires_grad_() for t in tensors))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, self.dt, self.A, self.B, self.C

    def contender(self, impl: str) -> Contender:
        return Contender(impl, lambda: muon_selective_scan(*self.inputs, impl=impl)[0])

    def plain(self, impl: str) -> Contender:
        run = lambda: muon_selective_scan(*self.inputs, muon=Muon.off(), impl=impl)[0]  # noqa: E731
        return Contender(f"{impl}, plain", run, "plain")

    def mambapy(self) -> Contender:
        """mambapy's `pscan`, as transformers' Mamba calls it with `use_mambapy=True`: no momentum."""
        from mambapy.pscan import pscan

        def run() -> Tensor:
            gate = torch.exp(self.dt[..., None] * self.A)
            states = pscan(gate, self.dt[..., None] * self.B[:, :, None, :] * self.x[..., None])
            return (states @ self.C[..., None]).squeeze(-1)

        return Contender("mambapy pscan", run, "plain")

    def wanted(self, computes: str) -> Tensor:
        """The float64 truth for `computes`."""
        wide = [t.detach().double() for t in self.inputs]
        return muon_selective_scan(*wide, muon=Muon() if computes == "muon" else Muon.off(), impl="reference")[0]


@dataclass(frozen=True)
class DecodeWorkload:
    """One step of B sequences from a state, without gradients."""

    step: MemoryWorkload
    state: MemoryState

    @classmethod
    def make(cls, B: int, H: int, d: int, m: int) -> DecodeWorkload:
        state = MemoryState(*torch.randn(2, B, H, d, m, generator=torch.Generator().manual_seed(1)))
        return cls(MemoryWorkload.make(B, 1, H, d, m, gradients=False), state)

    def contender(self, impl: str) -> Contender:
        muon = Muon()
        return Contender(impl, lambda: muon_memory(*self.step.inputs, muon=muon, state=self.state, impl=impl)[0])

    def transformers(self) -> Contender:
        """transformers' `torch_recurrent_gated_delta_rule` on one token."""
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as rule

        w, S = self.step, self.state.S.mT.contiguous()
        q = w.q * w.q.shape[-1] ** 0.5
        return Contender(
            "transformers recurrent",
            lambda: rule(q, w.k, w.v, g=w.log_alpha, beta=w.beta, initial_state=S, output_final_state=True)[0],
            "plain",
        )

    def wanted(self, computes: str) -> Tensor:
        """The float64 truth for `computes`."""
        wide = [x.double() for x in self.step.inputs]
        state = MemoryState(*(x.double() for x in self.state))
        muon = Muon() if computes == "muon" else Muon.off()
        return muon_memory(*wide, muon=muon, state=state, impl="reference")[0]


Workload = MemoryWorkload | SelectiveWorkload | DecodeWorkload


def check(workload: Workload, contenders: list[Contender]) -> None:
    """No speed is reported for a wrong result."""
    truths: dict[str, Tensor] = {}
    with torch.no_grad():
        for contender in contenders:
            if contender.computes not in truths:
                truths[contender.computes] = workload.wanted(contender.computes)
            wanted = truths[contender.computes]
            error = ((contender.run().double() - wanted).norm() / wanted.norm()).item()
            if not error <= TOLERANCE:
                raise RuntimeError(
                    f"{contender.name} is off by {error:.2e} (it may be {TOLERANCE:g}): no speed is reported"
                )
