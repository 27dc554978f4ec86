"""Properties that users rely on: splits and single steps, padding and packing change nothing; any shape works."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonssm.ops import Muon, muon_memory, muon_selective_scan

from .cases import (
    IMPLS,
    OPERATORS,
    TOLERANCE,
    Case,
    all_combinations,
    assert_close,
    call,
    difference,
    each_alone,
    expected,
    make_inputs,
    results,
)

CONSTANT = {"A", "S", "M"}


def cut(inputs: dict[str, torch.Tensor], start: int, end: int, state) -> dict[str, torch.Tensor]:
    piece = {name: x if name in CONSTANT else x[:, start:end] for name, x in inputs.items()}
    return {**piece, "S": state[0], "M": state[1]}


SPLITS = {"two": (0, 37, 100), "odd": (0, 1, 64, 65, 100), "steps": tuple(range(101))}
RULES = {"muon": Muon(), "plain": Muon.off()}


@all_combinations(impl=[*IMPLS, "auto"], operator=OPERATORS, rule=RULES, split=SPLITS)
def test_whole_equals_split_anywhere_equals_step_by_step(impl, operator, rule, split):
    case = Case(operator=operator, muon=RULES[rule], gamma="float", lengths=(100, 100))
    inputs = make_inputs(case)
    whole, end = call(case, inputs, impl)
    state, outputs = (inputs["S"], inputs["M"]), []
    for start, stop in pairwise(SPLITS[split]):
        y, state = call(case, cut(inputs, start, stop, state), impl)
        outputs.append(y)
    found = {"y": torch.cat(outputs, dim=1), "S": state.S, "M": state.M}
    assert_close(found, {"y": whole, "S": end.S, "M": end.M}, TOLERANCE[torch.float64])


@all_combinations(impl=IMPLS, operator=OPERATORS)
def test_left_padded_equals_alone(impl, operator):
    """Zero keys, values and gates before a sequence keep a zero state at zero, and so change nothing."""
    case = Case(operator=operator, gamma="float", lengths=(30,), initial_state=False)
    inputs = make_inputs(case)
    alone, end = call(case, inputs, impl)
    padding = {name: x if name == "A" else torch.cat((torch.zeros_like(x), x), dim=1) for name, x in inputs.items()}
    padded, end_padded = call(case, padding, impl)
    wanted = {"y": alone, "S": end.S, "M": end.M}
    assert_close({"y": padded[:, 30:], "S": end_padded.S, "M": end_padded.M}, wanted, TOLERANCE[torch.float64])
    assert not padded[:, :30].any()


@all_combinations(impl=IMPLS, operator=OPERATORS)
def test_right_padded_equals_alone(impl, operator):
    """Outputs are causal: nothing after a sequence changes them. (For the state at its end, use cu_seqlens.)"""
    case = Case(operator=operator, gamma="float", lengths=(70, 70))
    inputs = make_inputs(case)
    whole, _ = call(case, inputs, impl)
    alone, _ = call(case, cut(inputs, 0, 41, (inputs["S"], inputs["M"])), impl)
    assert difference(whole[:, :41], alone) < TOLERANCE[torch.float64]


@all_combinations(impl=IMPLS, operator=OPERATORS, gamma=["float", "head", "step"])
def test_packed_equals_alone(impl, operator, gamma):
    case = Case(operator=operator, gamma=gamma, lengths=(1, 130, 0, 2, 64, 63, 1, 7), packed=True)
    assert_close(results(case, make_inputs(case), impl), expected(case, torch.float64), TOLERANCE[torch.float64])


@pytest.mark.full
def test_packing_many_short_sequences_beside_a_long_one_stays_small():
    """1,000 short sequences and one of 4,096 steps run in batches of similar length, not as 1,001 long rows."""
    case = Case(lengths=(4096, *(1 + i % 9 for i in range(1000))), packed=True, gamma="float", d=4, m=4)
    inputs = make_inputs(case, torch.float32)
    from torch.profiler import profile

    with profile(profile_memory=True) as profiler:
        y, _ = call(case, inputs, "chunked")
    largest = max(event.self_cpu_memory_usage for event in profiler.events())
    assert largest < 64 * 2**20
    wanted, _ = each_alone(case, inputs)
    assert difference(y, wanted) < TOLERANCE[torch.float32]


def test_plain_is_no_momentum_and_no_normalization():
    case = Case(muon=Muon.off(), gamma="float", lengths=(20, 20), initial_state=False)
    i = make_inputs(case)
    y, state = call(case, i, "chunked")
    write = i["beta"][:, -1, :, None, None] * i["v"][:, -1, :, :, None] * i["k"][:, -1, :, None, :]
    torch.testing.assert_close(state.M, write)  # the momentum is the last write
    again, _ = call(replace(case, muon=Muon(gamma=0.0, tau=1.0, normalization=None)), i, "reference")
    torch.testing.assert_close(y, again)


small = st.integers(1, 5)
gate = st.sampled_from([0.0, 1e-30, 0.3, 1.0])
size = st.sampled_from([0.0, 1e-20, 1e-4, 1.0, 1e4])


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(B=small, L=st.integers(0, 90), H=small, m=small, d=small, gates=st.tuples(gate, gate, gate), scale=size,
       eta=st.sampled_from([0.0, 1.0]), normalized=st.booleans(), seed=st.integers(0, 99))  # fmt: skip
def test_any_shape_gate_and_size_agrees_and_is_finite(B, L, H, m, d, gates, scale, eta, normalized, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, L, H, n, generator=generator, dtype=torch.float64) for n in (m, m, d))
    k = torch.nn.functional.normalize(k, dim=-1)
    alpha, beta = (torch.full((B, L, H), g, dtype=torch.float64) for g in gates[:2])
    mixed = torch.rand(B, L, H, generator=generator) < 0.3
    alpha, beta = alpha.where(~mixed, 0.5), beta.where(mixed, 0.25)
    muon = Muon(gamma=gates[2]) if normalized else Muon(gamma=gates[2], normalization=None)
    results = {impl: muon_memory(q, k, scale * v, alpha.log(), beta, eta=eta, muon=muon, impl=impl) for impl in IMPLS}
    wanted, state = results["reference"]
    bound = TOLERANCE[torch.float64]
    for y, end in results.values():
        assert y.isfinite().all()
        assert difference(y, wanted) <= bound
        assert difference(end.S, state.S) <= bound
        assert difference(end.M, state.M) <= bound


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(B=small, L=st.integers(0, 70), D=small, N=small, dt=gate, decay=size, scale=size, longhorn=st.booleans(),
       gamma=gate, seed=st.integers(0, 99))  # fmt: skip
def test_any_shape_gate_and_size_of_the_selective_scan_agrees(B, L, D, N, dt, decay, scale, longhorn, gamma, seed):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(B, L, D, generator=generator, dtype=torch.float64)
    Bk, C = (torch.randn(B, L, N, generator=generator, dtype=torch.float64) for _ in range(2))
    Bk = torch.nn.functional.normalize(Bk, dim=-1)
    steps = torch.full((B, L, D), dt, dtype=torch.float64)
    A = None if longhorn else torch.full((D, N), -decay, dtype=torch.float64)
    results = {impl: muon_selective_scan(x, steps, A, Bk, C, muon=Muon(gamma=gamma), impl=impl) for impl in IMPLS}
    wanted, state = results["reference"]
    bound = TOLERANCE[torch.float64]
    for y, end in results.values():
        assert y.isfinite().all()
        assert difference(y, wanted) <= bound
        assert difference(end.S, state.S) <= bound
        assert difference(end.M, state.M) <= bound
