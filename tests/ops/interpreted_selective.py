"""Compare the Triton kernels of the selective scan with the float64 reference, under the interpreter.

test_triton_selective.py runs this. Cases are small: an interpreted step takes some thirty milliseconds. Checkpoints are
eight steps apart here, so that few steps cross one.
"""

from __future__ import annotations

import os

import pytest
import torch

from muonssm.ops import Muon
from muonssm.ops.triton import config

from .cases import TOLERANCE, Case, assert_close, call, expected, make_inputs, results

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1, or run test_triton_selective.py"

OPERATORS = ("selective", "longhorn")
LAYOUTS = {
    "rows": {"lengths": (7, 7)},
    "rows_from_zero": {"lengths": (6, 6), "initial_state": False},
    "one_step": {"lengths": (1, 1)},
    "packed": {"lengths": (7, 3, 0, 1), "packed": True},
}
MUONS = {
    "off": Muon.off(),
    "no_normalization": Muon(normalization=None, tau=0.3),
    "frobenius": Muon(normalization="frobenius"),
    "five_steps_below_delta": Muon(ns_steps=5, delta=2.0),
    "tau_outside": Muon(tau_position="outside"),
    "full_momentum": Muon(gamma=1.0),
}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(config, "SEGMENT", 8)


@pytest.fixture
def pieces(monkeypatch):
    monkeypatch.setitem(config.FILLED, "interpreter", 1 << 10)
    monkeypatch.setattr(config, "SHORTEST_PIECE", 8)


def check(case: Case, dtype: torch.dtype = torch.float32) -> None:
    found = results(case, make_inputs(case, dtype), "triton")
    assert found["y"].dtype == dtype
    assert found["S_end"].dtype == found["M_end"].dtype == torch.float32
    assert_close(found, expected(case, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operator", OPERATORS)
def test_equals_the_float64_reference(operator, layout, dtype):
    check(Case(operator=operator, **LAYOUTS[layout]), dtype)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("lengths", [(16,), (19,)])
def test_across_checkpoints(lengths, operator):
    check(Case(operator=operator, lengths=lengths))


def test_packed_across_checkpoints():
    check(Case(operator="selective", lengths=(9, 2, 0, 17), packed=True))


@pytest.mark.parametrize("gamma", ["float", "head"])
@pytest.mark.parametrize("muon", MUONS)
def test_every_setting_equals_the_reference(muon, gamma):
    check(Case(operator="selective", muon=MUONS[muon], gamma=gamma, lengths=(5, 5)))


def test_channels_in_several_blocks_and_states_that_fill_none():
    check(Case(operator="selective", d=70, m=19, lengths=(3,)))


@pytest.mark.parametrize("operator", OPERATORS)
def test_in_pieces(operator, pieces):
    check(Case(operator=operator, lengths=(27,)))


def test_packed_in_pieces_without_momentum(pieces):
    """If a sequence has fewer pieces than the longest one, its states pass through the empty pieces."""
    check(Case(operator="selective", lengths=(10, 3, 0, 17), packed=True, muon=Muon.off(), gamma="float"))


@pytest.mark.parametrize("muon", ["off", "five_steps_below_delta"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_single_step_kernel(operator, muon):
    """Without gradients one step has its own kernel; step by step equals the whole sequence."""
    case = Case(operator=operator, muon=MUONS[muon], gamma="float", lengths=(4, 4))
    inputs = make_inputs(case, torch.float32)
    wanted = {name: expected(case, torch.float32)[name] for name in ("y", "S_end", "M_end")}
    state, outputs = {name: inputs[name] for name in "SM"}, []
    for t in range(4):
        step = {name: x if name == "A" else x[:, t : t + 1] for name, x in inputs.items() if name not in "SM"}
        y, (S, M) = call(case, step | state, "triton")
        state = {"S": S, "M": M}
        outputs.append(y)
    found = {"y": torch.cat(outputs, dim=1), "S_end": S, "M_end": M}
    assert_close(found, wanted, TOLERANCE[torch.float32])


def test_zero_writes_have_finite_gradients():
    """Padding has x, dt and B all zero, so that the norms vanish."""
    case = Case(operator="selective", lengths=(3, 3))
    inputs = {name: x * 0 if name in ("x", "dt", "B") else x for name, x in make_inputs(case, torch.float16).items()}
    assert all(x.isfinite().all() for x in results(case, inputs, "triton").values())


def test_empty_rows():
    case = Case(operator="selective", lengths=(0, 0))
    inputs = make_inputs(case, torch.float32)
    y, state = call(case, inputs, "triton")
    assert y.shape == (2, 0, 7)
    assert torch.equal(state.S, inputs["S"])
    assert torch.equal(state.M, inputs["M"])
