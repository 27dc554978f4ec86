"""Inputs, tolerances, comparisons and parameter combinations shared by the operator tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.ops import IMPLEMENTATIONS, MemoryState, Muon, muon_memory, muon_selective_scan

# Largest relative RMS difference to the float64 reference, by dtype of the inputs. Change one only in its own commit.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}

IMPLS = tuple(name for name in IMPLEMENTATIONS if name != "triton")  # triton has no float64: see test_triton.py
OPERATORS = ("memory", "selective", "longhorn")
LENGTHS = (1, 63, 64, 65, 100)
MUONS = {
    "off": Muon.off(),
    "no_normalization": Muon(normalization=None, tau=0.3),
    "frobenius": Muon(normalization="frobenius"),
    "five_steps": Muon(ns_steps=5),
    "tau_outside": Muon(tau_position="outside"),
    "below_delta": Muon(delta=2.0),
    "no_momentum": Muon(gamma=0.0),
    "full_momentum": Muon(gamma=1.0),
    "residual": Muon.residual(),
}
# Rules that only `muon_memory` has.
FAMILY = {
    "gated": Muon.gated(),
    "beta_outside": Muon(beta_position="outside"),
    "beta_outside_below_delta": Muon(beta_position="outside", delta=2.0),
    "residual_normalized": Muon(correction="momentum"),
    "residual_no_momentum": Muon.residual(gamma=0.0),
    "residual_gated": Muon.gated(gamma=0.9, correction="momentum"),
}


def all_combinations(*, indirect: Sequence[str] = (), **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of `axes`; mark `full` what a quick run does not need.

    A quick run has every pair of values of two axes at least once, in a greedy selection of combinations.
    """
    values = {name: list(choices) for name, choices in axes.items()}
    every = list(product(*(range(len(choices)) for choices in values.values())))
    quick = _covering(every)
    parameters = []
    for indices in every:
        chosen = [choices[i] for choices, i in zip(values.values(), indices, strict=True)]
        marks = () if indices in quick else pytest.mark.full
        parameters.append(pytest.param(*chosen, id="-".join(map(str, chosen)), marks=marks))
    return pytest.mark.parametrize(tuple(values), parameters, indirect=list(indirect))


def _covering(every: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return combinations that contain every pair (every value, if there is one axis) that occurs in `every`."""
    size = min(2, len(every[0]))
    pairs = {one: set(combinations(enumerate(one), size)) for one in every}
    missing = set().union(*pairs.values())
    quick = set()
    while missing:
        best = max(every, key=lambda one: len(pairs[one] & missing))
        quick.add(best)
        missing -= pairs[best]
    return quick


def first_is_quick(name: str, values: Iterable[Any], **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test by `values`; mark all but the first `full`."""
    first, *rest = values
    return pytest.mark.parametrize(name, [first, *(pytest.param(x, marks=pytest.mark.full) for x in rest)], **options)


@dataclass(frozen=True)
class Case:
    """One call of an operator, with the seed of its inputs.

    `lengths` has one length per batch row (all equal), or the lengths of sequences packed into one row.
    """

    operator: str = "memory"
    lengths: tuple[int, ...] = (65, 65)
    packed: bool = False
    eta: float = 1.0
    gamma: str = "step"  # "float", "head" or "step"
    muon: Muon = field(default_factory=Muon)
    inject: bool = False
    initial_state: bool = True
    heads: int = 2
    d: int = 7  # value dimension, or channels
    m: int = 5  # key dimension, or states
    seed: int = 0

    @property
    def cu_seqlens(self) -> Tensor | None:
        return torch.tensor([0, *self.lengths]).cumsum(0) if self.packed else None


def make_inputs(case: Case, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return all tensors of the case, rounded to `dtype`; states are at least float32."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    B, L = (1, sum(case.lengths)) if case.packed else (len(case.lengths), case.lengths[0])
    d, m, N = case.d, case.m, len(case.lengths)
    H = case.heads if case.operator == "memory" else 1
    if case.operator == "memory":
        inputs = {
            "q": normal(B, L, H, m),
            "k": F.normalize(normal(B, L, H, m), dim=-1) * (0.5 + uniform(B, L, H, 1)),
            "v": normal(B, L, H, d),
            "log_alpha": -0.3 * uniform(B, L, H),
            "beta": 0.1 + 0.8 * uniform(B, L, H),
        }
        state = (N, H, d, m)
    else:
        k = F.normalize(normal(B, L, m), dim=-1) if case.operator == "longhorn" else normal(B, L, m)
        inputs = {"x": normal(B, L, d), "dt": 0.01 + 0.4 * uniform(B, L, d)}
        inputs |= {"A": -0.1 - uniform(d, m)} if case.operator == "selective" else {}
        inputs |= {"B": k, "C": normal(B, L, m)}
        state = (N, d, m)
    if case.gamma != "float":
        inputs["gamma"] = 0.2 + 0.75 * uniform(*((H,) if case.gamma == "head" else (B, L, H)))
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    if case.initial_state:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        inputs |= {"S": normal(*state).to(wide), "M": normal(*state).to(wide)}
    if case.inject:
        inputs["inject"] = (0.2 + uniform(B, L, H)).to(dtype)
    return inputs


def call(case: Case, inputs: dict[str, Tensor], impl: str) -> tuple[Tensor, MemoryState]:
    """Call the operator of the case on `inputs`."""
    muon = replace(case.muon, gamma=inputs["gamma"]) if "gamma" in inputs else case.muon
    state = MemoryState(inputs["S"], inputs["M"]) if "S" in inputs else None
    common = {"muon": muon, "state": state, "cu_seqlens": case.cu_seqlens, "impl": impl}
    if case.operator == "memory":
        tensors = [inputs[name] for name in ("q", "k", "v", "log_alpha", "beta")]
        return muon_memory(*tensors, eta=case.eta, inject=inputs.get("inject"), **common)
    tensors = [inputs.get(name) for name in ("x", "dt", "A", "B", "C")]
    return muon_selective_scan(*tensors, **common)


def results(case: Case, inputs: dict[str, Tensor], impl: str, gradients: bool = True) -> dict[str, Tensor]:
    """Return y, the last S and M, and the gradients of a fixed random weighting of all three, by name."""
    leaves = {name: x.detach().clone().requires_grad_(gradients) for name, x in inputs.items()}
    y, state = call(case, leaves, impl)
    found = {"y": y.detach(), "S_end": state.S.detach(), "M_end": state.M.detach()}
    if gradients:
        loss = sum((x.double() * weights(x)).sum() for x in (y, *state))
        found |= {
            f"d{name}": g for name, g in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)
        }
    return found


def weights(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(x.numel())
    return torch.randn(x.shape, generator=generator, dtype=torch.float64)


@lru_cache(maxsize=256)
def expected(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the results of the float64 reference on the case's inputs, after rounding them to `dtype`.

    Packed sequences are computed one by one, without packing.
    """
    inputs = {name: x.double() for name, x in make_inputs(case, dtype).items()}
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    y, state = each_alone(case, leaves) if case.packed else call(case, leaves, "reference")
    loss = sum((x * weights(x)).sum() for x in (y, *state))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = {"y": y, "S_end": state.S, "M_end": state.M}
    found |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in found.items()}


def each_alone(case: Case, inputs: dict[str, Tensor]) -> tuple[Tensor, MemoryState]:
    """Compute a packed case with one call per sequence."""
    constant = {"A"} | ({"gamma"} if case.gamma == "head" else set())
    outputs, states = [], []
    for i, (start, end) in enumerate(pairwise(case.cu_seqlens.tolist())):
        one = {
            name: x[i : i + 1] if name in "SM" else x[:, start:end]
            for name, x in inputs.items()
            if name not in constant
        }
        one |= {name: inputs[name] for name in constant if name in inputs}
        y, state = call(replace(case, packed=False, lengths=(end - start,)), one, "reference")
        outputs.append(y)
        states.append(state)
    return torch.cat(outputs, dim=1), MemoryState(*(torch.cat(ends) for ends in zip(*states, strict=True)))


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the relative RMS difference; the absolute one if the wanted values vanish (a gradient that cancels)."""
    scale = rms(wanted)
    return rms(found.double() - wanted.double()) / (scale if scale > 1e-12 else 1.0)


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Compare all results at once, so that a failure shows which ones differ and by how much."""
    assert found.keys() == wanted.keys()
    for name in found:
        assert found[name].shape == wanted[name].shape, name
    off = {name: difference(found[name], wanted[name]) for name in found}
    off = {name: value for name, value in off.items() if not value <= tolerance}
    assert not off, f"beyond {tolerance:g}: {off}"
