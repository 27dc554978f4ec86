"""The short causal convolution: kernel and torch against `conv1d`, splits and packed sequences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from muonssm.ops import cpu_library
from muonssm.ops.causal_conv import causal_convolution

from .cases import TOLERANCE, all_combinations

C = 70  # more than one group of channels of the kernel, and not a multiple of a vector


@pytest.fixture(params=["native", "shifts"])
def impl(request, monkeypatch):
    """The C++ kernel, or the torch code that runs without it."""
    if request.param == "shifts":
        monkeypatch.setattr(cpu_library, "unavailable", lambda: "switched off")
    else:
        assert cpu_library.unavailable() is None
    return request.param


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def expected(x, weight, bias, tail, activation):
    """Compute torch's `conv1d` in float64."""
    row = torch.cat([tail, x], dim=1).double().mT
    y = F.conv1d(row, weight.double(), bias.double(), groups=weight.shape[0]).mT
    return F.silu(y) if activation else y


def off(found, wanted):
    return ((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9)).item()


@all_combinations(
    indirect=["impl"],
    impl=["native", "shifts"],
    dtype=TOLERANCE,
    K=[1, 2, 4, 7],
    L=[1, 3, 64, 65, 150],
    activation=["silu", None],
)
def test_equals_torch_convolution_with_gradients(impl, dtype, K, L, activation):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = normal(2, L, C + 9, dtype=dtype).requires_grad_()
    weight, bias = (normal(*shape, seed=1, dtype=wide).requires_grad_() for shape in ((C, 1, K), (C,)))
    tail = normal(2, K - 1, C, seed=2, dtype=dtype).requires_grad_()
    leaves = [x, weight, bias, tail]
    y, rest = causal_convolution(x[..., :C], weight, bias, tail=tail, activation=activation)  # a slice of wider rows
    wanted = expected(x[..., :C], weight, bias, tail, activation)
    assert y.dtype == rest.dtype == dtype
    assert off(y, wanted) < TOLERANCE[dtype]
    assert torch.equal(rest, torch.cat([tail, x[..., :C]], dim=1)[:, L:])
    out = normal(2, L, C, seed=3, dtype=dtype)
    found = torch.autograd.grad(y, leaves, out, retain_graph=True, materialize_grads=True)
    truth = torch.autograd.grad(wanted, leaves, out.double(), materialize_grads=True)
    for gradient, true in zip(found, truth, strict=True):
        assert off(gradient, true) < TOLERANCE[dtype]


def test_packed_sequences_and_splits_are_kept_apart(impl):
    bounds = torch.tensor([0, 0, 1, 3, 70, 140])
    x, weight, bias, tail = normal(1, 140, C), normal(C, 1, 4), normal(C), normal(5, 3, C, seed=5)
    y, rest = causal_convolution(x, weight, bias, tail=tail, cu_seqlens=bounds)
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        alone = causal_convolution(x[:, start:end], weight, bias, tail=tail[i : i + 1])
        assert torch.allclose(y[:, start:end], alone.y, atol=1e-12)
        assert torch.equal(rest[i], alone.tail[0])
    whole = causal_convolution(x, weight, bias)
    state, parts = None, []
    for piece in x.split([1, 1, 2, 60, 76], dim=1):
        part, state = causal_convolution(piece, weight, bias, tail=state)
        parts.append(part)
    assert torch.allclose(torch.cat(parts, dim=1), whole.y, atol=1e-12)
    assert torch.equal(state, whole.tail)


def test_gradcheck_with_tail_and_packing(impl):
    bounds = torch.tensor([0, 2, 2, 9])
    arguments = (normal(1, 9, 3), normal(3, 1, 4), normal(3), normal(3, 3, 3))

    def run(x, weight, bias, tail):
        return causal_convolution(x, weight, bias, tail=tail, cu_seqlens=bounds)

    assert gradcheck(run, tuple(a.requires_grad_() for a in arguments))


def test_strange_layouts_and_threads_change_nothing():
    weight, bias, x = normal(C, 1, 4), normal(C), normal(2, 130, C)
    y = causal_convolution(x, weight, bias).y
    for strange in (x.mT.contiguous().mT, x.flip(0).contiguous().flip(0), torch.cat([x, x], 1)[:, :130]):
        assert torch.equal(causal_convolution(strange, weight, bias).y, y)
    before = torch.get_num_threads()
    gradients = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        w = weight.clone().requires_grad_()
        gradients.append(torch.autograd.grad(causal_convolution(x, w, bias).y.sum(), w)[0])
    torch.set_num_threads(before)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_forward_mode_and_vmap_use_torch():
    x, weight, bias = normal(2, 9, 3), normal(3, 1, 4), normal(3)
    per_row = torch.func.vmap(lambda row: causal_convolution(row[None], weight, bias).y[0])(x)
    assert torch.allclose(per_row, causal_convolution(x, weight, bias).y)


@pytest.mark.full
def test_custom_operator_passes_opcheck():
    from muonssm.ops.causal_conv.native import convolution_native

    tensors = [normal(2, 9, 5), normal(5, 4), normal(5), normal(2, 3, 5)]
    torch.library.opcheck(convolution_native, ([t.requires_grad_() for t in tensors], torch.tensor([0, 9, 18]), True))


def test_errors():
    x, weight = normal(2, 9, 3), normal(3, 1, 4)
    with pytest.raises(ValueError, match=r"^activation must be"):
        causal_convolution(x, weight, activation="relu")
    with pytest.raises(ValueError, match=r"^x must have"):
        causal_convolution(x[..., :2], weight)
    with pytest.raises(ValueError, match=r"^tail must have"):
        causal_convolution(x, weight, tail=normal(2, 4, 3))
