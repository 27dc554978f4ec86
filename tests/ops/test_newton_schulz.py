"""Compare the closed form of the write with the dense operator of Definition 1, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from muonssm.ops import Muon, muon_memory, newton_schulz
from muonssm.ops.newton_schulz import write_scale

from .cases import all_combinations
from .test_dispatch import MUONS, dense_write


def problem(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(3, n, generator=generator, dtype=torch.float64) * scale for n in (5, 7))
    return (
        k.requires_grad_(),
        v.requires_grad_(),
        torch.rand(3, generator=generator, dtype=torch.float64).requires_grad_(),
    )


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5])
@pytest.mark.parametrize("name", MUONS)
def test_closed_form_equals_the_dense_operator(name, scale):
    """They agree to 1e-12 in value, and in gradient relative to its natural size (that of beta cancels to zero)."""
    muon, (k, v, beta) = MUONS[name], problem(scale)
    closed = write_scale(k, v, beta, muon)[..., None, None] * v[..., None] * k[..., None, :]
    dense = dense_write(beta[..., None, None] * v[..., None] * k[..., None, :], muon)
    torch.testing.assert_close(closed, dense, rtol=1e-12, atol=1e-12 * dense.abs().max().item())
    weight = torch.randn(dense.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    by_closed, by_dense = (torch.autograd.grad((x * weight).sum(), (k, v, beta)) for x in (closed, dense))
    for c, d, x in zip(by_closed, by_dense, (k, v, beta), strict=True):
        # The natural size of a gradient is value / input; a gradient that cancels is rounding error only.
        size = max(d.abs().max().item(), (dense.abs().max() / x.abs().max()).item())
        torch.testing.assert_close(c, d, rtol=0, atol=1e-12 * size)


def test_write_of_usual_size_is_0701_times_frobenius_and_independent_of_tau_and_beta():
    k, v, beta = (x.detach() for x in problem())
    unit = write_scale(k, v, beta, Muon(normalization="frobenius"))
    for muon in (Muon(), Muon(tau=1.2), Muon(tau=0.1)):
        torch.testing.assert_close(write_scale(k, v, beta, muon), 0.701 * unit, rtol=1e-12, atol=0)
    torch.testing.assert_close(write_scale(k, v, 7 * beta, Muon()), 0.701 * unit, rtol=1e-12, atol=0)
    outside = Muon(tau=0.25, tau_position="outside")
    torch.testing.assert_close(write_scale(k, v, beta, outside), 0.25 * 0.701 * unit, rtol=1e-12, atol=0)


def test_negative_beta_turns_the_write_around():
    k, v, beta = (x.detach() for x in problem())
    torch.testing.assert_close(write_scale(k, v, -beta, Muon()), -write_scale(k, v, beta, Muon()), rtol=0, atol=0)


@all_combinations(
    impl=["reference", "scan", "chunked"],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
    zero=["k", "v", "beta"],
)
def test_zero_write_is_exactly_zero_with_finite_gradients(impl, dtype, zero):
    generator = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(1, 4, 2, s, generator=generator).to(dtype) for n, s in (("q", 5), ("k", 5), ("v", 7))}
    tensors |= {"log_alpha": torch.zeros(1, 4, 2, dtype=dtype), "beta": torch.ones(1, 4, 2, dtype=dtype)}
    tensors[zero] = torch.zeros_like(tensors[zero])
    leaves = [x.requires_grad_() for x in tensors.values()]
    y, state = muon_memory(*leaves, impl=impl)
    assert not y.any()
    assert not state.S.any()
    assert not state.M.any()
    (y.sum() + state.S.sum() + state.M.sum()).backward()
    assert all(x.grad.isfinite().all() for x in leaves)


def test_huge_and_tiny_values_are_normalized_alike():
    k, v = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0, 2.0])
    for scale in (1e-4, 1.0, 1e12, 1e30):  # the squares of 1e30 overflow in float32
        u = write_scale(k, scale * v, torch.ones(()), Muon()) * scale * v
        torch.testing.assert_close(u[:, None] * k, 0.701 * (v / 3)[:, None] * (k / 5), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 1), (1, 3), (2, 2, 4, 3)])
def test_dense_operator_takes_any_batch(shape):
    X = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(X)
    assert result.shape == X.shape
    torch.testing.assert_close(newton_schulz(X.mT), result.mT, rtol=1e-4, atol=1e-6)


def test_dense_operator_keeps_the_dtype_and_works_in_float32_below_it():
    X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert newton_schulz(X).dtype == torch.bfloat16
    assert torch.equal(newton_schulz(X), newton_schulz(X.float()).bfloat16())


def test_dense_operator_of_zero_is_zero_with_a_finite_gradient():
    X = torch.zeros(4, 3, requires_grad=True)
    result = newton_schulz(X)
    result.sum().backward()
    assert not result.any()
    assert X.grad.isfinite().all()
