"""Properties of mixers: parameters, momentum, precision, compilation, implementations."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from muonssm import Muon, build_mixer
from muonssm.layers import BACKBONES, LongHorn, Mixer

from .variants import (
    D_MODEL,
    VARIANTS,
    assert_close,
    each_backbone,
    each_operator,
    each_variant,
    inputs,
    relative_error,
)

# The paper's 170M models: 10 layers of a mixer and a SwiGLU of 6144, width 672, tied vocabulary of 32000.
TABLE = {
    "gated_deltanet, 9 heads": ("gated_deltanet", {"num_heads": 9}, 2_729_812, 172_679_272),
    "gated_deltanet, 12 heads": ("gated_deltanet", {"num_heads": 12}, 2_733_828, 172_719_432),
    "mamba": ("mamba", {}, 2_896_320, 174_344_352),
    "longhorn": ("longhorn", {}, 2_874_816, 174_129_312),
    "longhorn, diagonal": ("longhorn", {"form": "diagonal"}, 2_874_816, 174_129_312),
    "deltanet": ("deltanet", {"num_heads": 12}, 1_822_520, 163_606_352),
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("muon", [Muon.off(), Muon()], ids=["plain", "muon"])
def test_parameter_counts_of_the_170m_table(name, muon):
    backbone, dims, mixer_size, model_size = TABLE[name]
    count = sum(p.numel() for p in build_mixer(backbone, 672, muon, **dims).parameters())
    assert count == mixer_size
    assert 10 * (count + 3 * 672 * 6144 + 2 * 672) + 672 + 32000 * 672 == model_size


def test_names_of_backbones():
    assert list(BACKBONES) == ["mamba", "mamba2", "deltanet", "gated_deltanet", "longhorn", "momentum_deltanet"]
    for name, mixer_class in BACKBONES.items():
        mixer = build_mixer(name, 64)
        assert type(mixer) is mixer_class
        assert mixer.muon == Muon()
        y, _ = mixer(inputs(1, 4, 64))
        assert y.shape == (1, 4, 64)


@pytest.mark.parametrize(("backbone", "dims"), [("mamba", {}), ("longhorn", {"form": "diagonal"})])
def test_a_selective_backbone_refuses_rules_it_does_not_have(backbone, dims):
    for muon, name in ((Muon.gated(), "beta_position"), (Muon(orthogonalize="read"), "orthogonalize")):
        with pytest.raises(ValueError, match=f"muon.{name} must be"):
            build_mixer(backbone, D_MODEL, muon, **dims)


@each_variant
def test_momentum_starts_at_gamma_and_learns(variant):
    mixer, x = variant.build(), inputs(2, 30, D_MODEL)
    momentum = variant.dims.get("momentum", "fixed")
    fixed = variant.build(momentum="fixed")
    assert_close(mixer(x)[0], fixed(x)[0], 1e-5, "at the start")
    learned = dict(mixer.momentum.named_parameters())
    assert set(learned) == {"fixed": set(), "per_head": {"bias"}, "per_step": {"bias", "weight"}}[momentum]
    if momentum == "fixed":
        return
    before = mixer(x)[0].detach()
    optimizer = torch.optim.Adam(learned.values(), lr=0.3)
    mixer(x)[0].square().sum().backward()
    for name, parameter in learned.items():
        assert (parameter.grad != 0).any(), name
    optimizer.step()
    assert relative_error(mixer(x)[0], before) > 1e-4
    gamma = mixer.momentum(mixer.momentum.gate(x)).gamma
    assert gamma.shape == ((2, 30, len(learned["bias"])) if momentum == "per_step" else learned["bias"].shape)
    assert ((gamma > 0) & (gamma < 1)).all()
    if momentum == "per_step":
        assert gamma.std(dim=1).max() > 0


@each_variant
def test_bfloat16_autocast_stays_close_and_finite(variant):
    mixer, x = variant.build(), inputs(2, 40, D_MODEL)
    expected, _ = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = mixer(x)
        again, _ = mixer(x[:, :1], state)
    assert y.dtype == again.dtype == torch.bfloat16
    assert state.memory.S.dtype == torch.float32
    assert relative_error(y, expected) < 0.03
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
    half = variant.build(torch.bfloat16)
    y, _ = half(x.bfloat16())
    assert relative_error(y, expected) < 0.06


@each_backbone
def test_gradient_checkpointing_gives_the_same_gradients(variant):
    mixer, x = variant.build(), inputs(2, 40, D_MODEL).requires_grad_()
    leaves = [x, *mixer.parameters()]
    expected = torch.autograd.grad(mixer(x)[0].square().sum(), leaves)
    actual = torch.autograd.grad(checkpoint(mixer, x, use_reentrant=False)[0].square().sum(), leaves)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        variant
        for variant in VARIANTS
        if "momentum" in variant.dims or variant.name in ("mamba, plain", "deltanet, plain")
    ],
    ids=lambda variant: variant.name,
)
def test_compiles_without_graph_breaks(variant):
    mixer, x = variant.build(), inputs(2, 33, D_MODEL).requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    for length in (33, 20, 27):
        y, state = compiled(x[:, :length])
        assert_close(y, mixer(x[:, :length])[0])
    more, _ = compiled(x[:, :5], state)
    assert_close(more, mixer(x[:, :5], mixer(x[:, :27])[1])[0])
    leaves = [x, *mixer.parameters()]
    eager = torch.autograd.grad(mixer(x)[0].square().sum(), leaves)
    for actual, expected in zip(torch.autograd.grad(compiled(x)[0].square().sum(), leaves), eager, strict=True):
        assert (actual - expected).norm() <= 1e-5 * expected.norm() + 1e-7


@pytest.mark.parametrize("momentum", ["per_head", "per_step"])
def test_one_compiled_function_serves_learned_gammas_of_several_rules(momentum):
    """From the second value of tau on, the compiler takes it for a variable."""
    x = inputs(1, 20, D_MODEL)
    torch._dynamo.reset()
    compiled = torch.compile(lambda mixer: mixer(x)[0], fullgraph=True, backend="aot_eager")
    for muon in (Muon(), Muon(tau=0.7), Muon.residual(), Muon.gated(tau=0.5)):
        mixer = build_mixer("gated_deltanet", D_MODEL, muon, num_heads=2, momentum=momentum)
        assert_close(compiled(mixer), mixer(x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["mamba", "gated_deltanet"])
def test_compiles_with_the_default_backend(backbone):
    mixer, x = build_mixer(backbone, 32), inputs(2, 33, 32)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True)
    assert_close(compiled(x)[0], mixer(x)[0])
    compiled(x)[0].sum().backward()
    assert all(p.grad is not None for p in mixer.parameters())


@each_operator
def test_every_implementation_serves_every_backbone(variant, monkeypatch):
    mixer, x = variant.build(), inputs(2, 70, D_MODEL)
    expected, last = mixer(x)
    monkeypatch.setattr("muonssm.ops.cpu_library.unavailable", lambda: "no compiler")
    for impl in ("auto", "chunked", "scan", "reference"):
        mixer.impl = impl
        y, state = mixer(x[:, :50])
        more, state = mixer(x[:, 50:], state)
        assert_close(torch.cat([y, more], dim=1), expected, what=impl)
        assert_close(state.memory.S, last.memory.S, what=impl)
    mixer.impl = "native"
    with pytest.raises(ValueError, match="no compiler"):
        mixer(x)


@each_backbone
def test_second_derivatives_with_the_reference(variant):
    mixer, x = variant.build(torch.float64), inputs(1, 6, D_MODEL, dtype=torch.float64).requires_grad_()
    mixer.impl = "reference"
    (g,) = torch.autograd.grad(mixer(x)[0].square().sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), x)
    assert h.isfinite().all()
    assert (h != 0).any()


def test_nan_does_not_spread_to_other_rows_or_earlier_steps():
    mixer, x = build_mixer("mamba", 16, momentum="per_step"), inputs(2, 9, 16)
    x[1, 4] = torch.nan
    y, _ = mixer(x)
    assert y[0].isfinite().all()
    assert y[1, :4].isfinite().all()
    assert y[1, 4:].isnan().all()


def test_initial_values_equal_the_originals():
    torch.manual_seed(0)
    mamba = build_mixer("mamba", 256)
    assert torch.equal(mamba.A_log[7].exp().round(), torch.arange(1.0, 17))
    for dt_bias in (mamba.dt_proj.bias, build_mixer("mamba2", 256).dt_bias, build_mixer("gated_deltanet", 256).dt_bias):
        dt = torch.nn.functional.softplus(dt_bias)
        assert 1e-3 <= dt.min() <= dt.max() <= 0.1 + 1e-6
    assert 1 <= build_mixer("mamba2", 256).A_log.exp().min() <= build_mixer("mamba2", 256).A_log.exp().max() <= 16
    for name in BACKBONES:
        assert (
            build_mixer(name, 64).no_weight_decay()
            == {
                "mamba": {"A_log", "D", "dt_proj.bias"},
                "mamba2": {"A_log", "D", "dt_bias"},
                "deltanet": set(),
                "gated_deltanet": {"A_log", "dt_bias"},
                "longhorn": {"D"},
                "momentum_deltanet": {"A_log", "Mu_log", "log_factor", "D_log", "dt_bias", "mu_bias"},
            }[name]
        )


def test_longhorn_with_heads_of_one_channel_has_one_gate_per_channel():
    """With one channel per head and keys of size 1, the matrix form equals the diagonal form."""
    torch.manual_seed(0)
    matrix = LongHorn(16, d_state=1, form="matrix", head_dim=1, muon=Muon.off())
    diagonal = LongHorn(16, d_state=1, form="diagonal", muon=Muon.off())
    diagonal.load_state_dict(matrix.state_dict())
    x = inputs(2, 30, 16)
    assert_close(matrix(x)[0], diagonal(x)[0])


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("s4", {}, ValueError, "name must be one of 'mamba'.*got 's4'"),
        (None, {}, ValueError, "name must be one of"),
        ("mamba", {"heads": 2}, TypeError, "d_state, .*got 'heads'"),
        ("mamba", {"muon": 0.9}, TypeError, "muon must be a Muon .*got float"),
        ("mamba", {"d_model": 0}, ValueError, "d_model must .*got 0"),
        ("mamba", {"d_state": 2.0}, TypeError, "d_state must .*got 2.0"),
        ("mamba", {"bias": 1}, TypeError, "bias must .*got 1"),
        ("mamba2", {"d_model": 20, "head_dim": 64}, ValueError, r"head_dim must .*expand \* d_model = 40, got 64"),
        ("mamba2", {"d_model": 64, "groups": 3}, ValueError, "groups must .* = 2, got 3"),
        ("deltanet", {"num_heads": 3}, ValueError, "num_heads must .*16, got 3.*head_k_dim"),
        ("deltanet", {"num_heads": 0}, ValueError, "num_heads must .*got 0"),
        ("gated_deltanet", {"num_heads": 5}, ValueError, "num_heads must .*12, got 5.*head_k_dim"),
        (
            "gated_deltanet",
            {"num_heads": 2, "num_value_heads": 3},
            ValueError,
            "num_value_heads must .*num_heads = 2, got 3",
        ),
        ("gated_deltanet", {"conv_size": 0}, ValueError, "conv_size must .*got 0"),
        ("longhorn", {"form": "full"}, ValueError, "form must .*'matrix'.*got 'full'"),
        ("longhorn", {"head_dim": 5}, ValueError, "head_dim must .*got 5"),
        ("mamba", {"momentum": "always"}, ValueError, "momentum must .*got 'always'"),
        (
            "mamba",
            {"muon": Muon.off(), "momentum": "per_head"},
            ValueError,
            r"muon\.gamma must .*\(0, 1\).*'per_head', got 0.0",
        ),
        ("mamba", {"muon": Muon(torch.tensor(0.9))}, TypeError, r"muon\.gamma must .*tensor"),
    ],
)
def test_wrong_arguments_are_named(name, arguments, error, message):
    with pytest.raises(error, match=message):
        build_mixer(name, **{"d_model": 16, **arguments})


def test_a_backbone_must_implement_mix():
    with pytest.raises(TypeError, match="mix"):
        Mixer(4, False)
