"""The language model on transformers' contracts: sizes, states, generation, saving, precision, packing.

The quick tier runs every backbone, with every other layer attention where Muon is on; the rest is marked `full`.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from muonssm import Muon
from muonssm.layers import BACKBONES
from muonssm.models.language import MuonSSMCache, MuonSSMConfig, MuonSSMForCausalLM, preset
from muonssm.ops.fused import support

VOCABULARY = 61
HYBRID = {"ssm_every": 2, "sliding_window": 8, "num_attention_heads": 4}


def build(backbone="gated_deltanet", muon=True, seed=0, **changes):
    """Build a small model with larger weights than initially, so that its outputs depend on its inputs."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = MuonSSMConfig(**{**sizes, "tie_word_embeddings": False, **changes}, backbone=backbone, muon=muon)
    model = MuonSSMForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                parameter.mul_(8)
    return model


def tokens(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


FULL = pytest.mark.full
each_rule = pytest.mark.parametrize("muon", [False, True], ids=["plain", "muon"])
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)
each_layout = pytest.mark.parametrize("changes", [{}, HYBRID], ids=["pure", "hybrid"])


def combinations(quick):
    """Parametrize over backbone, rule and layout, and mark as `full` what `quick` does not contain."""
    every = [(name, muon, layout) for name in BACKBONES for muon in (False, True) for layout in ("pure", "hybrid")]
    return pytest.mark.parametrize(
        ("backbone", "muon", "changes"),
        [
            pytest.param(
                name,
                muon,
                HYBRID if layout == "hybrid" else {},
                id=f"{name}-{'muon' if muon else 'plain'}-{layout}",
                marks=() if (name, muon, layout) in quick else FULL,
            )
            for name, muon, layout in every
        ],
    )


PLAIN_PURE = [(name, False, "pure") for name in BACKBONES]
MUON_HYBRID = [(name, True, "hybrid") for name in BACKBONES]
each_combination = combinations([*PLAIN_PURE, *MUON_HYBRID])
each_hybrid_muon = combinations(MUON_HYBRID)
each_combination_slow = combinations([("mamba", True, "hybrid"), ("gated_deltanet", True, "pure")])


@pytest.mark.parametrize(
    ("backbone", "hybrid", "size"),
    [
        ("gated_deltanet", False, 172_679_272),
        ("mamba", False, 174_344_352),
        ("longhorn", False, 174_129_312),
        ("deltanet", False, 163_606_352),
        ("gated_deltanet", True, 168_061_892),
    ],
)
@each_rule
def test_parameter_counts_of_the_170m_table(backbone, hybrid, size, muon):
    with torch.device("meta"):
        model = MuonSSMForCausalLM(preset("170m", backbone, muon, hybrid))
    assert sum(p.numel() for p in model.parameters()) == size
    assert model.config.build_muon() == (Muon() if muon else Muon.off())


@each_combination
def test_cached_steps_equal_the_whole(backbone, muon, changes):
    model, ids = build(backbone, muon, **changes), tokens(2, 30)
    whole = model(ids, use_cache=False).logits
    first = model(ids[:, :13], use_cache=True)
    several = model(ids[:, 13:20], past_key_values=first.past_key_values, use_cache=True)
    steps = [model(ids[:, i : i + 1], past_key_values=several.past_key_values, use_cache=True) for i in range(20, 30)]
    split = torch.cat([out.logits for out in (first, several, *steps)], dim=1)
    torch.testing.assert_close(split, whole, atol=1e-5, rtol=1e-5)
    assert steps[-1].past_key_values.get_seq_length() == 30


@each_hybrid_muon
def test_left_padded_sequence_equals_the_sequence_alone(backbone, muon, changes):
    model, ids = build(backbone, muon, **changes), tokens(1, 17)
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), ids], dim=1)
    batch = torch.cat([padded, tokens(1, 23, seed=2)])
    mask = (torch.arange(23) >= torch.tensor([[6], [0]])).long()
    logits = model(batch, attention_mask=mask).logits[0, 6:]
    torch.testing.assert_close(logits, model(ids).logits[0], atol=1e-5, rtol=1e-5)
    together = model.generate(batch, attention_mask=mask, max_new_tokens=12, do_sample=False)
    alone = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(together[0, 23:], alone[0, 17:])


@each_combination_slow
def test_generation_with_a_cache_equals_without(backbone, muon, changes):
    model, ids = build(backbone, muon, **changes), tokens(2, 9)
    for options in ({}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}):
        sequences = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            sequences.append(
                model.generate(ids, max_new_tokens=14, use_cache=use_cache, **{"do_sample": False, **options})
            )
        assert torch.equal(*sequences), options
        assert len(set(sequences[0][0, 9:].tolist())) > 2, "a model that repeats one token tests nothing"


@each_hybrid_muon
def test_generation_continues_a_returned_cache_with_several_tokens(backbone, muon, changes):
    model, ids = build(backbone, muon, **changes), tokens(2, 9)
    out = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    longer = torch.cat([out.sequences, tokens(2, 4, seed=5)], dim=1)
    on = model.generate(longer, past_key_values=out.past_key_values, max_new_tokens=6, do_sample=False)
    assert torch.equal(on, model.generate(longer, max_new_tokens=6, do_sample=False))


@each_backbone
def test_the_cache_does_not_grow(backbone):
    model, sizes = build(backbone), []
    for length in (10, 1000):
        sizes.append(model(tokens(1, length), use_cache=True).past_key_values.memory_bytes())
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("name", ["mixer", "mixer_norm", "mixer.in_proj"])
@each_backbone
def test_hooks_see_every_token_of_generation(backbone, name):
    """A kernel computes a whole block in a decoding step, but not if a module in it has a hook."""
    model, seen = build(backbone), []
    model.model.layers[1].get_submodule(name).register_forward_hook(lambda *_: seen.append(1))
    model.generate(tokens(1, 5), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert len(seen) == 6


@pytest.mark.parametrize("changes", [pytest.param({}, marks=FULL), HYBRID], ids=["pure", "hybrid"])
@each_backbone
def test_saved_and_loaded_as_transformers_does(backbone, changes, tmp_path):
    model, ids = build(backbone, {"gamma": 0.5, "ns_steps": 2}, tie_word_embeddings=True, **changes), tokens(1, 12)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, MuonSSMForCausalLM)
    assert loaded.config.build_muon() == Muon(gamma=0.5, ns_steps=2)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert type(AutoConfig.from_pretrained(tmp_path)) is MuonSSMConfig


def test_weights_missing_in_a_checkpoint_have_initial_values(tmp_path):
    build("mamba").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, momentum="per_head")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    gamma = loaded.model.layers[0].mixer.momentum(None).gamma
    torch.testing.assert_close(gamma.detach(), torch.tensor([0.9]))


def test_initial_weights():
    torch.manual_seed(0)
    config = MuonSSMConfig(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=8, backbone="mamba"
    )
    model = MuonSSMForCausalLM(config)
    block = model.model.layers[3]
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for inner, projection in ((256, block.mixer.out_proj), (256, block.mlp.down_proj)):
        assert projection.weight.abs().max().item() == pytest.approx(inner**-0.5 / 4, rel=0.01)
    assert block.mlp.up_proj.weight.abs().max().item() == pytest.approx(128**-0.5, rel=0.01)
    assert torch.equal(block.mixer.A_log[0], torch.arange(1, 17).float().log())
    torch.manual_seed(0)
    config.muon = {"gamma": 0.0, "tau": 1.0, "normalization": None}
    plain = MuonSSMForCausalLM(config)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True))


@each_layout
def test_packed_documents_equal_each_alone(changes):
    model = build(**changes)
    one, two = tokens(1, 11), tokens(1, 18, seed=2)
    bounds, positions = torch.tensor([0, 11, 29]), torch.cat([torch.arange(11), torch.arange(18)])[None]
    packed = model(torch.cat([one, two], dim=1), position_ids=positions, cu_seq_lens_q=bounds, use_cache=False).logits
    apart = torch.cat([model(one).logits, model(two).logits], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [pytest.param({}, marks=FULL), HYBRID], ids=["pure", "hybrid"])
@each_backbone
def test_gradient_checkpointing_gives_the_same_gradients(backbone, changes):
    model, ids = build(backbone, **changes).train(), tokens(2, 20)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@each_backbone
def test_bfloat16_and_autocast_are_close(backbone):
    model, ids = build(backbone), tokens(2, 20)
    expected = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    assert loss.item() == pytest.approx(expected.item(), rel=0.03)
    half = model.to(torch.bfloat16)
    assert half(ids, labels=ids).loss.item() == pytest.approx(expected.item(), rel=0.06)
    out = half.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert out.past_key_values.layers[0].recurrent_states[0].dtype == torch.float32


def test_labels_are_shifted_and_shift_labels_are_not():
    model, ids = build(), tokens(2, 20)
    following = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    loss = model(ids, labels=ids).loss
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()))
    torch.testing.assert_close(model(ids, shift_labels=following).loss, loss)
    assert model(ids, logits_to_keep=1).logits.shape == (2, 1, VOCABULARY)


SOME_IGNORED = tokens(2, 30, seed=2).masked_fill(torch.arange(30) % 4 == 0, -100)


@pytest.mark.parametrize(
    "targets",
    [
        {"labels": SOME_IGNORED},
        {"labels": SOME_IGNORED, "shift_labels": SOME_IGNORED},
        {"labels": SOME_IGNORED, "num_items_in_batch": torch.tensor(17)},
        {"labels": SOME_IGNORED.clamp(min=7), "ignore_index": 7},
    ],
    ids=["labels", "shift_labels", "num_items", "ignore_index"],
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_without_logits_equals_that_of_logits(targets, tied, monkeypatch):
    """With kernels and without; the SwiGLU of a training step is fused in both."""
    model = build(tie_word_embeddings=tied, intermediate_size=600).train()
    parameters = dict(model.named_parameters())
    ids, results = tokens(2, 30), []
    for smallest, asked in ((1, True), (1, False), (1 << 60, True), (1 << 60, False)):
        monkeypatch.setattr(support, "SMALL", smallest)
        out = model(input_ids=ids, return_logits=asked, **targets)
        assert (out.logits is not None) == asked
        results.append((out.loss, *torch.autograd.grad(out.loss, parameters.values())))
    for other in results[1:]:
        for found, wanted in zip(other, results[0], strict=True):
            assert (found - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9


def test_logits_are_there_unless_training_with_labels():
    model, ids = build(), tokens(2, 8)
    assert model(input_ids=ids, labels=ids).logits is not None
    model.train()
    assert model(input_ids=ids).logits is not None
    assert model(input_ids=ids, labels=ids).logits is None
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model(input_ids=ids, labels=ids)  # somebody wants to see the logits
    handle.remove()
    assert seen == [(2, 8, VOCABULARY)]


@pytest.mark.slow
@each_backbone
def test_compiles_to_one_graph(backbone, monkeypatch):
    monkeypatch.setenv("CI", "true")  # Inductor checks operators more strictly there
    model, ids = build(backbone), tokens(2, 20)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"backbone": "transformer"}, ValueError, "backbone must .*got 'transformer'"),
        ({"hidden_size": 0}, ValueError, "hidden_size must .*got 0"),
        ({"dropout": 1.0}, ValueError, "dropout must .*got 1.0"),
        ({"muon": "yes"}, TypeError, "muon must .*got 'yes'"),
        ({"muon": {"gama": 1}}, ValueError, r"muon must .*got \{'gama'"),
        ({"momentum": "always"}, ValueError, "momentum must .*got 'always'"),
        ({"mixer": "large"}, TypeError, "mixer must .*got 'large'"),
        (
            {"hidden_size": 32, "ssm_every": 2, "num_attention_heads": 5},
            ValueError,
            "num_attention_heads must .*32, got 5",
        ),
    ],
)
def test_wrong_settings_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        MuonSSMConfig(**settings)


def test_wrong_calls_name_the_argument():
    with pytest.raises(ValueError, match=r"name must .*got '1b'"):
        preset("1b")
    model, ids = build(), tokens(1, 5)
    with pytest.raises(TypeError, match=r"past_key_values must .*got a DynamicCache without"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"cache_implementation must .*got 'quantized'"):
        model.generate(ids, cache_implementation="quantized", max_new_tokens=2)
    with pytest.raises(ValueError, match=r"input_ids or inputs_embeds must .*neither"):
        model()
    cache = MuonSSMCache(model.config)
    model(ids, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"tokens_to_remove must .*got -2"):
        cache.crop(-2)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(ids, past_key_values=cache, use_cache=True).logits, model(ids).logits)


def test_fsdp_wraps_the_blocks():
    model = build(**HYBRID)
    wrapped = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    assert wrapped == list(model.model.layers)
