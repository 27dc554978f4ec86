"""The paper's propositions and corollaries, one test each, with its name."""

from __future__ import annotations

import pytest
import torch

from muonssm.ops import Muon, muon_memory, newton_schulz
from muonssm.ops.memory import scan
from muonssm.ops.memory.types import MemorySteps
from muonssm.ops.newton_schulz import A, B, C, rho, write_scale

from .cases import Case, make_inputs

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def memory_steps(L: int = 6, d: int = 4, m: int = 3) -> tuple[MemorySteps, torch.Tensor, torch.Tensor]:
    i = make_inputs(Case(lengths=(L,), heads=1, d=d, m=m))
    write = write_scale(i["k"], i["v"], i["beta"], Muon())
    u = write[..., None] * i["v"]
    mu = torch.ones(1, 1, 1, dtype=torch.float64)
    return MemorySteps(i["q"], i["k"], u, i["log_alpha"], i["beta"], None, i["gamma"], mu), i["S"], i["M"]


def test_proposition_block_affine_recurrence():
    """Proposition 1: Z_t = Z_{t-1} Phi_t + Psi_t gives S_t = S_{t-1} D_t + M_t, M_t = gamma M_{t-1} + U_t."""
    steps, S, M = memory_steps()
    Phi, Psi = scan.block_affine(steps)
    Z = torch.cat((S, M), dim=-1)
    identity = torch.eye(3, dtype=torch.float64)
    for t in range(6):
        k, e = steps.k[:, t, :, :, None], steps.erase[:, t, :, None, None]
        D = steps.log_alpha[:, t, :, None, None].exp() * (identity - e * k * k.mT)
        M = steps.gamma[:, t, :, None, None] * M + steps.u[:, t, :, :, None] * k.mT
        S = S @ D + M
        Z = Z @ Phi[:, t] + Psi[:, t]
        torch.testing.assert_close(Z, torch.cat((S, M), dim=-1), **EXACT)


def test_remark_parallel_training_the_operator_is_associative():
    """Remark 1 and A.1: ((a + b) + c) = (a + (b + c)) for (Phi_i, Psi_i) + (Phi_j, Psi_j)."""
    a, b, c = ((random(2, 6, 6, seed=s), random(2, 4, 6, seed=s + 10)) for s in range(3))
    left = scan.compose(scan.compose(a, b), c)
    right = scan.compose(a, scan.compose(b, c))
    torch.testing.assert_close(left, right, **EXACT)


def test_proposition_gradient_propagation():
    """Proposition 2: dL/dZ_{t-1} = dL/dZ_T [[prod D^T, sum prod D^T gamma^(k-t+1)], [0, gamma^(T-t+1)]]."""
    T, d, m, gamma = 7, 4, 3, 0.8
    steps, S, M = memory_steps(T, d, m)
    steps = steps._replace(gamma=torch.full((1, 1, 1), gamma, dtype=torch.float64))
    S, M = S.requires_grad_(), M.requires_grad_()
    Phi, Psi = scan.block_affine(steps)
    Z = torch.cat((S, M), dim=-1)
    for t in range(T):
        Z = Z @ Phi[:, t] + Psi[:, t]
    dZ = random(*Z.shape, seed=3)
    by_autograd = torch.cat(torch.autograd.grad((Z * dZ).sum(), (S, M)), dim=-1)

    D = Phi[0, :, 0, :m, :m]  # [T, m, m]
    identity = torch.eye(m, dtype=torch.float64)

    def product(first: int) -> torch.Tensor:
        """D_T^T D_{T-1}^T ... D_first^T (steps from 0), empty if first is T."""
        result = identity
        for n in reversed(range(first, T)):
            result = result @ D[n].mT
        return result

    top_right = sum(product(k + 1) * gamma ** (k + 1) for k in range(T))
    block = torch.cat(
        (
            torch.cat((product(0), top_right), dim=-1),
            torch.cat((torch.zeros_like(identity), identity * gamma**T), dim=-1),
        )
    )
    torch.testing.assert_close(by_autograd, dZ @ block, **EXACT)


def test_remark_gradient_preservation_via_scalar_momentum():
    """Remark 2: where alpha kills S within a step, the gradient from M_T still reaches M_0 as gamma^T."""
    L, gamma = 40, 0.99
    q, k, v = random(1, L, 1, 3), random(1, L, 1, 3, seed=1), random(1, L, 1, 4, seed=2)
    S, M = random(1, 1, 4, 3).requires_grad_(), random(1, 1, 4, 3, seed=5).requires_grad_()
    log_alpha, beta = torch.full((1, L, 1), -50.0, dtype=torch.float64), torch.ones(1, L, 1, dtype=torch.float64)
    _, end = muon_memory(q, k, v, log_alpha, beta, muon=Muon(gamma=gamma), state=(S, M))
    dS, dM = torch.autograd.grad(end.M.sum() + end.S.sum(), (S, M))
    assert dS.abs().max() < 1e-300**0.5
    torch.testing.assert_close(dM, torch.full_like(dM, 2 * gamma**L), rtol=1e-10, atol=0)


def test_corollary_spectral_conditioning_of_updates():
    """Corollary 1: rho >= 0 on [0, 1], maximum 1.2 near 0.5545, rho(1) = 0.701."""
    s = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    values = rho(s)
    assert values.min() == 0.0
    assert (values[1:] > 0).all()
    assert values.max().item() == pytest.approx(1.2, abs=5e-3)
    assert s[values.argmax()].item() == pytest.approx(0.5545, abs=1e-4)
    assert rho(torch.tensor(1.0, dtype=torch.float64)).item() == pytest.approx(0.701, abs=1e-12)
    assert rho(torch.tensor(1.0, dtype=torch.float64), steps=5).item() == pytest.approx(0.6964, abs=5e-5)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_corollary_spectral_conditioning_singular_values_and_rank(shape, steps):
    """Corollary 1 on matrices: singular values become rho of them, are at most 1 + eps_u, and none vanishes."""
    X = torch.stack([random(shape[0], r, seed=r) @ random(r, shape[1], seed=r + 9) for r in (1, 2, 4)])
    before = torch.linalg.svdvals(X / torch.linalg.matrix_norm(X, keepdim=True))
    after = torch.linalg.svdvals(newton_schulz(X, steps))
    torch.testing.assert_close(after, rho(before, steps).sort(dim=-1, descending=True).values, rtol=1e-9, atol=1e-11)
    assert after.max() <= 1.205
    rank = torch.linalg.matrix_rank(newton_schulz(X, steps), rtol=1e-10)  # five steps lift rounding by a^5 = 485
    assert torch.equal(rank, torch.tensor([1, 2, 4]))


@pytest.mark.parametrize(("d", "m"), [(4, 3), (3, 5)])
def test_proposition_ns_jacobian(d, m):
    """Proposition 3: at a unit rank-one X the Jacobian has eigenvalues 0, a+b+c, a, 1, d+m-2 and (d-1)(m-1) times.

    The eigenvalue a lives on u_perp w_perp^T, which no change of v or k reaches to first order: see the next test.
    """
    u, w = (x / x.norm() for x in (random(d), random(m, seed=1)))
    X = torch.outer(u, w)
    jacobian = torch.autograd.functional.jacobian(newton_schulz, X).reshape(d * m, d * m)
    found = torch.linalg.eigvalsh((jacobian + jacobian.mT) / 2)
    wanted = [0.0] + [A + B + C] * (d + m - 2) + [A] * ((d - 1) * (m - 1))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(jacobian, jacobian.mT, rtol=1e-9, atol=1e-9)

    frobenius = torch.autograd.functional.jacobian(lambda x: newton_schulz(x, steps=0), X).reshape(d * m, d * m)
    wanted = torch.tensor([0.0] + [1.0] * (d * m - 1), dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.eigvalsh(frobenius), wanted, rtol=1e-9, atol=1e-9)


def test_ns_jacobian_on_rank_one_writes_is_0701_times_frobenius():
    """Gradients of a rank-one write in v, k and beta never see the eigenvalue a: they are 0.701 times Frobenius'."""
    v, k = random(4).requires_grad_(), random(3, seed=1).requires_grad_()
    weight = random(4, 3, seed=2)
    by_ns, by_frobenius = (
        torch.autograd.grad((newton_schulz(torch.outer(v, k), steps) * weight).sum(), (v, k)) for steps in (1, 0)
    )
    for ns, frobenius in zip(by_ns, by_frobenius, strict=True):
        torch.testing.assert_close(ns, (A + B + C) * frobenius, **EXACT)


def test_proposition_rank_enrichment():
    """Proposition 4: rank(M_t) = min(t, d, m) for generic writes."""
    d, m, L = 5, 4, 8
    q, k, v = random(1, L, 1, m), random(1, L, 1, m, seed=1), random(1, L, 1, d, seed=2)
    log_alpha, beta = torch.zeros(1, L, 1, dtype=torch.float64), torch.full((1, L, 1), 0.5, dtype=torch.float64)
    for t in range(1, L + 1):
        _, state = muon_memory(*(x[:, :t] for x in (q, k, v, log_alpha, beta)))
        assert torch.linalg.matrix_rank(state.M).item() == min(t, d, m)


def test_proposition_rank_enrichment_momentum_expansion():
    """Eq. 8: M_t = sum_s gamma^(t-s) NS(tau beta_s v_s k_s^T)."""
    d, m, L, gamma, tau = 5, 4, 8, 0.9, 0.6
    q, k, v = random(1, L, 1, m), random(1, L, 1, m, seed=1), random(1, L, 1, d, seed=2)
    beta = torch.rand(1, L, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, state = muon_memory(q, k, v, -beta, beta, muon=Muon(gamma=gamma, tau=tau))
    X = tau * beta[0, :, 0, None, None] * v[0, :, 0, :, None] * k[0, :, 0, None, :]
    weight = gamma ** torch.arange(L - 1, -1, -1, dtype=torch.float64)
    torch.testing.assert_close(state.M[0, 0], (weight[:, None, None] * newton_schulz(X)).sum(0), **EXACT)


def test_proposition_rank_enrichment_direction_preserving_form():
    """A.5, paragraph 3: NS(X_s) = rho(sigma_s) v_hat k_hat^T, also below the floor delta."""
    v, k = random(5), random(4, seed=1)
    for delta in (1e-6, 100.0):
        X = torch.outer(v, k)
        sigma = X.norm() / max(X.norm().item(), delta)
        torch.testing.assert_close(newton_schulz(X, delta=delta), rho(sigma) * X / X.norm(), **EXACT)
