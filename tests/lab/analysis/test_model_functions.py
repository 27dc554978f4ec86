"""Spectra, ranks, gradients and truncation of models whose states are known exactly; replay of every mixer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from muonssm.lab.analysis import (
    condition_number,
    effective_rank,
    gradients,
    memory,
    rank,
    replaying,
    singular_values,
    spectrum,
    truncation,
)
from muonssm.lab.analysis.replay import StateRecorder, Visitor, evenly_spaced
from muonssm.lab.core.scorer import IGNORED
from muonssm.layers import BACKBONES, build_mixer
from muonssm.models.vision import mambavision_micro
from muonssm.ops import IMPLEMENTATIONS, Muon, muon_memory


class Cell(nn.Module):
    """One memory head with fixed inputs: keys e_1, e_2, ..., values `weights[t]` e_t, the same gate at every step.

    The loss is the sum of the output of the last step, whose query is (1, ..., 1).
    """

    def __init__(self, weights, alpha=1.0, muon=None, size=None):
        super().__init__()
        self.impl = "auto"
        self.weights, self.alpha, self.size = weights, alpha, size or len(weights)
        self.muon = Muon.off() if muon is None else muon

    def forward(self, x, labels=None):
        B, L = x.shape[0], len(self.weights)
        keys = torch.eye(max(L, self.size), dtype=x.dtype)[:L, : self.size].expand(B, L, self.size)[:, :, None]
        v = keys * torch.tensor(self.weights, dtype=x.dtype)[:, None, None]
        q = torch.zeros_like(keys)
        q[:, -1] = 1.0
        gate = torch.full((B, L, 1), math.log(self.alpha), dtype=x.dtype)
        y, _ = muon_memory(q, keys, v, gate, torch.ones(B, L, 1), eta=0.0, muon=self.muon, impl=self.impl)
        return {"loss": y.sum() / B, "logits": y[:, -1, 0], "y": y}


BATCH = {"x": torch.zeros(3, 1)}


def test_singular_values_condition_number_and_effective_rank_of_diagonal_matrices():
    sigma = singular_values(torch.tensor([[[3.0, 0.0], [0.0, -4.0]], [[2.0, 0.0], [0.0, 0.0]]]))
    torch.testing.assert_close(sigma, torch.tensor([[4.0, 3.0], [2.0, 0.0]]).double())
    kappa = condition_number(sigma)
    assert kappa[0] == pytest.approx(4 / 3)
    assert kappa[1] == math.inf
    assert effective_rank(sigma).tolist() == pytest.approx([49 / 25, 1.0])
    assert effective_rank(torch.ones(5).double()) == pytest.approx(5.0)  # equal values: full rank
    assert effective_rank(torch.zeros(5).double()) == 0.0


def test_rank_of_a_memory_that_gains_one_direction_per_step():
    ranks = rank(Cell([1.0, 1.0, 1.0, 1.0]), BATCH, count=4)
    assert ranks.steps.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(ranks.S, [[1, 2, 3, 4]])  # t equal singular values after t writes
    np.testing.assert_allclose(ranks.M, [[1, 1, 1, 1]])  # without momentum, M is the last write


def test_rank_and_spectrum_with_momentum():
    g = 0.5
    muon = Muon(gamma=g, tau=1.0, normalization=None)
    model = Cell([1.0, 1.0, 1.0], muon=muon)
    # M_t = diag(g^2, g, 1) after three writes; S_3 = M_1 + M_2 + M_3 = diag(1 + g + g^2, 1 + g, 1).
    M, S = np.array([g * g, g, 1.0]), np.array([1 + g + g * g, 1 + g, 1.0])
    ranks = rank(model, BATCH, count=3)
    assert ranks.M[0, -1] == pytest.approx(M.sum() ** 2 / (M**2).sum())
    assert ranks.S[0, -1] == pytest.approx(S.sum() ** 2 / (S**2).sum())
    sigma = spectrum(model, BATCH)
    np.testing.assert_allclose(sigma.values, [S / S[0]])
    assert sigma.condition[0] == pytest.approx(S[0])
    assert sigma.largest[0] == pytest.approx(S[0])
    states = memory(model, BATCH, count=3)
    np.testing.assert_allclose(states.S[-1], np.diag(S))
    np.testing.assert_allclose(states.M[1], np.diag([g, 1.0, 0.0]))


def test_a_spectrum_beyond_float32_is_exact():
    """Neighboring values differ by alpha = 1e-4, so sigma_3 / sigma_1 = 1e-8, below the resolution of float32."""
    sigma = spectrum(Cell([1.0, 1.0, 1.0], alpha=1e-4), BATCH)
    np.testing.assert_allclose(sigma.values, [[1.0, 1e-4, 1e-8]], rtol=1e-9)
    assert sigma.condition[0] == pytest.approx(1e8)


def test_effective_rank_of_normalized_writes_does_not_depend_on_their_size():
    weights = [1.0, 100.0, 0.01]
    plain = rank(Cell(weights), BATCH, count=3)
    muon = rank(Cell(weights, muon=Muon(gamma=0.0)), BATCH, count=3)
    assert muon.S[0, -1] == pytest.approx(3.0)
    assert plain.S[0, -1] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights))


def test_gradients_decay_with_the_gate():
    alpha, L = 0.7, 12
    profile = gradients(Cell([1.0] * L, alpha), BATCH, count=L)
    n = np.arange(1, L)
    assert profile.steps.tolist() == n.tolist()
    q = math.sqrt(L * L)  # |dL/dS_L| = |1 q^T| = sqrt(d m), every entry 1
    np.testing.assert_allclose(profile.S[0], q * alpha ** (L - n), rtol=1e-6)


def test_momentum_keeps_the_gradient_alive():
    alpha, gamma, L = 0.5, 1.0, 20
    muon = Muon(gamma=gamma, tau=1.0, normalization=None)
    profile = gradients(Cell([1.0] * L, alpha, muon), BATCH, count=L)
    n = np.arange(1, L)
    by_memory = L * alpha ** (L - n)
    # dL/dM_n: every later step k adds gamma^(k-n) M_n to S_k, which then decays by alpha^(L-k).
    by_momentum = [L * sum(gamma ** (k - i) * alpha ** (L - k) for k in range(i + 1, L + 1)) for i in n]
    np.testing.assert_allclose(profile.S[0], by_memory, rtol=1e-6)
    np.testing.assert_allclose(profile.M[0], by_momentum, rtol=1e-6)
    assert profile.S[0, 0] < 1e-4 * profile.M[0, 0]


def test_gradients_do_not_depend_on_the_batch_size():
    model = Cell([1.0] * 4, 0.5)
    alone, three = (gradients(model, {"x": torch.zeros(size, 1)}).S for size in (1, 3))
    np.testing.assert_allclose(alone, three)


def test_reading_with_a_lower_rank():
    weights = [3.0, 1.0, 2.0]
    model = Cell(weights)
    scores = truncation(model, {"x": torch.zeros(2, 1), "labels": torch.tensor([0, 2])}, [1, 2, 3])
    # y_i = S_ii is 3, 1, 2, and the read keeps the largest one, two or three of them.
    np.testing.assert_allclose(scores.loss, [3.0, 5.0, 6.0], rtol=1e-6)
    assert scores.accuracy.tolist() == [50.0, 50.0, 50.0]  # index 0 is the largest for both
    with pytest.raises(ValueError, match="k must be"):
        truncation(model, BATCH, [0])
    with pytest.raises(ValueError, match="stride must be"):
        truncation(model, BATCH, [1], stride=0)


def test_accuracy_of_a_truncated_read_comes_from_predictions_or_class_logits():
    class Fixed(Cell):
        def forward(self, x, labels=None):
            return {"loss": super().forward(x)["loss"], **self.outputs}

    model = Fixed([1.0, 1.0])
    labels = torch.tensor([[IGNORED, 1], [2, IGNORED]])
    model.outputs = {"predictions": torch.tensor([[1, 1], [0, 0]])}
    assert truncation(model, {"x": torch.zeros(2, 1), "labels": labels}, [2]).accuracy == [50.0]
    model.outputs = {"logits": torch.zeros(2, 2, 5)}  # a language model
    assert truncation(model, {"x": torch.zeros(2, 1), "labels": labels}, [2]).accuracy is None


def test_reading_with_full_rank_changes_nothing_for_any_stride():
    torch.manual_seed(0)
    model = build_wrapped("gated_deltanet")
    batch = {"x": torch.randn(2, 9, 16), "labels": torch.zeros(2, dtype=torch.long)}
    whole = model(**batch)["loss"].item()
    assert truncation(model, batch, [8], stride=4).loss == pytest.approx(whole, rel=1e-5)
    assert truncation(model, batch, [1], stride=4).loss != pytest.approx(whole, rel=1e-3)


class Wrapped(nn.Module):
    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, x, labels=None):
        y = self.mixer(x)[0]
        return {"logits": y[:, -1], "loss": y.square().mean(), "y": y}


def build_wrapped(backbone, muon=None):
    dims = {"num_heads": 2, "head_k_dim": 8, "head_v_dim": 8} if "deltanet" in backbone else {"d_state": 8}
    return Wrapped(build_mixer(backbone, 16, Muon() if muon is None else muon, **dims))


QUICK = {("mamba", "muon"), ("gated_deltanet", "muon"), ("longhorn", "plain")}
MIXERS = [
    pytest.param(backbone, muon, id=f"{backbone}-{name}", marks=[] if (backbone, name) in QUICK else [pytest.mark.full])
    for backbone in BACKBONES
    for name, muon in (("muon", Muon()), ("plain", Muon.off()))
]


@pytest.mark.parametrize(("backbone", "muon"), MIXERS)
def test_replay_gives_the_same_outputs_and_states_as_the_model(backbone, muon):
    torch.manual_seed(1)
    model, x = build_wrapped(backbone, muon), torch.randn(2, 11, 16)
    states = StateRecorder(4)
    with torch.no_grad(), replaying(model, states):
        y = model(x)["y"]
    expected, last = model.mixer(x)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-4)
    assert states.steps == {0: [3, 6, 8, 11]}
    torch.testing.assert_close(states.S[0][-1].reshape(last.memory.S.shape), last.memory.S, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states.M[0][-1].reshape(last.memory.M.shape), last.memory.M, atol=1e-5, rtol=1e-4)


def test_replay_of_a_vision_model():
    torch.manual_seed(2)
    model, x = mambavision_micro(muon=Muon(), num_classes=4).eval(), torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        expected = model(x)
        with replaying(model, Visitor()):
            replayed = model(x)
    torch.testing.assert_close(replayed, expected, atol=1e-4, rtol=1e-3)


def test_replay_restores_the_model_after_an_error():
    model = build_wrapped("mamba")

    def fails():
        with replaying(model, Visitor()):
            assert model.mixer.impl == "replay"
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fails()
    assert model.mixer.impl == "auto"
    assert "replay" not in IMPLEMENTATIONS
    with (
        pytest.raises(ValueError, match="model must contain a mixer of muonssm, got a Linear"),
        replaying(nn.Linear(2, 2), Visitor()),
    ):
        pass


def test_evenly_spaced_steps():
    assert evenly_spaced(10, 4) == [2, 5, 8, 10]
    assert evenly_spaced(3, 8) == [1, 2, 3]
    assert evenly_spaced(0, 8) == []


def test_memory_refuses_a_layer_or_head_that_does_not_exist():
    with pytest.raises(ValueError, match="layer must be"):
        memory(Cell([1.0, 1.0]), BATCH, layer=3)
    with pytest.raises(ValueError, match="head must be"):
        memory(Cell([1.0, 1.0]), BATCH, head=2)
