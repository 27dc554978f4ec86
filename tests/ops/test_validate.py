"""Bad arguments raise errors of the form "NAME must be ..., got ..."."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import muonssm.ops
from muonssm.ops import IMPLEMENTATIONS, MemoryState, Muon, muon_memory, muon_selective_scan, newton_schulz
from muonssm.ops.causal_conv import causal_convolution
from muonssm.ops.dispatch import Problem, auto_order, choose
from muonssm.ops.triton import support

B, L, H, m, d, D, N = 2, 6, 3, 4, 5, 5, 4


def memory(**changes):
    arguments = {
        "q": torch.randn(B, L, H, m),
        "k": torch.randn(B, L, H, m),
        "v": torch.randn(B, L, H, d),
        "log_alpha": -torch.rand(B, L, H),
        "beta": torch.rand(B, L, H),
    }
    return muon_memory(**(arguments | changes))


def selective(**changes):
    arguments = {
        "x": torch.randn(B, L, D),
        "dt": torch.rand(B, L, D),
        "A": -torch.rand(D, N),
        "B": torch.randn(B, L, N),
        "C": torch.randn(B, L, N),
    }
    return muon_selective_scan(**(arguments | changes))


def check_error(function, error: type[Exception], argument: str) -> None:
    """`function` raises exactly `error`, and the text names the argument, what it must be and what it was."""
    with pytest.raises(error, match=rf"^{re.escape(argument)} must .*, got ") as raised:
        function()
    assert type(raised.value) is error
    assert "it may" not in str(raised.value)


STATE = MemoryState(torch.zeros(B, H, d, m), torch.zeros(B, H, d, m))
PACKED = {
    "q": torch.randn(1, L, H, m),
    "k": torch.randn(1, L, H, m),
    "v": torch.randn(1, L, H, d),
    "log_alpha": -torch.rand(1, L, H),
    "beta": torch.rand(1, L, H),
}

MEMORY_ERRORS = {
    "rank": ({"q": torch.randn(B, L, m)}, ValueError, "q"),
    "size": ({"k": torch.randn(B, L, H, m + 1)}, ValueError, "k"),
    "gate size": ({"beta": torch.rand(B, L, H + 1)}, ValueError, "beta"),
    "length": ({"v": torch.randn(B, L - 1, H, d)}, ValueError, "v"),
    "inject size": ({"inject": torch.rand(B, L, H + 1)}, ValueError, "inject"),
    "inject number": ({"inject": 0.5}, TypeError, "inject"),
    "inject integers": ({"inject": torch.ones(B, L, H, dtype=torch.int64)}, TypeError, "inject"),
    "gamma of two axes": ({"muon": Muon(gamma=torch.rand(L, H))}, ValueError, "muon.gamma"),
    "integers": ({"v": torch.ones(B, L, H, d, dtype=torch.int64)}, TypeError, "v"),
    "complex": ({"q": torch.ones(B, L, H, m, dtype=torch.complex64)}, TypeError, "q"),
    "float8": ({"v": torch.randn(B, L, H, d).to(torch.float8_e5m2)}, TypeError, "v"),
    "no tensor": ({"beta": [1.0]}, TypeError, "beta"),
    "device": ({"v": torch.randn(B, L, H, d, device="meta")}, ValueError, "v"),
    "no columns": ({"q": torch.randn(B, L, H, 0), "k": torch.randn(B, L, H, 0)}, ValueError, "q"),
    "sparse": ({"v": torch.randn(B, L, H, d).to_sparse()}, TypeError, "v"),
    "mkldnn": ({"q": torch.randn(B, L, H, m).to_mkldnn()}, TypeError, "q"),
    "nested": ({"k": torch.nested.nested_tensor([torch.randn(L, H, m)] * B)}, TypeError, "k"),
    "sparse state": ({"state": (STATE.S.to_sparse(), STATE.M)}, TypeError, "state.S"),
    "positive log": ({"log_alpha": torch.full((B, L, H), 0.5)}, ValueError, "log_alpha"),
    "state shape": ({"state": MemoryState(STATE.S[:1], STATE.M)}, ValueError, "state.S"),
    "state momentum": ({"state": (STATE.S, STATE.M.mT)}, ValueError, "state.M"),
    "state type": ({"state": STATE.S}, TypeError, "state"),
    "state integers": ({"state": (STATE.S.int(), STATE.M)}, TypeError, "state.S"),
    "state device": ({"state": (STATE.S.to("meta"), STATE.M)}, ValueError, "state.S"),
    "impl": ({"impl": "cuda"}, ValueError, "impl"),
    "impl list": ({"impl": ["chunked"]}, ValueError, "impl"),
    "muon": ({"muon": 0.9}, TypeError, "muon"),
    "gamma shape": ({"muon": Muon(gamma=torch.rand(H + 1))}, ValueError, "muon.gamma"),
    "gamma device": ({"muon": Muon(gamma=torch.rand(H, device="meta"))}, ValueError, "muon.gamma"),
    "eta": ({"eta": float("nan")}, ValueError, "eta"),
    "eta tensor": ({"eta": torch.ones(())}, TypeError, "eta"),
    "eta text": ({"eta": "1"}, TypeError, "eta"),
    "packed batch": ({"cu_seqlens": torch.tensor([0, L])}, ValueError, "the batch size"),
    "cu_seqlens end": (PACKED | {"cu_seqlens": torch.tensor([0, 3, 5])}, ValueError, "cu_seqlens"),
    "cu_seqlens start": (PACKED | {"cu_seqlens": torch.tensor([1, 6])}, ValueError, "cu_seqlens"),
    "cu_seqlens order": (PACKED | {"cu_seqlens": torch.tensor([0, 4, 2, 6])}, ValueError, "cu_seqlens"),
    "cu_seqlens type": (PACKED | {"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens"),
    "cu_seqlens list": (PACKED | {"cu_seqlens": [0, 6]}, TypeError, "cu_seqlens"),
    "cu_seqlens shape": (PACKED | {"cu_seqlens": torch.tensor([[0, 6]])}, ValueError, "cu_seqlens"),
    "cu_seqlens short": (PACKED | {"cu_seqlens": torch.tensor([0])}, ValueError, "cu_seqlens"),
    "packed state": (PACKED | {"cu_seqlens": torch.tensor([0, 2, 4, 6]), "state": STATE}, ValueError, "state.S"),
}


@pytest.mark.parametrize("name", MEMORY_ERRORS)
def test_errors_of_muon_memory(name):
    changes, error, argument = MEMORY_ERRORS[name]
    check_error(lambda: memory(**changes), error, argument)


SELECTIVE_ERRORS = {
    "rank": ({"x": torch.randn(B, L, 1, D)}, ValueError, "x"),
    "A size": ({"A": -torch.rand(D, N + 1)}, ValueError, "B"),
    "A sign": ({"A": torch.ones(D, N)}, ValueError, "A"),
    "dt sign": ({"dt": -torch.ones(B, L, D)}, ValueError, "dt"),
    "state": ({"state": STATE}, ValueError, "state.S"),
    "gamma": ({"muon": Muon(gamma=torch.rand(D))}, ValueError, "muon.gamma"),
    "impl": ({"impl": "fast"}, ValueError, "impl"),
    "C": ({"C": None}, TypeError, "C"),
}


@pytest.mark.parametrize("name", SELECTIVE_ERRORS)
def test_errors_of_muon_selective_scan(name):
    changes, error, argument = SELECTIVE_ERRORS[name]
    check_error(lambda: selective(**changes), error, argument)


MUON_ERRORS = {
    "gamma above": ({"gamma": 1.5}, ValueError, "gamma"),
    "gamma below": ({"gamma": -0.1}, ValueError, "gamma"),
    "gamma nan": ({"gamma": float("nan")}, ValueError, "gamma"),
    "gamma tensor": ({"gamma": torch.tensor([0.5, 1.2])}, ValueError, "gamma"),
    "gamma tensor nan": ({"gamma": torch.tensor([0.5, torch.nan])}, ValueError, "gamma"),
    "gamma integers": ({"gamma": torch.ones(3, dtype=torch.int64)}, TypeError, "gamma"),
    "gamma string": ({"gamma": "0.9"}, TypeError, "gamma"),
    "tau": ({"tau": 0.0}, ValueError, "tau"),
    "tau infinite": ({"tau": float("inf")}, ValueError, "tau"),
    "delta": ({"delta": -1e-6}, ValueError, "delta"),
    "delta type": ({"delta": None}, TypeError, "delta"),
    "normalization": ({"normalization": "svd"}, ValueError, "normalization"),
    "ns_steps": ({"ns_steps": 0}, ValueError, "ns_steps"),
    "ns_steps float": ({"ns_steps": 1.0}, TypeError, "ns_steps"),
    "tau_position": ({"tau_position": "left"}, ValueError, "tau_position"),
    "correction": ({"correction": "left"}, ValueError, "correction"),
    "beta_position": ({"beta_position": None}, ValueError, "beta_position"),
    "orthogonalize": ({"orthogonalize": "all"}, ValueError, "orthogonalize"),
}


@pytest.mark.parametrize("kind", ["sparse", "mkldnn"])
def test_a_decoding_step_refuses_other_layouts(kind):
    one = {name: torch.rand(B, 1, H, size) for name, size in (("q", m), ("k", m), ("v", d))}
    gates = {name: -torch.rand(B, 1, H) for name in ("log_alpha", "beta")}
    one["k"] = one["k"].to_sparse() if kind == "sparse" else one["k"].to_mkldnn()
    with torch.no_grad():
        check_error(lambda: muon_memory(**one, **gates, state=STATE), TypeError, "k")


@pytest.mark.parametrize(
    "change", [torch.Tensor.to_sparse, torch.Tensor.to_mkldnn, lambda x: torch.nested.nested_tensor(list(x))]
)
def test_other_layouts_are_refused_by_name(change):
    """By the functions beside the operators too."""
    check_error(lambda: newton_schulz(change(torch.randn(B, m, m))), TypeError, "X")
    check_error(lambda: causal_convolution(change(torch.randn(B, L, m)), torch.randn(m, 1, 4)), TypeError, "x")


@pytest.mark.parametrize("value", [torch.nan, -0.5, 1.5])
def test_a_gamma_that_changed_after_muon_was_made_is_checked_again(value):
    gamma = torch.full((H,), 0.5)
    muon = Muon(gamma=gamma)
    memory(muon=muon)
    gamma[0] = value
    check_error(lambda: memory(muon=muon), ValueError, "muon.gamma")


def test_a_gamma_of_a_layer_is_not_checked_so_that_nan_shows_in_the_output():
    y, _ = memory(muon=Muon().with_gamma(torch.full((B, L, H), torch.nan)))
    assert y.isnan().all()


@pytest.mark.parametrize("name", MUON_ERRORS)
def test_errors_of_muon(name):
    changes, error, argument = MUON_ERRORS[name]
    check_error(lambda: Muon(**changes), error, argument)
    check_error(lambda: dataclasses.replace(Muon(), **changes), error, argument)


@pytest.mark.parametrize(
    ("arguments", "error", "argument"),
    [
        ((torch.ones(3),), ValueError, "X"),
        ((torch.ones(3, 3, dtype=torch.int32),), TypeError, "X"),
        (([[1.0]],), TypeError, "X"),
        ((torch.ones(3, 3), -1), ValueError, "steps"),
        ((torch.ones(3, 3), 1.5), TypeError, "steps"),
        ((torch.ones(3, 3), 1, 0.0), ValueError, "delta"),
    ],
)
def test_errors_of_newton_schulz(arguments, error, argument):
    check_error(lambda: newton_schulz(*arguments), error, argument)


def test_an_error_shows_the_shape_that_was_given_and_the_one_that_was_expected():
    with pytest.raises(ValueError, match=r"^k .*\[B, L, H, m\] with m = 4, like q, got \[2, 6, 3, 5\]$"):
        memory(k=torch.randn(B, L, H, m + 1))


def test_no_error_of_the_operators_says_it_may_be():
    """The wording is "must be ..., got ..."; the whole package is held to it in tests/test_house.py."""
    sources = sorted(Path(muonssm.ops.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    assert [path.name for path in sources if re.search(r"\b(it|they) may (be|have)\b", path.read_text())] == []


def test_muon_is_a_frozen_value():
    assert Muon() == Muon()
    assert hash(Muon()) == hash(Muon())
    assert Muon() != Muon(gamma=0.5)
    assert Muon() != "Muon()"
    gamma = torch.tensor([0.5, 0.9])
    assert Muon(gamma=gamma) == Muon(gamma=gamma.clone())
    assert Muon(gamma=gamma) != Muon(gamma=gamma / 2)
    assert Muon(gamma=gamma) != Muon()
    with pytest.raises(AttributeError):
        Muon().gamma = 0.5


def limit(monkeypatch, name: str, reason: str) -> None:
    """Make an implementation unable to run anything."""
    limited = dataclasses.replace(IMPLEMENTATIONS[name], limits=lambda problem: reason)
    monkeypatch.setitem(IMPLEMENTATIONS, name, limited)


def test_a_named_implementation_runs_or_raises(monkeypatch):
    """If `chunked` cannot run, naming it is an error, and `auto` takes the next one."""
    limit(monkeypatch, "native", "not built")
    limit(monkeypatch, "chunked", "out of order")
    with pytest.raises(ValueError, match=r"^impl='chunked' .*out of order"):
        memory(impl="chunked")
    memory(impl="auto")
    limit(monkeypatch, "reference", "gone")
    with pytest.raises(ValueError, match=r"^impl='auto' .*native: not built; chunked: out of order; reference: gone"):
        memory(impl="auto")


def test_the_choice_depends_on_the_problem_alone(monkeypatch):
    cpu = torch.device("cpu")
    cuda = torch.device("cuda")
    assert choose("auto", Problem(cpu, torch.float32, 1)).name == "native"
    assert choose("auto", Problem(cpu, torch.float32, 2)).name == "native"
    assert choose("auto", Problem(cpu, torch.float32, 2, transformed=True)).name == "reference"
    assert choose("auto", Problem(cuda, torch.float32, 1)).name == "triton"
    assert choose("auto", Problem(cuda, torch.float32, 2, width=256)).name == "triton"
    assert choose("auto", Problem(cuda, torch.float32, 2, width=257)).name == "chunked"
    assert choose("auto", Problem(cuda, torch.float64, 1)).name == "reference"
    assert choose("auto", Problem(cuda, torch.float64, 2)).name == "chunked"
    monkeypatch.setattr(support, "_importable", lambda: False)
    assert choose("auto", Problem(cuda, torch.float32, 1)).name == "reference"
    assert choose("auto", Problem(cuda, torch.float32, 2)).name == "chunked"
    with pytest.raises(ValueError, match=r"impl='triton' .*not installed"):
        choose("triton", Problem(cuda, torch.float32, 2))
    with pytest.raises(ValueError, match=r"impl='triton' .*cpu"):
        choose("triton", Problem(cpu, torch.float32, 2))
    assert auto_order(Problem(cpu, torch.float64, 100)) == ("native", "chunked", "reference")
    with pytest.raises(ValueError, match=r"impl='native' .*cuda"):
        choose("native", Problem(cuda, torch.float32, 2))
    for name in IMPLEMENTATIONS.keys() - {"triton"}:
        assert choose(name, Problem(cpu, torch.float32, 5)).name == name
    with pytest.raises(ValueError, match=r"impl='chunked' .*mps"):
        choose("chunked", Problem(torch.device("mps"), torch.float64, 5))


def test_every_implementation_stands_under_its_own_name():
    assert all(name == implementation.name for name, implementation in IMPLEMENTATIONS.items())
