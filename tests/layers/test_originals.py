"""Plain mixers equal transformers' modules with random weights, and a step-by-step loop with fla's names."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import Mamba2Config, MambaConfig, Qwen3NextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from muonssm import Muon
from muonssm.layers import (
    DeltaNet,
    GatedDeltaNet,
    MomentumDeltaNet,
    export_weights,
    from_transformers,
    load_weights,
)
from muonssm.layers.convert import BUILDERS

from .variants import assert_close, inputs

HIDDEN = 48
CONFIGS = {
    "mamba": MambaConfig(hidden_size=HIDDEN, state_size=12, num_hidden_layers=1),
    "mamba, bias": MambaConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, use_bias=True, use_conv_bias=False, conv_kernel=3
    ),
    "mamba2": Mamba2Config(
        hidden_size=HIDDEN, num_heads=6, head_dim=16, n_groups=2, state_size=20, chunk_size=16, num_hidden_layers=1
    ),
    "mamba2, limits": Mamba2Config(
        hidden_size=HIDDEN, num_heads=6, head_dim=16, n_groups=1, state_size=8, chunk_size=16, num_hidden_layers=1,
        time_step_limit=(0.02, 0.05), use_bias=True,
    ),
    "qwen3-next": Qwen3NextConfig(
        hidden_size=HIDDEN, num_hidden_layers=1, linear_num_value_heads=6, linear_num_key_heads=3,
        linear_key_head_dim=16, linear_value_head_dim=24, layer_types=["linear_attention"],
    ),
}  # fmt: skip
MODULES = {"mamba": MambaMixer, "mamba2": Mamba2Mixer, "qwen3-next": Qwen3NextGatedDeltaNet}


def original(name):
    """Build the original module with weights large enough that each of them affects the output."""
    torch.manual_seed(0)
    module = MODULES[name.split(",")[0]](CONFIGS[name], layer_idx=0).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and parameter is not getattr(module, "A_log", None):
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return module


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if "," in n else ()) for n in CONFIGS])
@pytest.mark.parametrize("length", [pytest.param(1, marks=pytest.mark.full), 50])
def test_equals_the_original_module(name, length):
    """Compare the output, the final state and every gradient to 1e-4 (largest error observed: 2.4e-5)."""
    module = original(name)
    mixer = from_transformers(module)
    x, weight = inputs(2, length, HIDDEN), inputs(2, length, HIDDEN, seed=2)
    cache = DynamicCache(config=CONFIGS[name])
    with torch.no_grad():
        expected = module(x, cache_params=cache)
    y, state = mixer(x)
    assert_close(y, expected, 1e-4, "output")
    S = cache.get_recurrent_state(0)
    assert_close(state.memory.S, S.mT if name == "qwen3-next" else S, 1e-4, "state")
    size = min(length, state.conv.shape[1])
    assert_close(state.conv[:, -size:].mT, cache.get_conv_state(0)[..., -size:], 1e-4, "convolution")

    (module(x) * weight).sum().backward()
    (y * weight).sum().backward()
    theirs = {parameter: p.grad for parameter, p in module.named_parameters()}
    with torch.no_grad():  # export the gradients under the names of the weights
        for parameter in mixer.parameters():
            parameter.copy_(parameter.grad)
    ours = export_weights(mixer, "transformers")
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        assert_close(ours[parameter], gradient, 1e-4, parameter)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_survive_the_round_trip(name):
    module = original(name)
    weights = export_weights(from_transformers(module, Muon(), momentum="per_step"), "transformers")
    assert weights.keys() == module.state_dict().keys()
    for key, tensor in module.state_dict().items():
        assert torch.equal(weights[key], tensor), key


def test_builders_cover_the_original_classes():
    assert set(BUILDERS) == {module.__name__ for module in MODULES.values()}


# ---- flash-linear-attention needs a GPU; its layers are written out here, step by step, with its parameter names ----


def fla_layer(weights, x, heads, gated):
    """Compute flash-linear-attention's (Gated)DeltaNet from its published definition, one step at a time."""

    def convolved(name):
        row = F.linear(x, weights[f"{name}_proj.weight"]).mT
        kernel = weights[f"{name}_conv1d.weight"]
        row = F.silu(F.conv1d(F.pad(row, (kernel.shape[2] - 1, 0)), kernel, groups=row.shape[1])).mT
        return row.unflatten(2, (heads, -1))

    q, k, v = (convolved(name) for name in "qkv")
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    beta = F.linear(x, weights["b_proj.weight"]).sigmoid()
    alpha = torch.ones_like(beta)
    if gated:
        decay = F.softplus(F.linear(x, weights["a_proj.weight"]) + weights["dt_bias"])
        alpha = (-weights["A_log"].exp() * decay).exp()
    S, outputs = x.new_zeros(x.shape[0], heads, k.shape[-1], v.shape[-1]), []
    for t in range(x.shape[1]):
        S = S * alpha[:, t, :, None, None]
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * new[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t] * k.shape[-1] ** -0.5))
    o = torch.stack(outputs, dim=1)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["o_norm.weight"]
    if gated:
        o = o * F.silu(F.linear(x, weights["g_proj.weight"]).unflatten(2, (heads, -1)))
    return F.linear(o.flatten(2), weights["o_proj.weight"])


def fla_weights(gated, heads=3, key=10, value=14):
    """Draw random weights with the names and shapes of fla/layers/{delta_net,gated_deltanet}.py."""
    shapes = {"q_proj": (heads * key, HIDDEN), "k_proj": (heads * key, HIDDEN), "v_proj": (heads * value, HIDDEN)}
    shapes |= {"b_proj": (heads, HIDDEN), "o_proj": (HIDDEN, heads * value), "o_norm": (value,)}
    shapes |= {"q_conv1d": (heads * key, 1, 4), "k_conv1d": (heads * key, 1, 4), "v_conv1d": (heads * value, 1, 4)}
    if gated:
        shapes |= {"a_proj": (heads, HIDDEN), "g_proj": (heads * value, HIDDEN)}
    weights = {
        f"{name}.weight": inputs(*shape, seed=i) * shape[-1] ** -0.5 for i, (name, shape) in enumerate(shapes.items())
    }
    return weights | ({"A_log": inputs(heads, seed=30), "dt_bias": inputs(heads, seed=31)} if gated else {})


def momentum_deltanet_layer(weights, x, heads, memories, activation):
    """Compute flash-linear-attention's MomentumDeltaNet by its formulas, one step at a time, in its own signs.

    The authors' own code differs in the activation of the output gate alone: a sigmoid in place of silu.
    """

    def project(name):
        return F.linear(x, weights[f"{name}_proj.weight"])

    def convolved(name, count):
        row, kernel = project(name).mT, weights[f"{name}_conv1d.weight"]
        row = F.silu(F.conv1d(F.pad(row, (kernel.shape[2] - 1, 0)), kernel, groups=row.shape[1])).mT
        return row.unflatten(2, (count, -1))

    def repeated(t, dim):
        return t.repeat_interleave(memories // heads, dim=dim)

    q, k, v = repeated(convolved("q", heads), 2), repeated(convolved("k", heads), 2), convolved("v", memories)
    A_log, Mu_log, log_factor, D_log = (
        repeated(weights[name], 0) for name in ("A_log", "Mu_log", "log_factor", "D_log")
    )
    q = q - D_log.exp()[:, None] * k
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    log_mu = (-Mu_log.exp() * F.softplus(project("m") + weights["mu_bias"])).clamp(min=-2)
    eta = torch.tanh(project("e") / x.shape[2] ** 0.5) + 1
    theta = torch.arctan(eta * log_factor.exp())
    beta = torch.sin(theta) ** 2 * torch.sigmoid(project("b"))
    alpha = torch.cos(theta) ** 2 * (-A_log.exp() * F.softplus(project("a") + weights["dt_bias"])).exp()
    S = M = x.new_zeros(x.shape[0], memories, k.shape[-1], v.shape[-1])
    outputs = []
    for t in range(x.shape[1]):
        gates = (g[:, t, :, None, None] for g in (log_mu.exp(), alpha, beta, eta))
        mu_t, alpha_t, beta_t, eta_t = gates
        error = v[:, t, :, None, :] - alpha_t * k[:, t, :, None, :] @ S
        M = mu_t * M - eta_t * k[:, t, :, :, None] * error
        S = alpha_t * S - beta_t * M
        outputs.append((q[:, t, :, None, :] * k.shape[-1] ** -0.5 @ S).squeeze(2))
    o = torch.stack(outputs, dim=1)
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weights["o_norm.weight"]
    o = o * activation(project("g").unflatten(2, (memories, -1)))
    return F.linear(o.flatten(2), weights["o_proj.weight"])


@pytest.mark.parametrize("memories", [3, 6])
@pytest.mark.parametrize(("name", "activation"), [("silu", F.silu), ("sigmoid", torch.sigmoid)], ids=["fla", "authors"])
def test_momentum_deltanet_equals_flash_linear_attention_with_its_names(name, activation, memories):
    heads, key, value = 3, 10, 14
    shapes = dict.fromkeys(("q_proj", "k_proj"), (heads * key, HIDDEN))
    shapes |= dict.fromkeys(("v_proj", "g_proj"), (memories * value, HIDDEN))
    shapes |= {f"{name}_proj": (memories, HIDDEN) for name in "abme"}
    shapes |= {"o_proj": (HIDDEN, memories * value), "o_norm": (value,)}
    shapes |= {"q_conv1d": (heads * key, 1, 4), "k_conv1d": (heads * key, 1, 4), "v_conv1d": (memories * value, 1, 4)}
    weights = {
        f"{name}.weight": inputs(*shape, seed=i) * shape[-1] ** -0.5 for i, (name, shape) in enumerate(shapes.items())
    }
    counts = {
        "A_log": heads,
        "Mu_log": heads,
        "log_factor": heads,
        "D_log": heads,
        "dt_bias": memories,
        "mu_bias": memories,
    }
    weights |= {each: inputs(count, seed=40 + i) for i, (each, count) in enumerate(counts.items())}
    x = inputs(2, 37, HIDDEN)
    mixer = MomentumDeltaNet(
        HIDDEN, heads, key, value, num_value_heads=memories, gate_activation=name, muon=Muon.off()
    )  # fmt: skip
    load_weights(mixer, weights, "fla")
    assert_close(mixer(x)[0], momentum_deltanet_layer(weights, x, heads, memories, activation), 1e-5)
    back = export_weights(mixer, "fla")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize("gated", [False, True], ids=["DeltaNet", "GatedDeltaNet"])
def test_equals_flash_linear_attention_with_its_names(gated):
    weights, x = fla_weights(gated), inputs(2, 37, HIDDEN)
    options = {"gate_bias": False} if gated else {}
    mixer = (GatedDeltaNet if gated else DeltaNet)(
        HIDDEN, num_heads=3, head_k_dim=10, head_v_dim=14, muon=Muon.off(), **options
    )
    load_weights(mixer, weights, "fla")
    assert_close(mixer(x)[0], fla_layer(weights, x, 3, gated), 1e-5)
    back = export_weights(mixer, "fla")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_fla_weights_with_biases_and_an_output_gate():
    weights = fla_weights(gated=True)
    biased = GatedDeltaNet(HIDDEN, num_heads=3, head_k_dim=10, head_v_dim=14)
    load_weights(biased, weights, "fla")
    assert (biased.gate_bias == 0).all()
    weights |= {"a_proj.bias": torch.ones(3), "b_proj.bias": torch.full((3,), 2.0)}
    load_weights(biased, weights, "fla")
    assert biased.gate_bias.tolist() == [1, 1, 1, 2, 2, 2]
    assert export_weights(biased, "fla").keys() == weights.keys()
    gated = {
        name: w for name, w in fla_weights(gated=True).items() if name not in ("a_proj.weight", "A_log", "dt_bias")
    }
    mixer = DeltaNet(HIDDEN, num_heads=3, head_k_dim=10, head_v_dim=14, output_gate=True)
    assert export_weights(load_weights(mixer, gated, "fla"), "fla").keys() == gated.keys()


def test_weights_that_do_not_fit_are_not_loaded():
    mixer = GatedDeltaNet(HIDDEN, num_heads=3, head_k_dim=10, head_v_dim=14, gate_bias=False)
    before = {name: p.clone() for name, p in mixer.named_parameters()}
    weights = fla_weights(gated=True)
    with pytest.raises(ValueError, match=r"weights must .*'fla'.*q_proj\.weight"):
        load_weights(mixer, {}, "fla")
    with pytest.raises(ValueError, match=r"weights must .*missing: A_log; unknown: extra"):
        load_weights(mixer, {**{n: w for n, w in weights.items() if n != "A_log"}, "extra": torch.ones(1)}, "fla")
    with pytest.raises(ValueError, match=r"A_log must .*\[3\], got \[4\]"):
        load_weights(mixer, {**weights, "A_log": torch.ones(4)}, "fla")
    with pytest.raises(ValueError, match=r"source .*got 'keras' for GatedDeltaNet"):
        load_weights(mixer, weights, "keras")
    with pytest.raises(ValueError, match=r"weights must .*in_proj_qkvz\.weight"):
        load_weights(mixer, weights, "transformers")
    with pytest.raises(ValueError, match="gate_bias"):
        export_weights(GatedDeltaNet(HIDDEN), "transformers")
    for name, parameter in mixer.named_parameters():
        assert torch.equal(parameter, before[name])
    with pytest.raises(TypeError, match=r"module must .*Linear"):
        from_transformers(torch.nn.Linear(2, 2))
