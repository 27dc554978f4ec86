"""Compare every implementation of both operators with the float64 reference, and the reference with the paper."""

from __future__ import annotations

import pytest
import torch

from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan, newton_schulz

from .cases import (
    FAMILY,
    IMPLS,
    LENGTHS,
    MUONS,
    OPERATORS,
    TOLERANCE,
    Case,
    all_combinations,
    assert_close,
    call,
    expected,
    first_is_quick,
    make_inputs,
    results,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@all_combinations(
    impl=IMPLS,
    operator=[*OPERATORS, "memory_eta0"],
    length=LENGTHS,
    layout=["rows", "rows_from_zero", "packed"],
    dtype=DTYPES,
)
def test_equals_the_float64_reference(impl, operator, length, layout, dtype):
    case = Case(
        operator=operator.removesuffix("_eta0"),
        eta=0.0 if operator.endswith("_eta0") else 1.0,
        lengths=(length, 3, 0, 17, length) if layout == "packed" else (length, length),
        packed=layout == "packed",
        initial_state=layout != "rows_from_zero",
    )
    found = results(case, make_inputs(case, dtype), impl)
    assert found["y"].dtype == dtype
    assert found["S_end"].dtype == found["M_end"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(found, expected(case, dtype), TOLERANCE[dtype])


@all_combinations(impl=IMPLS, operator=OPERATORS, muon=MUONS, gamma=["float", "head"])
def test_every_setting_equals_the_reference(impl, operator, muon, gamma):
    case = Case(operator=operator, muon=MUONS[muon], gamma=gamma, lengths=(70, 70))
    assert_close(results(case, make_inputs(case), impl), expected(case, torch.float64), TOLERANCE[torch.float64])


@all_combinations(
    impl=IMPLS,
    muon=["default", "residual", *FAMILY],
    inject=[False, True],
    gamma=["float", "head", "step"],
    eta=[1.0, 0.0],
    layout=["rows", "rows_from_zero", "packed"],
)
def test_the_family_of_rules_equals_the_reference(impl, muon, inject, gamma, eta, layout):
    packed = layout == "packed"
    case = Case(
        muon={"default": Muon(), **MUONS, **FAMILY}[muon],
        inject=inject,
        gamma=gamma,
        eta=eta,
        lengths=(70, 3, 0, 17, 65) if packed else (70, 70),
        packed=packed,
        initial_state=layout != "rows_from_zero",
    )
    assert_close(results(case, make_inputs(case), impl), expected(case, torch.float64), TOLERANCE[torch.float64])


@all_combinations(impl=IMPLS, muon=["residual", "gated"], inject=[False, True], length=LENGTHS, dtype=DTYPES)
def test_the_family_in_every_dtype_and_length(impl, muon, inject, length, dtype):
    case = Case(muon={**MUONS, **FAMILY}[muon], inject=inject, lengths=(length, length))
    found = results(case, make_inputs(case, dtype), impl)
    assert found["y"].dtype == dtype
    assert_close(found, expected(case, dtype), TOLERANCE[dtype])


@all_combinations(impl=IMPLS, operator=OPERATORS)
def test_float16_equals_the_reference(impl, operator):
    case = Case(operator=operator, gamma="float")
    found = results(case, make_inputs(case, torch.float16), impl)
    assert found["y"].dtype == torch.float16
    assert_close(found, expected(case, torch.float16), TOLERANCE[torch.float16])


@pytest.mark.parametrize("muon", [*MUONS, *FAMILY])
def test_reference_is_equations_3_and_4_with_the_dense_operator(muon):
    """Spell out the recurrence with d x m matrices and Definition 1; it shares no code with the closed form."""
    muon = {**MUONS, **FAMILY}[muon]
    case = Case(muon=muon, gamma="float", lengths=(9, 9), inject=True)
    i = make_inputs(case)
    y, state = muon_memory(
        i["q"],
        i["k"],
        i["v"],
        i["log_alpha"],
        i["beta"],
        muon=muon,
        inject=i["inject"],
        state=MemoryState(i["S"], i["M"]),
        impl="reference",
    )
    S, M = i["S"], i["M"]
    identity = torch.eye(case.m, dtype=torch.float64)
    for t in range(9):
        k, beta, alpha = i["k"][:, t], i["beta"][:, t, :, None, None], i["log_alpha"][:, t, :, None, None].exp()
        X = i["v"][:, t, :, :, None] * k[..., None, :]
        X = beta * dense_write(X, muon) if muon.beta_position == "outside" else dense_write(beta * X, muon)
        erase = beta * k[..., :, None] * k[..., None, :]
        if muon.correction == "momentum":
            M = muon.gamma * M + X - alpha * S @ erase
            S = alpha * S + i["inject"][:, t, :, None, None] * M
        else:
            M = muon.gamma * M + X
            S = S @ (alpha * (identity - erase)) + i["inject"][:, t, :, None, None] * M
        torch.testing.assert_close(y[:, t], (S @ i["q"][:, t, :, :, None])[..., 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, MemoryState(S, M), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("muon", MUONS)
def test_selective_reference_is_the_recurrence_with_the_dense_operator(muon):
    muon = MUONS[muon]
    case = Case(operator="selective", muon=muon, gamma="float", lengths=(9, 9))
    i = make_inputs(case)
    state = MemoryState(i["S"], i["M"])
    y, end = muon_selective_scan(i["x"], i["dt"], i["A"], i["B"], i["C"], muon=muon, state=state, impl="reference")
    S, M = state
    for t in range(9):
        X = (i["dt"] * i["x"])[:, t, :, None] * i["B"][:, t, None, :]
        M = muon.gamma * M + dense_write(X, muon)
        S = torch.exp(i["dt"][:, t, :, None] * i["A"]) * S + M
        torch.testing.assert_close(y[:, t], (S @ i["C"][:, t, :, None])[..., 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, MemoryState(S, M), rtol=1e-12, atol=1e-12)


def dense_write(X: torch.Tensor, muon: Muon) -> torch.Tensor:
    if muon.normalization is None:
        return muon.tau * X
    steps = muon.ns_steps if muon.normalization == "newton_schulz" else 0
    if muon.tau_position == "outside":
        return muon.tau * newton_schulz(X, steps, muon.delta)
    return newton_schulz(muon.tau * X, steps, muon.delta)


@all_combinations(operator=[*OPERATORS, "memory_eta0"], packed=[False, True])
@first_is_quick("impl", IMPLS)
def test_gradcheck(impl, operator, packed):
    """Quick runs check the reference; the tests above compare the gradients of the others with it."""
    case = Case(
        operator=operator.removesuffix("_eta0"),
        eta=0.0 if operator.endswith("_eta0") else 1.0,
        lengths=(5, 2) if packed else (5, 5),
        packed=packed,
        d=3,
        m=2,
        muon=Muon(delta=0.3),  # some writes are below delta, some above
    )
    inputs = make_inputs(case)
    names = list(inputs)

    def function(*tensors):
        y, state = call(case, dict(zip(names, tensors, strict=True)), impl)
        return y, *state

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in inputs.values()])


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_flow_into_and_out_of_the_state(impl):
    case = Case(lengths=(40, 40))
    inputs = {name: x.requires_grad_() for name, x in make_inputs(case).items()}
    _, state = call(case, inputs, impl)
    y, _ = call(case, {**inputs, "S": state.S, "M": state.M}, impl)
    gradients = torch.autograd.grad(y.sum(), [inputs["v"], inputs["S"], inputs["M"]])
    assert all(g.abs().sum() > 0 for g in gradients)
    cut = state.detach()
    assert not cut.S.requires_grad
    assert not cut.M.requires_grad
