"""Bad input: each error names the argument, what it was, and what it may be."""

from __future__ import annotations

import pytest
import torch

from muonssm.ops import IMPLEMENTATIONS, MemoryState, Muon, muon_memory, muon_selective_scan, newton_schulz
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


STATE = MemoryState(torch.zeros(B, H, d, m), torch.zeros(B, H, d, m))
PACKED = {
    "q": torch.randn(1, L, H, m),
    "k": torch.randn(1, L, H, m),
    "v": torch.randn(1, L, H, d),
    "log_alpha": -torch.rand(1, L, H),
    "beta": torch.rand(1, L, H),
}

MEMORY_ERRORS = {
    "rank": ({"q": torch.randn(B, L, m)}, ValueError, r"q has shape \[2, 6, 4\]; it may be \[B, L, H, m\]"),
    "size": (
        {"k": torch.randn(B, L, H, m + 1)},
        ValueError,
        r"k has shape \[2, 6, 3, 5\].*m is 5; it may be 4, as in q",
    ),
    "gate size": ({"beta": torch.rand(B, L, H + 1)}, ValueError, r"beta has shape .*H is 4; it may be 3, as in q"),
    "length": ({"v": torch.randn(B, L - 1, H, d)}, ValueError, r"v has shape .*L is 5; it may be 6"),
    "integers": (
        {"v": torch.ones(B, L, H, d, dtype=torch.int64)},
        TypeError,
        r"v is a tensor of torch.int64; it may be",
    ),
    "complex": ({"q": torch.ones(B, L, H, m, dtype=torch.complex64)}, TypeError, r"q is a tensor of torch.complex64"),
    "no tensor": ({"beta": [1.0]}, TypeError, r"beta is of type list; it may be a floating-point tensor"),
    "device": ({"v": torch.randn(B, L, H, d, device="meta")}, ValueError, r"v is on meta; it may be on cpu, like q"),
    "positive log": (
        {"log_alpha": torch.full((B, L, H), 0.5)},
        ValueError,
        r"log_alpha has a value of 0.5; it may be <= 0",
    ),
    "state shape": (
        {"state": MemoryState(STATE.S[:1], STATE.M)},
        ValueError,
        r"state.S has shape \[1, 3, 5, 4\]; it may be \[2, 3, 5, 4\]",
    ),
    "state momentum": ({"state": (STATE.S, STATE.M.mT)}, ValueError, r"state.M has shape \[2, 3, 4, 5\]; it may be"),
    "state type": ({"state": STATE.S}, TypeError, r"state is of type Tensor; it may be None or a MemoryState"),
    "state integers": ({"state": (STATE.S.int(), STATE.M)}, TypeError, r"state.S is of torch.int32; it may be"),
    "state device": ({"state": (STATE.S.to("meta"), STATE.M)}, ValueError, r"state.S is on meta; it may be on cpu"),
    "impl": ({"impl": "cuda"}, ValueError, r"impl is 'cuda'; it may be 'auto' or one of \['chunked'"),
    "muon": ({"muon": 0.9}, TypeError, r"muon is of type float; it may be a Muon"),
    "gamma shape": (
        {"muon": Muon(gamma=torch.rand(H + 1))},
        ValueError,
        r"muon.gamma has shape \[4\]; it may be .*\[3\]",
    ),
    "gamma device": (
        {"muon": Muon(gamma=torch.rand(H, device="meta"))},
        ValueError,
        r"muon.gamma is on meta; it may be",
    ),
    "eta": ({"eta": float("nan")}, ValueError, r"eta is nan; it may be a finite float"),
    "eta tensor": ({"eta": torch.ones(())}, TypeError, r"eta is of type Tensor; it may be a finite float"),
    "eta text": ({"eta": "1"}, TypeError, r"eta is of type str; it may be a finite float"),
    "impl list": ({"impl": ["chunked"]}, ValueError, r"impl is \['chunked'\]; it may be 'auto' or one of"),
    "no columns": (
        {"q": torch.randn(B, L, H, 0), "k": torch.randn(B, L, H, 0)},
        ValueError,
        r"q has shape \[2, 6, 3, 0\], so m is 0; it may be 1 or more",
    ),
    "float8": ({"v": torch.randn(B, L, H, d).to(torch.float8_e5m2)}, TypeError, r"v is a tensor of torch.float8_e5m2"),
    "packed batch": (
        {"cu_seqlens": torch.tensor([0, L])},
        ValueError,
        r"the batch size is 2; with cu_seqlens it may be 1",
    ),
    "cu_seqlens end": (
        PACKED | {"cu_seqlens": torch.tensor([0, 3, 5])},
        ValueError,
        r"cu_seqlens is \[0, 3, 5\]; .*L = 6",
    ),
    "cu_seqlens start": (
        PACKED | {"cu_seqlens": torch.tensor([1, 6])},
        ValueError,
        r"cu_seqlens is \[1, 6\]; it may start",
    ),
    "cu_seqlens order": (PACKED | {"cu_seqlens": torch.tensor([0, 4, 2, 6])}, ValueError, r"cu_seqlens .* never fall"),
    "cu_seqlens type": (
        PACKED | {"cu_seqlens": torch.tensor([0.0, 6.0])},
        TypeError,
        r"cu_seqlens is of torch.float32",
    ),
    "cu_seqlens list": (PACKED | {"cu_seqlens": [0, 6]}, TypeError, r"cu_seqlens is of list; it may be an int32"),
    "cu_seqlens shape": (PACKED | {"cu_seqlens": torch.tensor([[0, 6]])}, ValueError, r"cu_seqlens has shape \[1, 2\]"),
    "cu_seqlens short": (
        PACKED | {"cu_seqlens": torch.tensor([0])},
        ValueError,
        r"cu_seqlens has shape \[1\]; it may be",
    ),
    "packed state": (
        PACKED | {"cu_seqlens": torch.tensor([0, 2, 4, 6]), "state": STATE},
        ValueError,
        r"state.S has shape \[2, 3, 5, 4\]; it may be \[3, 3, 5, 4\]",
    ),
}


@pytest.mark.parametrize("name", MEMORY_ERRORS)
def test_memory_names_what_is_wrong(name):
    changes, error, message = MEMORY_ERRORS[name]
    with pytest.raises(error, match=message):
        memory(**changes)


SELECTIVE_ERRORS = {
    "rank": ({"x": torch.randn(B, L, 1, D)}, ValueError, r"x has shape \[2, 6, 1, 5\]; it may be \[B, L, D\]"),
    "A size": ({"A": -torch.rand(D, N + 1)}, ValueError, r"B has shape .*N is 4; it may be 5, as in A"),
    "A sign": ({"A": torch.ones(D, N)}, ValueError, r"A has a value of 1; it may be <= 0"),
    "dt sign": ({"dt": -torch.ones(B, L, D)}, ValueError, r"dt has a value of -1; it may be >= 0, a step size"),
    "state": ({"state": STATE}, ValueError, r"state.S has shape \[2, 3, 5, 4\]; it may be \[2, 5, 4\]"),
    "gamma": ({"muon": Muon(gamma=torch.rand(D))}, ValueError, r"muon.gamma has shape \[5\]; .*\[1\] or \[2, 6, 1\]"),
    "impl": ({"impl": "fast"}, ValueError, r"impl is 'fast'; it may be"),
    "C": ({"C": None}, TypeError, r"C is of type NoneType; it may be a floating-point tensor"),
}


@pytest.mark.parametrize("name", SELECTIVE_ERRORS)
def test_selective_scan_names_what_is_wrong(name):
    changes, error, message = SELECTIVE_ERRORS[name]
    with pytest.raises(error, match=message):
        selective(**changes)


MUON_ERRORS = {
    "gamma above": ({"gamma": 1.5}, ValueError, r"gamma is 1.5; it may be in \[0, 1\]"),
    "gamma below": ({"gamma": -0.1}, ValueError, r"gamma is -0.1; it may be"),
    "gamma nan": ({"gamma": float("nan")}, ValueError, r"gamma is nan; it may be"),
    "gamma tensor": ({"gamma": torch.tensor([0.5, 1.2])}, ValueError, r"gamma has values from 0.5 to 1.2; they may be"),
    "gamma tensor nan": ({"gamma": torch.tensor([0.5, torch.nan])}, ValueError, r"gamma has values from nan"),
    "gamma integers": ({"gamma": torch.ones(3, dtype=torch.int64)}, TypeError, r"gamma is a tensor of torch.int64"),
    "gamma string": ({"gamma": "0.9"}, TypeError, r"gamma is of type str; it may be a float"),
    "tau": ({"tau": 0.0}, ValueError, r"tau is 0.0; it may be a finite float > 0"),
    "tau infinite": ({"tau": float("inf")}, ValueError, r"tau is inf; it may be"),
    "delta": ({"delta": -1e-6}, ValueError, r"delta is -1e-06; it may be"),
    "delta type": ({"delta": None}, TypeError, r"delta is of type NoneType; it may be"),
    "normalization": ({"normalization": "svd"}, ValueError, r"normalization is 'svd'; it may be one of"),
    "ns_steps": ({"ns_steps": 0}, ValueError, r"ns_steps is 0; it may be an integer >= 1"),
    "ns_steps float": ({"ns_steps": 1.0}, ValueError, r"ns_steps is 1.0; it may be"),
    "tau_position": ({"tau_position": "left"}, ValueError, r"tau_position is 'left'; it may be one of"),
}


@pytest.mark.parametrize("name", MUON_ERRORS)
def test_muon_names_what_is_wrong(name):
    changes, error, message = MUON_ERRORS[name]
    with pytest.raises(error, match=message):
        Muon(**changes)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(3),), ValueError, r"X has shape \[3\]; it may be \[..., d, m\]"),
        ((torch.ones(3, 3, dtype=torch.int32),), TypeError, r"X is of torch.int32"),
        (([[1.0]],), TypeError, r"X is of list"),
        ((torch.ones(3, 3), -1), ValueError, r"steps is -1; it may be"),
        ((torch.ones(3, 3), 1, 0.0), ValueError, r"delta is 0.0; it may be"),
    ],
)
def test_newton_schulz_names_what_is_wrong(arguments, error, message):
    with pytest.raises(error, match=message):
        newton_schulz(*arguments)


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


def test_a_named_implementation_is_never_replaced(monkeypatch):
    """Where `chunked` cannot run, asking for it is an error, and `auto` goes on to the next."""
    chunked = IMPLEMENTATIONS["chunked"]
    native = IMPLEMENTATIONS["native"]
    monkeypatch.setattr(type(native), "unsupported", lambda self, problem: "not here")
    monkeypatch.setattr(type(chunked), "unsupported", lambda self, problem: "no" if self is chunked else None)
    with pytest.raises(
        ValueError, match="impl is 'chunked', which cannot run this: no; impl='auto' picks one that can"
    ):
        memory(impl="chunked")
    memory(impl="auto")
    for implementation in (native, chunked):
        monkeypatch.setattr(type(implementation), "unsupported", lambda self, problem: f"{self.name} is out")
    with pytest.raises(
        ValueError, match="no implementation can run this: native: native is out; chunked: chunked is out; reference: "
    ):
        memory(impl="auto")


def test_choice_is_a_function_of_the_problem_alone(monkeypatch):
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
    with pytest.raises(ValueError, match="triton is not installed"):
        choose("triton", Problem(cuda, torch.float32, 2))
    with pytest.raises(ValueError, match=r"the Triton kernels run on a GPU \(CUDA or ROCm\), not on cpu"):
        choose("triton", Problem(cpu, torch.float32, 2))
    assert auto_order(Problem(cpu, torch.float64, 100)) == ("native", "chunked", "reference")
    with pytest.raises(ValueError, match="the C\\+\\+ kernels run on a CPU, not on cuda"):
        choose("native", Problem(cuda, torch.float32, 2))
    for name in IMPLEMENTATIONS.keys() - {"triton"}:
        assert choose(name, Problem(cpu, torch.float32, 5)).name == name
    mps = Problem(torch.device("mps"), torch.float64, 5)
    with pytest.raises(ValueError, match="the mps device has no float64"):
        choose("chunked", mps)
