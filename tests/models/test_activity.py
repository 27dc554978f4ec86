"""The activity model: the paper's shape, any backbone, and continuing a window from its state."""

from __future__ import annotations

import pytest
import torch

from muonssm import Muon
from muonssm.layers import BACKBONES
from muonssm.models.activity import ActivityClassifier, ActivityModelConfig


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("muon", [Muon.off(), Muon()], ids=["plain", "muon"])
def test_a_split_window_equals_the_whole(backbone, muon):
    torch.manual_seed(0)
    model = ActivityClassifier(ActivityModelConfig(backbone, d_model=32, d_state=16, form="matrix"), muon, 6, 5).eval()
    x = torch.randn(3, 70, 6)
    with torch.no_grad():
        model.batch_norm.running_mean.uniform_(-1, 1)
        whole, _ = model.encode(x)
        state, outputs = None, []
        for piece in x.split([1, 1, 2, 60, 6], dim=1):
            h, state = model.encode(piece, state)
            outputs.append(h)
        assert torch.allclose(torch.cat(outputs, dim=1), whole, atol=1e-5)
        assert torch.allclose(model.head(whole.mean(1)), model(x)["logits"], atol=1e-6)
    out = model(x, torch.tensor([0, 1, 4]))
    assert out["logits"].shape == (3, 5)
    out["loss"].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_default_is_the_network_of_the_paper():
    model = ActivityClassifier(ActivityModelConfig("mamba"), Muon(), 6, 37)
    mixer = model.mixers[0]
    assert (len(model.mixers), mixer.d_model, mixer.d_state, mixer.d_inner, mixer.dt_rank) == (2, 128, 64, 256, 8)
    assert mixer.conv1d.weight.shape == (256, 1, 4)
    assert model.conv.kernel_size == (3,)
    assert 0.019 < mixer.in_proj.weight.std() < 0.021
    assert 0.0095 < mixer.out_proj.weight.std() < 0.0105  # 0.02 / sqrt(2 layers)
    assert mixer.dt_proj.weight.abs().max() > 0.2  # Mamba's initial value


def test_plain_and_muon_start_from_the_same_weights():
    for backbone in BACKBONES:
        models = []
        learned = "fixed" if backbone == "momentum_deltanet" else "per_step"  # its gamma is a gate of its own
        for muon, momentum in ((Muon.off(), "fixed"), (Muon(), learned)):
            torch.manual_seed(3)
            models.append(ActivityClassifier(ActivityModelConfig(backbone, momentum=momentum), muon, 6, 7))
        plain, with_muon = (dict(model.named_parameters()) for model in models)
        added = {f"mixers.{i}.momentum.{name}" for i in (0, 1) for name in ("weight", "bias")}
        assert with_muon.keys() - plain.keys() == (added if learned == "per_step" else set())
        assert all(torch.equal(with_muon[name], plain[name]) for name in plain)


def test_wrong_sizes_are_named():
    with pytest.raises(ValueError, match=r"backbone must .*got 'lstm'"):
        ActivityModelConfig("lstm")
    with pytest.raises(ValueError, match=r"layers must .*got 0"):
        ActivityModelConfig(layers=0)
    with pytest.raises(ValueError, match=r"dropout must .*\[0, 1\), got 1.5"):
        ActivityModelConfig(dropout=1.5)
    with pytest.raises(ValueError, match=r"dropout must .*got 1"):
        ActivityModelConfig(dropout=1)
    with pytest.raises(TypeError, match="bidirectional must"):
        ActivityModelConfig(bidirectional="yes")


def test_fsdp_wraps_the_mixers():
    model = ActivityClassifier(ActivityModelConfig("mamba2", d_model=16, d_state=8), Muon(), 3, 2)
    wrapped = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert wrapped == list(model.mixers)
