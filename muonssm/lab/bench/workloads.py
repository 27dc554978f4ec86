"""Workloads of the operator benchmark: inputs as a layer makes them, our implementations, and peers on the same inputs.

Peers come from installed packages. Before a contender is timed, its output is compared with the float64 result of the
function that it computes: `muon` (with momentum and normalization), `plain` (without), `residual` or `attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan

from .measure import check_close


@dataclass(frozen=True)
class Contender:
    """An implementation to time, and the name of the function that it computes."""

    name: str
    run: Callable[[], Tensor]
    computes: str = "muon"


@dataclass(frozen=True)
class MemoryWorkload:
    """The matrix memory: B sequences of L steps, H heads, float32; unit queries and keys, gates in the usual range."""

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
        """A function that calls our operator with `impl`."""
        return lambda: muon_memory(*self.inputs, eta=eta, muon=muon, impl=impl)[0]

    def contender(self, impl: str) -> Contender:
        return Contender(impl, self.ours(impl, Muon()))

    def plain(self, impl: str) -> Contender:
        return Contender(f"{impl}, plain", self.ours(impl, Muon.off()), "plain")

    def residual(self, impl: str) -> Contender:
        return Contender(f"{impl}, residual", self.ours(impl, Muon.residual()), "residual")

    def gated_delta_rule(self, form: str) -> Contender:
        """transformers' `torch_{chunk,recurrent}_gated_delta_rule`: no momentum, no normalization.

        It divides q by sqrt(m) itself, hence the factor.
        """
        from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

        rule = getattr(qwen3_next, f"torch_{form}_gated_delta_rule")
        scale = self.q.shape[-1] ** 0.5
        return Contender(
            f"transformers {form}",
            lambda: rule(self.q * scale, self.k, self.v, g=self.log_alpha, beta=self.beta, initial_state=None,
                         output_final_state=True)[0],
            "plain",
        )  # fmt: skip

    def compiled_gated_delta_rule(self) -> Contender:
        """transformers' chunked gated delta rule under `torch.compile`."""
        eager = self.gated_delta_rule("chunk")
        return Contender(f"{eager.name}, compiled", torch.compile(eager.run, dynamic=False), eager.computes)

    def attention(self) -> Contender:
        """Causal `scaled_dot_product_attention` of torch."""

        def run() -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

        return Contender("causal attention", run, "attention")

    def expected(self, computes: str) -> Tensor:
        """The float64 result of the function `computes`."""
        wide = [x.detach().double() for x in self.inputs]
        if computes == "attention":
            q, k, v = (x.transpose(1, 2) for x in wide[:3])
            future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            weight = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf).softmax(-1)
            return (weight @ v).transpose(1, 2)
        rules = {"muon": Muon(), "plain": Muon.off(), "residual": Muon.residual()}
        return muon_memory(*wide, muon=rules[computes], impl="reference")[0]


@dataclass(frozen=True)
class SelectiveWorkload:
    """The selective scan of Mamba: B sequences of L steps, D channels, N states, float32."""

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
        """`pscan` of mambapy, called as transformers' Mamba does with `use_mambapy=True`: no momentum."""
        from mambapy.pscan import pscan

        def run() -> Tensor:
            gate = torch.exp(self.dt[..., None] * self.A)
            states = pscan(gate, self.dt[..., None] * self.B[:, :, None, :] * self.x[..., None])
            return (states @ self.C[..., None]).squeeze(-1)

        return Contender("mambapy pscan", run, "plain")

    def expected(self, computes: str) -> Tensor:
        """The float64 result of the function `computes`."""
        wide = [t.detach().double() for t in self.inputs]
        return muon_selective_scan(*wide, muon=Muon() if computes == "muon" else Muon.off(), impl="reference")[0]


@dataclass(frozen=True)
class DecodeWorkload:
    """One decoding step of B sequences from a given state, without gradients."""

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
        """`torch_recurrent_gated_delta_rule` of transformers on one token."""
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as rule

        w, S = self.step, self.state.S.mT.contiguous()
        q = w.q * w.q.shape[-1] ** 0.5
        return Contender(
            "transformers recurrent",
            lambda: rule(q, w.k, w.v, g=w.log_alpha, beta=w.beta, initial_state=S, output_final_state=True)[0],
            "plain",
        )

    def expected(self, computes: str) -> Tensor:
        """The float64 result of the function `computes`."""
        wide = [x.double() for x in self.step.inputs]
        state = MemoryState(*(x.double() for x in self.state))
        muon = Muon() if computes == "muon" else Muon.off()
        return muon_memory(*wide, muon=muon, state=state, impl="reference")[0]


Workload = MemoryWorkload | SelectiveWorkload | DecodeWorkload


def check(workload: Workload, contenders: list[Contender]) -> None:
    """Check the outputs of all contenders, so that no time is reported for a wrong result."""
    expected: dict[str, Tensor] = {}
    with torch.no_grad():
        for contender in contenders:
            if contender.computes not in expected:
                expected[contender.computes] = workload.expected(contender.computes)
            check_close(contender.name, contender.run(), expected[contender.computes])
