"""The family of memory rules: fixed points, stability, where its members meet, and the experiment with chunk ends."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan, newton_schulz
from muonssm.ops.memory import orthogonal, scan
from muonssm.ops.memory.types import MemorySteps
from muonssm.ops.newton_schulz import A, B, C

from .cases import (
    FAMILY,
    IMPLS,
    TOLERANCE,
    Case,
    all_combinations,
    assert_close,
    call,
    difference,
    make_inputs,
    results,
)

NAMES = ("q", "k", "v", "log_alpha", "beta")
EXACT = {"rtol": 1e-12, "atol": 1e-12}
RULES = {"residual": Muon.residual(), **FAMILY}


def repeated_key(muon: Muon, beta: float, steps: int = 400) -> torch.Tensor:
    """Write one pair of key and value again and again; return S k after every step, in units of the value."""
    k, v = torch.tensor([0.6, 0.8], dtype=torch.float64), torch.tensor([3.0, -4.0, 12.0], dtype=torch.float64)
    k, v = (x.expand(1, steps, 1, -1) for x in (k, v))
    gate = torch.full((1, steps, 1), beta, dtype=torch.float64)
    y, _ = muon_memory(k, k, v, 0 * gate, gate, muon=muon)
    return y[0, :, 0] @ v[0, 0, 0] / v[0, 0, 0].square().sum()


# ---- fixed points and stability


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.5, 0.9])
def test_a_repeated_key_converges_to_its_value_in_the_residual_rule(gamma):
    found = repeated_key(Muon.residual(gamma=gamma), beta=0.4, steps=2000)
    torch.testing.assert_close(found[-1], torch.ones_like(found[-1]), **EXACT)


@pytest.mark.parametrize(("gamma", "beta"), [(0.5, 0.4), (0.9, 0.4), (0.9, 1.0)])
def test_a_repeated_key_does_not_converge_to_its_value_in_the_papers_rule(gamma, beta):
    """The fixed point of S k is 0.701 v_hat / (beta (1 - gamma)); |v| is 13."""
    found = repeated_key(Muon(gamma=gamma), beta)
    expected = (A + B + C) / (beta * (1 - gamma)) / 13
    torch.testing.assert_close(found[-1], torch.full_like(found[-1], expected), rtol=1e-9, atol=0)


@pytest.mark.parametrize("gamma", [0.0, 0.4, 0.8])
def test_the_residual_rule_is_stable_below_twice_one_plus_gamma(gamma):
    bound = 2 * (1 + gamma)
    inside, outside = (repeated_key(Muon.residual(gamma=gamma), bound * x, 3000) - 1 for x in (0.99, 1.01))
    assert inside[-1].abs() < 1e-3 < 1e3 < outside[-1].abs()


@pytest.mark.parametrize("gamma", [0.2, 0.5, 0.9])
def test_the_residual_rule_oscillates_above_the_square_of_one_minus_root_gamma(gamma):
    """Below it both roots of z^2 - (1 + gamma - beta) z + gamma are real and positive: the error keeps its sign."""
    bound = (1 - math.sqrt(gamma)) ** 2
    below = 1 - repeated_key(Muon.residual(gamma=gamma), 0.9 * bound, 60)
    above = 1 - repeated_key(Muon.residual(gamma=gamma), bound + 0.5, 60)
    assert (below > 0).all()
    assert (above < 0).any()


def test_the_error_of_the_residual_rule_obeys_its_characteristic_equation():
    gamma, beta = 0.7, 0.45
    error = 1 - repeated_key(Muon.residual(gamma=gamma), beta, 30)
    error = torch.cat((torch.ones(2, dtype=error.dtype), error))  # before the first write nothing is known, M is 0
    torch.testing.assert_close(error[2:], (1 + gamma - beta) * error[1:-1] - gamma * error[:-2], **EXACT)


# ---- the block-affine form with its extra block


def test_block_affine_form_of_the_residual_rule():
    """Z_t = [S_t M_t] = Z_{t-1} Phi_t + Psi_t, with -alpha_t eps_t k_t k_t^T from S into M."""
    i = make_inputs(Case(lengths=(6,), heads=1, d=4, m=3, inject=True))
    steps = MemorySteps(i["q"], i["k"], i["v"], i["log_alpha"], None, i["beta"], i["gamma"], i["inject"])
    Phi, Psi = scan.block_affine(steps)
    S, M = i["S"], i["M"]
    Z = torch.cat((S, M), dim=-1)
    for t in range(6):
        k, u = steps.k[:, t, :, :, None], steps.u[:, t, :, :, None]
        alpha, eps, gamma, mu = (
            x[:, t, :, None, None] for x in (steps.log_alpha.exp(), i["beta"], steps.gamma, steps.mu)
        )
        M = gamma * M + (u - alpha * eps * (S @ k)) * k.mT
        S = alpha * S + mu * M
        Z = Z @ Phi[:, t] + Psi[:, t]
        torch.testing.assert_close(Z, torch.cat((S, M), dim=-1), **EXACT)


# ---- where members meet


def outputs(impl: str, muon: Muon, inputs: dict, **more) -> list[torch.Tensor]:
    y, state = muon_memory(*(inputs[name] for name in NAMES), muon=muon, impl=impl, **more)
    return [y, state.S]


MEETINGS = {
    "residual without momentum is plain": (Muon.residual(gamma=0.0), Muon.off(), {}, {}),
    "corrections without eta are the same": (Muon(correction="momentum"), Muon(), {"eta": 0.0}, {"eta": 0.0}),
    "a gate of one injects everything": (Muon(), Muon(), {"inject": 1.0}, {}),
    "without normalization beta has one place": (
        Muon(normalization=None, beta_position="outside"), Muon(normalization=None), {}, {}
    ),
}  # fmt: skip


@all_combinations(impl=IMPLS, meeting=MEETINGS)
def test_members_are_equal_where_they_meet(impl, meeting):
    first, second, more, others = MEETINGS[meeting]
    inputs = make_inputs(Case(lengths=(70,), gamma="float", initial_state=False))
    if "inject" in more:
        more = {"inject": torch.ones_like(inputs["beta"])}
    for a, b in zip(outputs(impl, first, inputs, **more), outputs(impl, second, inputs, **others), strict=True):
        assert difference(a, b) < TOLERANCE[torch.float64]


def test_gates_of_one_make_inside_and_outside_equal():
    inputs = make_inputs(Case(lengths=(40,), gamma="float", initial_state=False))
    inputs["beta"] = torch.ones_like(inputs["beta"])
    inside, outside = (outputs("reference", Muon(tau=1.0, beta_position=x), inputs) for x in ("inside", "outside"))
    assert difference(inside[0], outside[0]) < TOLERANCE[torch.float64]


def test_outside_the_gate_scales_the_write_and_inside_it_cancels():
    i = make_inputs(Case(lengths=(1,), gamma="float", initial_state=False))
    for position, ratio in (("inside", 1.0), ("outside", 0.5)):
        full, half = (
            muon_memory(i["q"], i["k"], i["v"], i["log_alpha"], beta, muon=Muon(beta_position=position))[0]
            for beta in (i["beta"], 0.5 * i["beta"])
        )
        torch.testing.assert_close(half, ratio * full, **EXACT)


def test_presets():
    assert Muon() == Muon(gamma=0.9, tau=0.6, correction="memory", beta_position="inside")
    assert Muon.residual() == Muon(gamma=0.5, tau=1.0, normalization=None, correction="momentum")
    assert Muon.residual(0.3, normalization="frobenius").normalization == "frobenius"
    assert Muon.gated() == Muon(gamma=0.5, tau_position="outside", beta_position="outside")
    assert Muon.gated(gamma=0.0).gamma == 0.0
    with pytest.raises(TypeError, match="speed"):
        Muon.gated(speed=1)


# ---- the contract of the operator, for every member


@all_combinations(impl=IMPLS, rule=RULES, inject=[False, True])
def test_whole_equals_split_equals_single_steps(impl, rule, inject):
    case = Case(muon=RULES[rule], inject=inject, lengths=(20, 20), gamma="float")
    i = make_inputs(case)
    whole, end = call(case, i, impl)
    for cuts in ([0, 7, 20], range(21)):
        state, parts = MemoryState(i["S"], i["M"]), []
        for start, stop in itertools.pairwise(cuts):
            piece = {name: x[:, start:stop] for name, x in i.items() if name not in "SM"} | dict(state._asdict())
            y, state = call(case, piece, impl)
            parts.append(y)
        assert difference(torch.cat(parts, dim=1), whole) < TOLERANCE[torch.float64]
        assert difference(state.S, end.S) < TOLERANCE[torch.float64]
        assert difference(state.M, end.M) < TOLERANCE[torch.float64]


@all_combinations(impl=IMPLS, rule=RULES, inject=[False, True], gamma=["float", "head"])
def test_gradcheck(impl, rule, inject, gamma):
    case = Case(muon=RULES[rule], inject=inject, gamma=gamma, lengths=(5,), heads=1, d=3, m=2)
    inputs = {name: x.requires_grad_() for name, x in make_inputs(case).items()}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, state = call(case, dict(zip(inputs, tensors, strict=True)), impl)
        return y, *state

    assert torch.autograd.gradcheck(run, tuple(inputs.values()), fast_mode=True)


@all_combinations(impl=IMPLS, rule=RULES, inject=[False, True])
def test_padding_changes_nothing(impl, rule, inject):
    """Zeros before a sequence keep a zero state at zero, and outputs are causal."""
    case = Case(muon=RULES[rule], inject=inject, lengths=(70,), gamma="float", initial_state=False)
    i = make_inputs(case)
    alone, end = call(case, i, impl)
    padded, last = call(case, {name: F.pad(x, (0,) * (2 * x.ndim - 4) + (41, 0)) for name, x in i.items()}, impl)
    found = {"y": padded[:, 41:], "S": last.S, "M": last.M}
    assert_close(found, {"y": alone, "S": end.S, "M": end.M}, TOLERANCE[torch.float64])
    assert not padded[:, :41].any()
    start, _ = call(case, {name: x[:, :41] for name, x in i.items()}, impl)
    assert difference(alone[:, :41], start) < TOLERANCE[torch.float64]


@all_combinations(rule=RULES, inject=[False, True], dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_decoding_step_is_a_sequence_of_one(rule, inject, dtype):
    case = Case(muon=RULES[rule], inject=inject, lengths=(1, 1), gamma="float", d=8, m=16)
    i = make_inputs(case, dtype)
    wide = {name: x if name in "qkv" else x.to(i["S"].dtype) for name, x in i.items()}  # takes the shortcut
    y, state = call(case, wide, "native")
    wanted, end = call(case, {name: x.double() for name, x in i.items()}, "reference")
    assert y.dtype == dtype
    assert_close({"y": y, "S": state.S, "M": state.M}, {"y": wanted, "S": end.S, "M": end.M}, TOLERANCE[dtype])


COMPILED = [
    pytest.param(impl, rule, marks=() if impl == "native" or rule in ("residual", "gated") else pytest.mark.full)
    for impl, rule in itertools.product(("native", "chunked"), RULES)
]


@pytest.mark.parametrize(("impl", "rule"), COMPILED)
@torch._dynamo.config.patch(recompile_limit=len(COMPILED))
def test_compiles_as_one_graph(impl, rule):
    """Forward and backward, after other rules in the same process: by then tau is a variable of the compiler."""
    case = Case(muon=RULES[rule], inject=True, lengths=(70,), initial_state=False)
    leaves = {name: x.requires_grad_() for name, x in make_inputs(case, torch.float32).items()}
    compiled = torch.compile(lambda **x: call(case, x, impl)[0], backend="aot_eager", fullgraph=True)
    y, wanted = compiled(**leaves), call(case, leaves, impl)[0]
    found, by_eager = (torch.autograd.grad(x.square().sum(), list(leaves.values())) for x in (y, wanted))
    for one, other in zip((y, *found), (wanted, *by_eager), strict=True):
        assert difference(one, other) < 1e-6


@all_combinations(impl=["native", "chunked"], rule=RULES)
def test_exports(impl, rule):
    case = Case(muon=RULES[rule], inject=True, lengths=(70,), gamma="float")

    class Operator(torch.nn.Module):
        def forward(self, q, k, v, log_alpha, beta, inject, S, M):
            inputs = {"q": q, "k": k, "v": v, "log_alpha": log_alpha, "beta": beta, "inject": inject, "S": S, "M": M}
            y, state = call(case, inputs, impl)
            return y, *state

    i = make_inputs(case, torch.float32)
    arguments = tuple(i[name] for name in (*NAMES, "inject", "S", "M"))
    exported = torch.export.export(Operator(), arguments).module()
    for found, wanted in zip(exported(*arguments), Operator()(*arguments), strict=True):
        assert difference(found, wanted) < 1e-6


def test_the_selective_scan_has_no_correction_and_refuses_a_gate_outside():
    i = make_inputs(Case(operator="selective", gamma="float"))
    tensors = [i[name] for name in ("x", "dt", "A", "B", "C")]
    same = [muon_selective_scan(*tensors, muon=Muon(correction=where))[0] for where in ("memory", "momentum")]
    assert torch.equal(*same)
    with pytest.raises(ValueError, match="beta_position"):
        muon_selective_scan(*tensors, muon=Muon.gated())
    with pytest.raises(ValueError, match="orthogonalize"):
        muon_selective_scan(*tensors, muon=Muon(orthogonalize="read"))


def test_inject_is_checked():
    i = make_inputs(Case(lengths=(4,), gamma="float"))
    tensors = [i[name] for name in NAMES]
    with pytest.raises(ValueError, match="inject"):
        muon_memory(*tensors, inject=torch.ones(1, 4, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="inject"):
        muon_memory(*tensors, inject=0.5)


# ---- Momentum DeltaNet


def naive(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load flash-linear-attention's reference from its file, which `make .venv/dev` puts beside the environment."""
    peers = Path(sys.prefix) / "peers"
    path = peers / "fla/ops/momentum_delta_rule/naive.py"
    assert path.is_file(), f"flash-linear-attention is missing: pip install --no-deps --target {peers} fla-core einops"
    monkeypatch.syspath_prepend(str(peers))  # for einops
    spec = importlib.util.spec_from_file_location("fla_naive", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("impl", IMPLS)
def test_momentum_deltanet_is_flash_linear_attentions_reference(impl, monkeypatch):
    i = make_inputs(Case(lengths=(70, 70), d=8, m=8, inject=True), torch.float32)
    k, eta = F.normalize(i["k"], dim=-1), 2 * i["beta"]
    alpha = i["log_alpha"].exp()[..., None]
    wanted, state = naive(monkeypatch).recurrent_momentum_delta_rule_ref(
        i["q"], k, i["v"], i["log_alpha"], i["gamma"].log(), p=alpha * k, beta=i["inject"], eta=eta, scale=1.0,
        initial_S=i["S"].mT, initial_M=-i["M"].mT, output_final_state=True,
    )  # fmt: skip
    y, end = muon_memory(
        i["q"], k, i["v"], i["log_alpha"], eta, muon=Muon.residual(gamma=i["gamma"]), inject=i["inject"],
        state=MemoryState(i["S"], i["M"]), impl=impl,
    )  # fmt: skip
    assert difference(y, wanted) < 1e-5
    assert difference(end.S, state[0].mT) < 1e-5
    assert difference(end.M, -state[1].mT) < 1e-5


def deltanet_gates(length: int, bounds: bool, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw Momentum DeltaNet's gates as its mixer does; with `bounds`, each at one of its two ends."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: float, high: float) -> torch.Tensor:
        x = torch.rand(1, length, 2, generator=generator, dtype=torch.float64)
        return low + (high - low) * (x > 0.5) if bounds else low + (high - low) * x

    eps = draw(0.0, 2.0)
    square = (eps * draw(0.05, 4.0)).square()
    return {
        "log_alpha": -draw(0.0, 0.1) - torch.log1p(square),
        "beta": eps,
        "inject": draw(0.0, 1.0) * square / (1 + square),
        "gamma": draw(-2.0, 0.0).exp(),
    }


@pytest.mark.parametrize("bounds", [False, True], ids=["random gates", "gates at their bounds"])
@pytest.mark.parametrize("impl", ["native", "chunked"])
def test_65536_steps_of_momentum_deltanet_in_bfloat16(impl, bounds):
    length, m = 65536, 8
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, length, 2, m, generator=generator).bfloat16()
    k = F.normalize(k.float(), dim=-1).bfloat16()
    gates = {name: gate.float() for name, gate in deltanet_gates(length, bounds).items()}
    wide, narrow = {}, {}
    for found, dtype in ((wide, torch.float64), (narrow, torch.bfloat16)):
        g = {name: x.double() if dtype == torch.float64 else x for name, x in gates.items()}
        y, state = muon_memory(
            *(x.to(dtype) for x in (q, k, v)), g["log_alpha"], g["beta"], muon=Muon.residual(gamma=g["gamma"]),
            inject=g["inject"], impl="native" if dtype == torch.float64 else impl,
        )  # fmt: skip
        found |= {"y": y, "S": state.S, "M": state.M}
    assert all(x.isfinite().all() for x in narrow.values())
    assert_close(narrow, wide, TOLERANCE[torch.bfloat16])


# ---- the experiment: Newton-Schulz at chunk ends


@pytest.mark.parametrize("orthogonalize", ["update", "read"])
@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_orthogonalized_chunks_equal_the_reference(orthogonalize, layout):
    packed = layout == "packed"
    case = Case(
        muon=Muon(gamma=0.5, orthogonalize=orthogonalize),
        lengths=(150, 3, 0, 64, 65) if packed else (150, 150),
        packed=packed,
        gamma="float",
    )
    inputs = make_inputs(case)
    wanted = results(case, inputs, "reference")
    assert_close(results(case, inputs, "chunked"), wanted, TOLERANCE[torch.float64])
    plain = results(Case(muon=Muon(gamma=0.5), lengths=case.lengths, packed=packed, gamma="float"), inputs, "reference")
    assert difference(wanted["y"], plain["y"]) > 1e-3


def test_orthogonalized_update_is_the_definition():
    case = Case(muon=Muon(gamma=0.5, orthogonalize="update"), lengths=(64,), gamma="float")
    i = make_inputs(case)
    _, plain = call(Case(muon=Muon(gamma=0.5), lengths=(64,), gamma="float"), i, "reference")
    _, found = call(case, i, "reference")
    update = plain.S - i["S"]
    N = newton_schulz(update)
    scale = update.norm(dim=(-2, -1), keepdim=True) / N.norm(dim=(-2, -1), keepdim=True)
    torch.testing.assert_close(found.S, i["S"] + scale * N, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.M, plain.M)


def test_orthogonalizing_flattens_the_spectrum_keeps_the_norm_and_zero():
    X = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X[:, :, 0] *= 4
    found = orthogonal.orthogonalized(X)
    torch.testing.assert_close(found.norm(dim=(-2, -1)), X.norm(dim=(-2, -1)))
    before, after = (torch.linalg.svdvals(x) for x in (X, found))
    assert (after[:, 0] / after[:, -1] < before[:, 0] / before[:, -1]).all()
    zero = torch.zeros(3, 4, requires_grad=True)
    orthogonal.orthogonalized(zero).sum().backward()
    assert zero.grad.isfinite().all()


def test_only_reference_and_chunked_orthogonalize():
    case = Case(muon=Muon(orthogonalize="read"), gamma="float")
    inputs = make_inputs(case)
    for impl in ("native", "scan"):
        with pytest.raises(ValueError, match="orthogonalize"):
            call(case, inputs, impl)
    assert torch.equal(call(case, inputs, "auto")[0], call(case, inputs, "chunked")[0])
