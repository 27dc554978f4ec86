"""`upcycle`: transformers models with our mixers inside."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from muonssm import Muon, upcycle
from muonssm.layers import Mixer

from .variants import assert_close, relative_error

SIZES = {"vocab_size": 61, "hidden_size": 32}
MODELS = {
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES, num_hidden_layers=2, state_size=8)),
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(**SIZES, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=2, state_size=12, chunk_size=16)
    ),
    "qwen3-next": lambda: Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES, num_hidden_layers=4, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    ),
}  # fmt: skip
each_model = pytest.mark.parametrize("name", MODELS)
each_model_quick_mamba = pytest.mark.parametrize(
    "name",
    ["mamba", pytest.param("mamba2", marks=pytest.mark.full), pytest.param("qwen3-next", marks=pytest.mark.full)],
)


def build(name):
    """Build a model whose mixers affect the output; with transformers' initial weights they hardly do."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in key:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 61, (3, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def mask():
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[1, :7], mask[2, :25] = 0, 0
    return mask


@each_model_quick_mamba
@torch.no_grad()
def test_without_muon_the_model_computes_the_same(name, ids, mask):
    model = build(name)
    logits, masked = model(ids).logits, model(ids, attention_mask=mask).logits
    text = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    beams = model.generate(ids[:1], max_new_tokens=8, num_beams=3, do_sample=False)
    assert upcycle(model, Muon.off()) is model
    assert any(isinstance(module, Mixer) for module in model.modules())
    assert_close(model(ids).logits, logits, 1e-5, "logits")
    assert_close(model(ids, attention_mask=mask).logits[mask == 1], masked[mask == 1], 1e-5, "padded")
    assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False), text)
    assert torch.equal(model.generate(ids[:1], max_new_tokens=8, num_beams=3, do_sample=False), beams)


@each_model
@torch.no_grad()
def test_with_muon_the_cache_carries_the_momentum(name, ids, mask):
    model = build(name)
    plain = model(ids).logits
    upcycle(model, Muon())
    logits = model(ids).logits
    assert relative_error(logits, plain) > 1e-3
    cache, pieces = None, []
    for piece in ids.split([17, 1, 1, 21], dim=1):  # several tokens, one by one, several again
        named = {"cache_params" if name.startswith("mamba") else "past_key_values": cache}
        out = model(piece, use_cache=True, **named)
        cache = out.cache_params if name.startswith("mamba") else out.past_key_values
        pieces.append(out.logits)
    assert_close(torch.cat(pieces, dim=1), logits, 1e-5, "continued")
    text = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    alone = model.generate(ids[2:, 25:], max_new_tokens=6, do_sample=False)
    assert torch.equal(text[2, -6:], alone[0, -6:])
    assert model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=3, do_sample=False).shape == (3, 44)


@each_model_quick_mamba
def test_state_dicts_keep_their_names(name, ids, tmp_path):
    model = build(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    logits = upcycle(copy.deepcopy(model), Muon())(ids).logits
    upcycle(model, Muon(), momentum="per_step")
    after = model.state_dict()
    learned = {key for key in after if ".momentum." in key}
    assert len(learned) > 0
    assert after.keys() - learned == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    other = upcycle(MODELS[name](), Muon(), momentum="per_step").eval()
    other.load_state_dict(after)
    assert torch.equal(other(ids).logits, model(ids).logits)
    saved = upcycle(copy.deepcopy(build(name)), Muon())
    saved.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert not any(isinstance(module, Mixer) for module in loaded.modules())
    assert_close(upcycle(loaded, Muon())(ids).logits, logits, 1e-6, "saved and loaded")


@each_model_quick_mamba
def test_trains_with_gradient_checkpointing(name, ids):
    model = upcycle(build(name), Muon(), momentum="per_head").train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert any("momentum" in key for key in expected)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids, use_cache=False).loss.backward()
    for key, parameter in model.named_parameters():
        if key in expected:
            assert (parameter.grad - expected[key]).norm() <= 1e-5 * expected[key].norm() + 1e-7, key


@each_model_quick_mamba
def test_frozen_parameters_and_dtypes_are_kept(name, ids):
    model = build(name).bfloat16()
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("in_proj" not in key)
        if key.endswith("A_log"):
            parameter.data = parameter.data.float()
    expected = model(ids).logits
    before = {key: (p.dtype, p.requires_grad) for key, p in model.named_parameters() if "in_proj" not in key}
    upcycle(model, Muon.off())
    after = {key: (p.dtype, p.requires_grad) for key, p in model.named_parameters()}
    assert {key: after[key] for key in before} == before
    assert not any(trained for key, (_, trained) in after.items() if key.endswith("in_proj.weight"))
    assert relative_error(model(ids).logits, expected) < 0.05
    with pytest.raises(ValueError, match="model must not be upcycled"):
        upcycle(model)
    assert not model.load_state_dict({}, strict=False).unexpected_keys


def test_a_model_without_mixers_is_an_error():
    with pytest.raises(ValueError, match=r"model must contain .*Linear"):
        upcycle(torch.nn.Linear(2, 2))


@each_model_quick_mamba
@torch.no_grad()
def test_every_kind_of_cache_generates_the_same(name, ids):
    model = upcycle(build(name), Muon())
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)
    for implementation in ("dynamic", "static"):
        options = {"cache_implementation": implementation, "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.generate(ids, **options), expected), implementation


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mamba", "mamba2", "qwen3-next"])
@torch.no_grad()
def test_exports_and_compiles_with_a_mask(name, ids, mask):
    """The program was made for another mask: nothing in it depends on values."""
    model = upcycle(build(name), Muon())
    expected = model(ids, attention_mask=mask, use_cache=False).logits[mask == 1]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(mask), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False).module()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (program, compiled):
        logits = run(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask == 1]
        assert_close(logits, expected, 1e-5, "logits")


@torch.no_grad()
def test_offloaded_weights_are_there_when_a_layer_needs_them(ids):
    from accelerate import cpu_offload

    model = upcycle(build("mamba"), Muon(), momentum="per_step")
    expected = model(ids).logits
    cpu_offload(model, execution_device="cpu")
    assert model.backbone.layers[0].mixer.dt_proj.weight.is_meta
    assert_close(model(ids).logits, expected, 1e-6, "logits")


def test_twice_upcycled_says_what_to_do():
    model = upcycle(build("mamba"), Muon())
    with pytest.raises(ValueError, match=r"model must not be upcycled already.*save_pretrained .* load that"):
        upcycle(model, Muon(gamma=0.5))


@pytest.mark.parametrize("muon", [Muon.off(), Muon()], ids=["plain", "muon"])
@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_native_decoding_equals_the_ordinary_path(name, muon):
    model = upcycle(build(name), muon)
    model.generation_config.eos_token_id = None
    ordinary = copy.deepcopy(model)
    ordinary.decode = lambda _: None
    ids, mask = torch.randint(1, 61, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    for options in ({}, {"num_beams": 2}):
        options = {**options, "attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(ids, **options), ordinary.generate(ids, **options))
    assert model.why_not_native() is None
    assert model._decoder._program is not None
    assert type(model).__name__ == type(build(name)).__name__

    dropped = copy.deepcopy(model).prepare_decoding("bfloat16", drop=True)
    with torch.no_grad():
        expected, actual = (each(ids, attention_mask=mask).logits[mask != 0] for each in (model, dropped))
        continued, one_by_one = model(ids, use_cache=True).cache_params, []
        for t in range(3):  # several tokens at once equal one by one
            one_by_one.append(model(ids[:, t : t + 1], cache_params=continued).logits)
        at_once = model(ids[:, :3], cache_params=model(ids, use_cache=True).cache_params).logits
    assert relative_error(actual, expected) < 0.02
    assert_close(at_once, torch.cat(one_by_one, dim=1), 1e-5)


def test_qwen3_next_decodes_the_ordinary_way():
    model = upcycle(build("qwen3-next"))
    assert not hasattr(model, "prepare_decoding")
