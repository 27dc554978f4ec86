"""Extreme gates, long sequences, memory, compilation, autocast, layouts."""

from __future__ import annotations

import pytest
import torch

from muonssm.lab.bench.measure import peak_bytes
from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan

from .cases import (
    IMPLS,
    OPERATORS,
    TOLERANCE,
    Case,
    all_combinations,
    assert_close,
    call,
    difference,
    expected,
    make_inputs,
    results,
)


def extreme(case: Case, **values: float) -> dict[str, torch.Tensor]:
    """Return the case's inputs with every third step of some of them set to an extreme value."""
    inputs = make_inputs(case)
    for name, value in values.items():
        inputs[name][:, ::3] = value
    return inputs


EXTREMES = {
    "alpha_one": {"log_alpha": 0.0},
    "alpha_zero": {"log_alpha": -1e4},
    "alpha_exact_zero": {"log_alpha": -torch.inf},
    "beta_zero": {"beta": 0.0},
    "gamma_zero": {"gamma": 0.0},
    "gamma_one": {"gamma": 1.0},
    "key_zero": {"k": 0.0},
    "value_zero": {"v": 0.0},
    "all": {"log_alpha": -1e4, "gamma": 0.0, "beta": 0.0, "v": 0.0},
}


@all_combinations(impl=IMPLS, name=EXTREMES)
def test_extreme_gates_are_exact_with_finite_gradients(impl, name):
    case = Case(lengths=(100, 100))
    inputs = extreme(case, **EXTREMES[name])
    wanted = results(case, inputs, "reference")
    found = results(case, inputs, impl)
    assert all(x.isfinite().all() for x in found.values())
    assert_close(found, wanted, TOLERANCE[torch.float64])


@all_combinations(
    impl=IMPLS,
    name=["q", "k", "v", "log_alpha", "beta", "gamma", "inject"],
    rule=["paper", "residual"],
    value=["nan", "inf"],
)
def test_a_bad_number_never_reaches_earlier_steps(impl, name, rule, value):
    """A NaN at step 5 of 70 leaves steps 0 to 4 as they are, and shows from its step on (a query: at its step)."""
    muon = Muon() if rule == "paper" else Muon.residual()
    case = Case(lengths=(70, 70), inject=True, muon=muon)
    clean = make_inputs(case)
    inputs = {key: x.clone() for key, x in clean.items()}
    bad = float(value) * (-1 if name == "log_alpha" else 1)
    index = (0, 5, 0) if inputs[name].ndim == 3 else (0, 5, 0, 0)
    inputs[name][index] = bad

    def run(tensors):
        gamma = tensors.pop("gamma")
        S, M, inject = (tensors.pop(x) for x in ("S", "M", "inject"))
        state = MemoryState(S, M)
        rule = case.muon.with_gamma(gamma)  # an operator given a NaN gamma directly refuses it
        return muon_memory(**tensors, muon=rule, inject=inject, state=state, impl=impl)

    (y, state), (wanted, end) = run(inputs), run(clean)
    assert difference(y[:, :5], wanted[:, :5]) < TOLERANCE[torch.float64]
    assert difference(y[1], wanted[1]) < TOLERANCE[torch.float64]
    assert difference(y[0, :, 1], wanted[0, :, 1]) < TOLERANCE[torch.float64]
    if name == "log_alpha" and value == "inf":  # a gate of 0 is a valid number
        assert y.isfinite().all()
        return
    assert not y[0, 5, 0].isfinite().all()
    assert bool(state.S[0, 0].isfinite().all()) == (name == "q")
    assert difference(state.S[1], end.S[1]) < TOLERANCE[torch.float64]


@all_combinations(impl=IMPLS, exponent=[-140, -130, -70, 40], rule=["paper", "residual"])
def test_keys_far_from_one_keep_their_digits(impl, exponent, rule):
    """Keys of 2^-140 are denormal in float32. Their writes are not: the normalization makes them large."""
    case = Case(lengths=(70, 70), gamma="float", muon=Muon() if rule == "paper" else Muon(correction="momentum"))
    inputs = make_inputs(case, torch.float32)
    inputs["k"] *= 2.0**exponent
    if exponent > 0:
        inputs["beta"] *= 2.0 ** (-2 * exponent)
    found = results(case, inputs, impl, gradients=False)
    wanted = results(case, {name: x.double() for name, x in inputs.items()}, "reference", gradients=False)
    assert all(x.isfinite().all() for x in found.values())
    assert_close(found, wanted, TOLERANCE[torch.float32])


@all_combinations(impl=IMPLS, values=[{"dt": 0.0}, {"dt": 1e4}, {"gamma": 0.0}, {"gamma": 1.0}, {"x": 0.0}, {"B": 0.0}])
def test_extreme_gates_of_the_selective_scan(impl, values):
    case = Case(operator="selective", lengths=(100, 100))
    inputs = extreme(case, **values)
    found = results(case, inputs, impl)
    assert all(x.isfinite().all() for x in found.values())
    assert_close(found, results(case, inputs, "reference"), TOLERANCE[torch.float64])


@all_combinations(impl=IMPLS, log_alpha=[0.0, -1e4], gamma=[0.0, 1.0])
def test_constant_extreme_gates_are_exact(impl, log_alpha, gamma):
    """With all alpha 0 or 1 and all gamma 0 or 1, the outputs are known integers."""
    L = 130
    k = torch.zeros(1, L, 1, 2, dtype=torch.float64)
    k[..., 0] = 1.0
    v = torch.ones(1, L, 1, 1, dtype=torch.float64)
    ones = torch.ones(1, L, 1, dtype=torch.float64)
    muon = Muon(gamma=gamma, tau=1.0, normalization=None)
    y, state = muon_memory(k, k, v, log_alpha * ones, ones, eta=0.0, muon=muon, impl=impl)
    t = torch.arange(1, L + 1, dtype=torch.float64)
    M = t if gamma == 1.0 else torch.ones_like(t)
    S = M.cumsum(0) if log_alpha == 0.0 else M
    assert torch.equal(y[0, :, 0, 0], S)
    assert state.M[0, 0, 0].tolist() == [M[-1].item(), 0.0]


@all_combinations(operator=OPERATORS, impl=[*IMPLS, "auto"], state=[True, False])
def test_no_steps_return_the_state_and_an_empty_output(operator, impl, state):
    case = Case(operator=operator, gamma="float", lengths=(0, 0), initial_state=state)
    inputs = make_inputs(case, torch.bfloat16)
    y, end = call(case, inputs, impl)
    assert y.shape == (2, 0, *((2, 7) if operator == "memory" else (7,)))
    assert y.dtype == torch.bfloat16
    assert torch.equal(end.S, inputs["S"]) if state else not end.S.any()
    assert torch.equal(end.M, inputs["M"]) if state else not end.M.any()


@all_combinations(
    impl=IMPLS,
    operator=OPERATORS,
    shape=[{"heads": 1}, {"d": 1}, {"m": 1}, {"d": 3, "m": 11}, {"lengths": (65,)}],
)
def test_odd_shapes(impl, operator, shape):
    case = Case(**{"operator": operator, "lengths": (33, 33), **shape})
    assert_close(results(case, make_inputs(case), impl), expected(case, torch.float64), TOLERANCE[torch.float64])


@all_combinations(impl=IMPLS, operator=OPERATORS)
def test_non_contiguous_inputs(impl, operator):
    case = Case(operator=operator)

    def strided(x: torch.Tensor) -> torch.Tensor:
        x = torch.stack((x, torch.full_like(x, torch.nan)), dim=-1)[..., 0].transpose(0, -1)
        return x.contiguous().transpose(0, -1)

    inputs = {name: strided(x) for name, x in make_inputs(case).items()}
    assert not any(x.is_contiguous() for x in inputs.values() if x.ndim > 2)
    y, state = call(case, inputs, impl)
    wanted = expected(case, torch.float64)
    found = {"y": y, "S_end": state.S, "M_end": state.M}
    assert_close(found, {name: wanted[name] for name in found}, TOLERANCE[torch.float64])


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_65536_steps_in_float32_stay_close_to_float64(operator):
    case = Case(operator=operator, lengths=(65_536,), heads=1, d=4, m=4, gamma="float", initial_state=False)
    inputs = make_inputs(case, torch.float32)
    y, state = call(case, inputs, "chunked")
    wide, end = call(case, {name: x.double() for name, x in inputs.items()}, "reference")
    assert difference(y, wide) < 1e-3
    assert difference(y[:, -64:], wide[:, -64:]) < 1e-3
    assert difference(state.S, end.S) < 1e-3
    assert difference(state.M, end.M) < 1e-3


def training_peak(operator: str, L: int) -> int:
    case = Case(operator=operator, lengths=(L,), heads=2, d=16, m=16, gamma="float", initial_state=False)
    inputs = {name: x.requires_grad_() for name, x in make_inputs(case, torch.float32).items()}
    return peak_bytes(lambda: call(case, inputs, "chunked")[0].sum().backward())


@pytest.mark.full
@pytest.mark.parametrize("operator", OPERATORS)
def test_peak_memory_of_a_training_step_is_linear_in_length(operator):
    short, long = training_peak(operator, 1024), training_peak(operator, 8192)
    assert short > 0
    assert long < 8.8 * short


@pytest.mark.full
@pytest.mark.parametrize("operator", OPERATORS)
def test_chunked_compiles_as_one_graph_and_serves_new_lengths(operator):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    case = Case(operator=operator, gamma="float", initial_state=False)

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(*tensors):
        y, state = (muon_memory if operator == "memory" else muon_selective_scan)(*tensors, impl="chunked")
        return y, *state

    for L in (100, 128, 150, 192, 201, 320, 333, 1000, 1024):
        inputs = make_inputs(Case(operator=operator, gamma="float", initial_state=False, lengths=(L, L)))
        tensors = (
            list(inputs.values())
            if operator != "longhorn"
            else [inputs["x"], inputs["dt"], None, inputs["B"], inputs["C"]]
        )
        y, *state = compiled(*tensors)
        wanted, end = call(case, inputs, "chunked")
        assert_close(dict(zip("ySM", (y, *state), strict=True)), {"y": wanted, "S": end.S, "M": end.M}, 1e-12)
    assert counter.frame_count <= 4  # the first length, then lengths that fill their chunks, and lengths that do not


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_inductor_compiles_forward_and_backward(operator):
    torch._dynamo.reset()
    case = Case(operator=operator, lengths=(100, 100))
    inputs = make_inputs(case, torch.float32)
    compiled = torch.compile(
        lambda *tensors: call(case, dict(zip(inputs, tensors, strict=True)), "chunked"), fullgraph=True
    )
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    y, state = compiled(*leaves)
    y.square().sum().backward()
    eager = [x.clone().requires_grad_() for x in inputs.values()]
    wanted, end = call(case, dict(zip(inputs, eager, strict=True)), "chunked")
    wanted.square().sum().backward()
    found = {"y": y.detach(), "S": state.S.detach(), "M": state.M.detach()}
    assert_close(found, {"y": wanted.detach(), "S": end.S.detach(), "M": end.M.detach()}, TOLERANCE[torch.float32])
    gradients = {name: x.grad for name, x in zip(inputs, leaves, strict=True)}
    assert_close(gradients, {name: x.grad for name, x in zip(inputs, eager, strict=True)}, TOLERANCE[torch.float32])


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_change_the_recurrence(impl):
    case = Case(lengths=(70, 70), gamma="float")
    inputs = make_inputs(case, torch.float32)
    plain, _ = call(case, inputs, impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, state = call(case, inputs, impl)
    assert torch.equal(plain, under)
    assert state.S.dtype == torch.float32


def test_mixed_dtypes_compute_in_the_widest_and_return_in_the_values():
    case = Case(lengths=(8, 8), gamma="float", initial_state=False)
    i = make_inputs(case, torch.bfloat16)
    y, state = muon_memory(i["q"], i["k"], i["v"], i["log_alpha"].float(), i["beta"].float())
    assert (y.dtype, state.S.dtype) == (torch.bfloat16, torch.float32)
    y, end = muon_memory(
        i["q"], i["k"], i["v"], i["log_alpha"], i["beta"], state=MemoryState(*(x.double() for x in state))
    )
    assert (y.dtype, end.S.dtype) == (torch.bfloat16, torch.float64)


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_returned_state_does_not_keep_the_sequence_alive(operator):
    case = Case(operator=operator, lengths=(640,), heads=1, gamma="float", initial_state=False)
    _, state = call(case, make_inputs(case, torch.float32), "chunked")
    for x in state:
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


def test_runs_are_deterministic():
    case = Case(lengths=(100, 100))
    first, second = (results(case, make_inputs(case, torch.float32), "chunked") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
