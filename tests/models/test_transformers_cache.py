"""The states of a language model in transformers' caches: every class, every operation, pure and hybrid."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import LinearAttentionLayer

from muonssm.layers import BACKBONES
from muonssm.models.language import MuonSSMCache

from .test_language import VOCABULARY, build, each_layout, tokens

PROMPT, NEW = 9, 12
each_backbone = pytest.mark.parametrize("backbone", BACKBONES)


def generate(model, ids, **options):
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **options}
    return model.generate(ids, **options)


def mixers(model, cache):
    types = model.config.layer_types
    return [layer for layer, name in zip(cache.layers, types, strict=True) if name == "linear_attention"]


@each_layout
def test_every_kind_of_cache_generates_the_same(changes):
    model, ids = build(**changes), tokens(2, PROMPT)
    expected = generate(model, ids, use_cache=False)
    assert len(set(expected[0, PROMPT:].tolist())) > 2, "a model that repeats one token tests nothing"
    for name in (None, "dynamic", "static", "offloaded"):
        assert torch.equal(generate(model, ids, cache_implementation=name), expected), name
    for cache in (
        MuonSSMCache(model.config),
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=PROMPT + NEW),
    ):
        assert torch.equal(generate(model, ids, past_key_values=cache), expected)
        assert cache.get_seq_length() == PROMPT + NEW - 1  # the last token was not read


@each_backbone
def test_states_have_the_librarys_names(backbone):
    model, ids = build(backbone), tokens(2, PROMPT)
    for cache in (MuonSSMCache(model.config), DynamicCache(config=model.config)):
        out = model(ids, past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        _, state = model.model.layers[0].mixer(model.model.layers[0].mixer_norm(model.model.embed_tokens(ids)))
        layer = cache.layers[0]
        assert type(layer) is LinearAttentionLayer
        assert torch.equal(layer.conv_states[0], state.conv.transpose(1, 2))
        assert torch.equal(cache.get_recurrent_state(0, 0), state.memory.S)
        assert torch.equal(cache.get_recurrent_state(0, 1), state.memory.M)
        assert cache.has_previous_state()
        assert not cache.is_croppable


@pytest.mark.parametrize("kind", [MuonSSMCache, lambda config: DynamicCache(config=config)], ids=["own", "library"])
@each_layout
def test_reset_and_reorder(kind, changes):
    model, ids = build(**changes), tokens(3, PROMPT)
    cache = kind(model.config)
    first = model(ids, past_key_values=cache, use_cache=True).logits
    order, following = torch.tensor([2, 0, 0]), tokens(3, 4, seed=7)
    cache.reorder_cache(order)
    moved = model(following, past_key_values=cache, use_cache=True).logits
    whole = model(torch.cat([ids[order], following], dim=1), use_cache=False).logits[:, PROMPT:]
    torch.testing.assert_close(moved, whole, atol=1e-5, rtol=1e-4)
    cache.reset()
    assert not cache.has_previous_state()
    torch.testing.assert_close(model(ids, past_key_values=cache, use_cache=True).logits, first)


@each_layout
def test_batch_operations(changes):
    model, ids, following = build(**changes), tokens(2, PROMPT), tokens(4, 3, seed=7)
    cache = MuonSSMCache(model.config)
    model(ids, past_key_values=cache, use_cache=True)
    cache.batch_repeat_interleave(2)
    repeated = model(following, past_key_values=cache, use_cache=True).logits
    whole = torch.cat([ids.repeat_interleave(2, dim=0), following], dim=1)
    torch.testing.assert_close(repeated, model(whole, use_cache=False).logits[:, PROMPT:], atol=1e-5, rtol=1e-4)
    cache.batch_select_indices(torch.tensor([3, 1]))
    token = tokens(2, 1, seed=8)
    selected = model(token, past_key_values=cache, use_cache=True).logits
    whole = torch.cat([whole[[3, 1]], token], dim=1)
    torch.testing.assert_close(selected, model(whole, use_cache=False).logits[:, -1:], atol=1e-5, rtol=1e-4)
    assert cache.get_seq_length() == PROMPT + 4


@each_layout
def test_padding_in_a_continuation_writes_nothing(changes):
    """Chunks of a left-padded batch, each with its part of the mask, equal one call."""
    model, ids = build(**changes), tokens(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :12] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, pieces = MuonSSMCache(model.config), []
    for start, stop in ((0, 8), (8, 15), (15, 20)):
        options = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        pieces.append(model(ids[:, start:stop], past_key_values=cache, use_cache=True, **options).logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1)[mask == 1], whole[mask == 1], atol=1e-5, rtol=1e-4)


def test_what_a_memory_cannot_do_is_said():
    model, ids = build(), tokens(1, PROMPT)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match=r"past_key_values must be a MuonSSMCache .*DynamicCache with states"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"cache_implementation must .*got 'quantized'"):
        model.generate(ids, cache_implementation="quantized", max_new_tokens=2)
    cache = MuonSSMCache(model.config)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="past_key_values must not record past steps"):
        model(ids, past_key_values=cache, use_cache=True)
    with pytest.raises(TypeError, match=r"past_key_values must be .*got a DynamicCache without a state for mixer 0"):
        model(ids, past_key_values=DynamicCache(), use_cache=True)


def test_generation_does_not_load_the_compiler():
    """transformers' own way to fill a cache layer imports torch's compiler, which takes more than a second."""
    import subprocess
    import sys

    code = (
        "import sys, torch\n"
        "from muonssm.lab.core.torchvision_cpu import prepare_torchvision; prepare_torchvision()\n"
        "from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM, MuonSSMCache\n"
        f"config = MuonSSMConfig(vocab_size={VOCABULARY}, hidden_size=16, intermediate_size=0, num_hidden_layers=1)\n"
        "model, before = MuonSSMForCausalLM(config).eval(), 'torch._dynamo' in sys.modules\n"
        "model(torch.ones(1, 3, dtype=torch.long), past_key_values=MuonSSMCache(config), use_cache=True)\n"
        "print(before, 'torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after
