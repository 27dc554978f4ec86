"""Compare the Triton kernels of `muon_memory` with the float64 reference, under the interpreter.

test_triton.py runs this. Cases are small: an interpreted chunk of one head takes about a second, forward and backward.
"""

from __future__ import annotations

import os

import pytest
import torch

from muonssm.ops import MemoryState, Muon, muon_memory
from muonssm.ops.triton import support

from .cases import FAMILY, MUONS, TOLERANCE, Case, assert_close, call, difference, expected, make_inputs, results

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1, or run test_triton.py"

LAYOUTS = {
    "one_step": {"lengths": (1, 1)},
    "rows": {"lengths": (65, 65), "heads": 1},
    "rows_from_zero": {"lengths": (100,), "initial_state": False},
    "whole_chunk": {"lengths": (64,), "heads": 1},
    "packed": {"lengths": (65, 3, 0, 17), "packed": True, "heads": 1},
}


def check(case: Case, dtype: torch.dtype = torch.float32, tolerance: float | None = None) -> None:
    found = results(case, make_inputs(case, dtype), "triton")
    assert found["y"].dtype == dtype
    assert found["S_end"].dtype == found["M_end"].dtype == torch.float32
    assert all(x.isfinite().all() for x in found.values())
    assert_close(found, expected(case, dtype), tolerance or TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("eta", [1.0, 0.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_float64_reference(layout, eta, dtype):
    check(Case(eta=eta, **LAYOUTS[layout]), dtype)


def test_bfloat16_inputs_equal_the_reference():
    """Products are in float32 here: the interpreter computes bfloat16 incorrectly."""
    check(Case(lengths=(65,), heads=1), torch.bfloat16)


def test_half_precision_operands_stay_within_bfloat16s_tolerance(monkeypatch):
    """Round tiles and intermediate tensors to float16, as a GPU does to bfloat16, which has fewer digits."""
    monkeypatch.setattr(support, "operand_dtype", lambda dtype, architecture: torch.float16)
    check(Case(lengths=(100,), heads=1), torch.float16, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("muon", MUONS)
def test_every_setting_equals_the_reference(muon):
    check(Case(muon=MUONS[muon], gamma="float", lengths=(66,), heads=1))


@pytest.mark.parametrize("inject", [False, True])
@pytest.mark.parametrize("muon", ["default", "residual", *FAMILY])
def test_the_family_of_rules_equals_the_reference(muon, inject):
    rules = {"default": Muon(), **MUONS, **FAMILY}
    check(Case(muon=rules[muon], inject=inject, lengths=(66,), heads=1))


@pytest.mark.parametrize("eta", [1.0, 0.0])
def test_residual_rule_on_packed_sequences(eta):
    case = Case(muon=Muon.residual(), inject=True, eta=eta, lengths=(65, 3, 0, 17), packed=True, heads=1, gamma="head")
    check(case)


@pytest.mark.parametrize("inject", [False, True])
@pytest.mark.parametrize("muon", ["off", "five_steps", "below_delta", "residual", "gated"])
def test_a_decoding_step_equals_the_reference(muon, inject):
    case = Case(muon={**MUONS, **FAMILY}[muon], inject=inject, gamma="float", lengths=(1, 1))
    inputs = make_inputs(case, torch.float32)
    y, state = call(case, inputs, "triton")
    wanted, end = call(case, {name: x.double() for name, x in inputs.items()}, "reference")
    for found, correct in ((y, wanted), (state.S, end.S), (state.M, end.M)):
        assert difference(found, correct) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("gamma", ["head", "step"])
def test_gammas_gradient(gamma):
    check(Case(gamma=gamma, lengths=(70,)))


EXTREMES = {
    "alpha_one": {"log_alpha": 0.0},
    "alpha_zero": {"log_alpha": -1e4},
    "alpha_small": {"log_alpha": -69.0},
    "alpha_exact_zero": {"log_alpha": -torch.inf},
    "gamma_zero": {"gamma": 0.0},
    "gamma_one": {"gamma": 1.0},
    "gamma_small": {"gamma": 1e-30},
    "key_zero": {"k": 0.0},
    "all": {"log_alpha": -1e4, "gamma": 0.0, "beta": 0.0, "v": 0.0},
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_gates_cost_no_accuracy_and_have_finite_gradients(name):
    case = Case(lengths=(66,), heads=1)
    inputs = make_inputs(case, torch.float32)
    for which, value in EXTREMES[name].items():
        inputs[which][:, ::3] = value
    found = results(case, inputs, "triton")
    assert all(x.isfinite().all() for x in found.values())
    wanted = results(case, {name: x.double() for name, x in inputs.items()}, "reference")
    assert_close(found, wanted, TOLERANCE[torch.float32])


def test_constant_extreme_gates_are_exact():
    ones = torch.ones(1, 70, 1)
    k = torch.zeros(1, 70, 1, 2)
    k[..., 0] = 1.0
    for gamma, log_alpha in ((0.0, 0.0), (1.0, 0.0), (1.0, -1e4)):
        muon = Muon(gamma=gamma, tau=1.0, normalization=None)
        y, state = muon_memory(k, k, ones[..., None], log_alpha * ones, ones, eta=0.0, muon=muon, impl="triton")
        t = torch.arange(1.0, 71.0)
        M = t if gamma == 1.0 else torch.ones_like(t)
        assert torch.equal(y[0, :, 0, 0], M.cumsum(0) if log_alpha == 0.0 else M)
        assert state.M[0, 0, 0].tolist() == [M[-1].item(), 0.0]


@pytest.mark.parametrize("sizes", [{"d": 1, "m": 1}, {"d": 20, "m": 33}, {"d": 70, "m": 70}], ids=str)
def test_head_sizes_that_fill_no_tile(sizes):
    check(Case(lengths=(20,), heads=1, **sizes))


def test_no_steps_return_the_state_and_an_empty_output():
    case = Case(gamma="float", lengths=(0, 0))
    inputs = make_inputs(case, torch.float16)
    y, end = call(case, inputs, "triton")
    assert y.shape == (2, 0, 2, 7)
    assert torch.equal(end.S, inputs["S"])
    assert torch.equal(end.M, inputs["M"])


def test_whole_equals_split_and_gradients_pass_the_state():
    case = Case(lengths=(80,), heads=1, gamma="float")
    leaves = {name: x.requires_grad_() for name, x in make_inputs(case, torch.float32).items()}
    whole, _ = call(case, leaves, "triton")
    tensors = [leaves[name] for name in ("q", "k", "v", "log_alpha", "beta")]
    state, parts = MemoryState(leaves["S"], leaves["M"]), []
    for piece in (slice(0, 37), slice(37, 80)):
        y, state = muon_memory(*(x[:, piece] for x in tensors), muon=case.muon, state=state, impl="triton")
        parts.append(y)
    assert difference(torch.cat(parts, dim=1), whole) < TOLERANCE[torch.float32]
    weights = torch.linspace(-1, 1, whole.numel()).view_as(whole)
    by_whole = torch.autograd.grad((whole * weights).sum(), [*tensors, leaves["S"]])
    by_parts = torch.autograd.grad((torch.cat(parts, dim=1) * weights).sum(), [*tensors, leaves["S"]])
    for a, b in zip(by_parts, by_whole, strict=True):
        assert difference(a, b) < TOLERANCE[torch.float32]


def test_gradients_are_the_same_from_run_to_run():
    case = Case(lengths=(66,), heads=1)
    inputs = make_inputs(case, torch.float32)
    first, second = (results(case, inputs, "triton") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_compiles_as_one_graph():
    case = Case(lengths=(20,), heads=1, gamma="float", initial_state=False)
    inputs = make_inputs(case, torch.float32)
    compiled = torch.compile(lambda **tensors: call(case, tensors, "triton")[0], backend="eager", fullgraph=True)
    assert torch.equal(compiled(**inputs), call(case, inputs, "triton")[0])
