"""Native decoding of language models equals the torch path: tokens, logits, states, for whatever it covers.

The quick tier runs every backbone once, in turns plain and with Muon, pure and hybrid; the rest is marked `full`.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from muonssm import Muon
from muonssm.layers import BACKBONES
from muonssm.layers.decoding import weights as packing
from muonssm.models.language import MuonSSMCache, MuonSSMConfig, MuonSSMForCausalLM
from muonssm.ops import cpu_library, decode_steps

VOCABULARY = 77
DELTA = {"num_heads": 2, "head_k_dim": 9, "head_v_dim": 13}
MIXERS = {"mamba": {"d_state": 5}, "mamba2": {"d_state": 11}, "longhorn": {"d_state": 6}}
RULES = {"plain": False, "muon": True, "residual": Muon.residual(), "gated": Muon.gated()}
HYBRID = {"ssm_every": 2, "sliding_window": 9, "num_attention_heads": 6, "num_key_value_heads": 2}
TOLERANCE = 1e-5  # largest difference relative to the largest logit: both paths compute in float32

pytestmark = pytest.mark.skipif(cpu_library.unavailable() is not None, reason="the C++ kernels are not built")


def build(backbone="gated_deltanet", rule="muon", hybrid=False, **changes):
    """Build a small model of odd sizes whose greedy tokens vary."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3}
    mixer = {**MIXERS.get(backbone, DELTA), **changes.pop("mixer", {})}
    changes = {**sizes, **(HYBRID if hybrid else {}), **changes}
    model = MuonSSMForCausalLM(MuonSSMConfig(backbone=backbone, muon=RULES[rule], mixer=mixer, **changes)).eval()
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "A_log" not in name:
                parameter.mul_(1.5)
            if name.endswith("momentum.weight"):
                parameter.normal_()
            if name.endswith("embed_tokens.weight"):
                parameter.normal_()
    return model


def ordinary(model):
    """Return a copy of a model that decodes through torch."""
    other = copy.deepcopy(model)
    other.decode = lambda *_: None
    return other


def tokens(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def is_native(model):
    return model._decoder is not None and model._decoder._program is not None and not model._decoder._logged


@torch.no_grad()
def logits_by(model, ids, begin, step, cache=None, **options):
    """Read `begin` tokens at once and then `step` at a time; return the logits of the latter, and the cache."""
    cache = MuonSSMCache(model.config) if cache is None else cache
    model(ids[:, :begin], past_key_values=cache, **options)
    parts = [ids[:, i : i + step] for i in range(begin, ids.shape[1], step)]
    return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1), cache


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def combinations():
    """Every backbone, rule and layout; quick are four rules in turns over the backbones, pure and hybrid in turns."""
    for (i, backbone), (j, rule), hybrid in itertools.product(enumerate(BACKBONES), enumerate(RULES), (False, True)):
        if backbone == "mamba" and rule == "gated":
            continue  # its write gate is a part of the value
        quick = j == i % 3 and hybrid == (i % 2 == 1)
        name = f"{backbone}-{rule}-{'hybrid' if hybrid else 'pure'}"
        yield pytest.param(backbone, rule, hybrid, id=name, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("backbone", "rule", "hybrid"), list(combinations()))
def test_greedy_tokens_equal_the_ordinary_path(backbone, rule, hybrid):
    model = build(backbone, rule, hybrid, tie_word_embeddings=False)  # tied embeddings repeat one token
    prompt = tokens(1, 7)
    options = {"max_new_tokens": 200, "do_sample": False}
    expected = ordinary(model).generate(prompt, **options)
    assert torch.equal(model.generate(prompt, **options), expected)
    assert is_native(model)
    assert len(expected[0].unique()) > 3


@pytest.mark.parametrize("momentum", ["per_head", "per_step"])
@pytest.mark.parametrize(("backbone", "changes"), [
    ("mamba", {"mixer": {"bias": True}}),
    ("mamba2", {"mixer": {"groups": 2, "head_dim": 6, "bias": True}}),
    ("deltanet", {"mixer": {"output_gate": True}, "intermediate_size": 0}),
    ("gated_deltanet", {"mixer": {"num_value_heads": 4, "gate_bias": False}, "tie_word_embeddings": False}),
    ("longhorn", {"mixer": {"form": "diagonal"}}),
    ("longhorn", {"mixer": {"head_dim": 8, "conv_size": 3}}),
])  # fmt: skip
def test_learned_momentum_and_settings_of_mixers(backbone, changes, momentum):
    model = build(backbone, momentum=momentum, **changes)
    ids = tokens(2, 13)
    actual, cache = logits_by(model, ids, 5, 1)
    expected, other = logits_by(ordinary(model), ids, 5, 1)
    assert is_native(model)
    assert_close(actual, expected)
    for layer, twin in zip(cache.layers, other.layers, strict=True):
        for states, twins in ((layer.conv_states, twin.conv_states), (layer.recurrent_states, twin.recurrent_states)):
            assert_close(states[0], twins[0])
    assert_close(cache.layers[0].recurrent_states[1], other.layers[0].recurrent_states[1])


@pytest.mark.parametrize("hybrid", [False, True], ids=["pure", "hybrid"])
@pytest.mark.parametrize(("batch", "step"), [(1, 3), (3, 5), (5, 1), (16, 1), (1, 16)])
def test_batches_and_several_tokens(batch, step, hybrid):
    model = build("longhorn" if hybrid else "mamba", hybrid=hybrid)
    ids = tokens(batch, 4 + 2 * step)
    actual, cache = logits_by(model, ids, 4, step)
    expected, other = logits_by(ordinary(model), ids, 4, step)
    assert is_native(model)
    assert_close(actual, expected)
    # Both paths continue from each other's states.
    with torch.no_grad():
        one = ordinary(model)(ids[:, :1], past_key_values=cache).logits
        two = model(ids[:, :1], past_key_values=other).logits
    assert_close(one, two)


@pytest.mark.parametrize("backbone", ["momentum_deltanet", "mamba"])
def test_left_padding_and_beams(backbone):
    model = build(backbone, hybrid=True)
    prompt, mask = tokens(3, 7), torch.ones(3, 7, dtype=torch.int64)
    mask[0, :3] = mask[2, :1] = 0
    for options in ({}, {"num_beams": 3}):
        options = {**options, "attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
        assert torch.equal(model.generate(prompt, **options), ordinary(model).generate(prompt, **options))
    assert is_native(model)


def test_padding_among_new_tokens_writes_nothing():
    model = build("gated_deltanet", hybrid=True)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    mask[0, 5:7] = mask[1, 9] = 0
    outputs = []
    for each in (model, ordinary(model)):
        cache = MuonSSMCache(model.config)
        with torch.no_grad():
            each(ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
            parts = [each(ids[:, 4:8], attention_mask=mask[:, :8], past_key_values=cache).logits]
            parts.append(each(ids[:, 8:], attention_mask=mask, past_key_values=cache).logits)
        outputs.append(torch.cat(parts, dim=1)[mask[:, 4:] != 0])
    assert is_native(model)
    assert_close(*outputs)


def test_the_same_bits_for_any_number_of_threads():
    before = torch.get_num_threads()
    try:
        for backbone, weights in itertools.product(BACKBONES, packing.FORMATS):
            model = build(backbone, hybrid=True).prepare_decoding(weights)
            ids, results = tokens(3, 9), []
            prefix = logits_by(model, ids[:, :4], 3, 1)[1]
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(logits_by(model, ids, 4, 1, copy.deepcopy(prefix))[0])
                torch.set_num_threads(1)
            assert all(torch.equal(results[0], other) for other in results[1:]), (backbone, weights)
    finally:
        torch.set_num_threads(before)


def with_packed_weights(model, weights):
    """Return a copy that decodes through torch with the numbers that packed weights stand for."""
    other, done = ordinary(model), set()
    for module in other.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and id(module.weight) not in done:
            done.add(id(module.weight))
            packed = packing.pack(module.weight.detach(), weights)
            module.weight.data = packing.unpack(packed, module.weight.shape[1]).clone()
    return other


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("backbone", ["mamba", "mamba2", "gated_deltanet", "momentum_deltanet"])
def test_packed_weights_compute_with_the_numbers_they_stand_for(backbone, weights):
    model = build(backbone, hybrid=True)
    expected = logits_by(with_packed_weights(model, weights), tokens(2, 40), 20, 4)[0]
    dropped = copy.deepcopy(model).prepare_decoding(weights, drop=True)
    assert_close(logits_by(dropped, tokens(2, 40), 20, 4)[0], expected)
    model.prepare_decoding(weights)  # prompts are read in float32 here
    assert_close(logits_by(model, tokens(2, 40), 2, 2)[0][:, 20:], expected[:, 2:], tolerance=0.1)


@pytest.mark.parametrize(("weights", "bits"), [("bfloat16", 8), ("int8", 7)])
def test_packing_rounds_to_the_nearest(weights, bits):
    weight = torch.randn(37, 70, generator=torch.Generator().manual_seed(0))
    weight[3, 32:64] = 0
    packed = packing.pack(weight, weights)
    error = (packing.unpack(packed, 70) - weight).abs()
    if weights == "bfloat16":
        assert (error <= weight.abs() * 2.0**-bits).all()
    else:
        largest = nn.functional.pad(weight, (0, 26)).unflatten(1, (-1, 32)).abs().amax(-1)
        assert (error <= 0.51 * 1.01 * largest.repeat_interleave(32, dim=1)[:, :70] / 127).all()
    assert packed.rows == 37


def project(weight, weights, x):
    """Return x W^T by a program of one projection."""
    packed, (inputs, columns) = packing.pack(weight, weights), x.shape
    scales = None if packed.scales is None else packed.scales.data_ptr()
    matrix = decode_steps.Matrix(packed.format, packed.rows, packed.data.data_ptr(), scales, None)
    out, ids = torch.zeros(inputs, packed.rows + 16), torch.zeros(inputs, dtype=torch.int64)
    step = decode_steps.ProjectStep(columns=columns, count=1, x_step=columns, out_step=out.shape[1])
    step.x, step.out, step.matrices[0] = x.data_ptr(), out.data_ptr(), matrix
    table = (decode_steps.DecodeStep * 1)((decode_steps.PROJECT, ctypes.addressof(step)))
    scratch = torch.zeros(inputs * (columns + 64))
    arguments = decode_steps.DecodeArguments(1, inputs, 1, 1, 1, 1, scratch.numel(), ctypes.addressof(table))
    arguments.tokens, arguments.scratch = ids.data_ptr(), scratch.data_ptr()
    assert decode_steps.load().muonssm_decode(ctypes.byref(arguments)) == 0
    return out[:, : packed.rows]


@pytest.mark.parametrize("weights", packing.FORMATS)
@pytest.mark.parametrize("columns", [1, 31, 64, 100])
def test_activations_keep_the_bits_of_float32(columns, weights):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(21, columns, generator=generator)
    x = torch.randn(5, columns, generator=generator)
    x[0], x[1] = x[0] * 1e-25, x[1] * 1e25
    x[2] *= torch.logspace(-8, 8, columns)  # within a block too
    x[3] = 0
    x[4] = (2 - 2.0**-23) * x[4].sign()  # the largest numbers below a power of two
    numbers = packing.unpack(packing.pack(weight, weights), columns).double()
    error = (project(weight, weights, x) - x.double() @ numbers.T).abs()
    largest = nn.functional.pad(x, (0, -columns % 32)).unflatten(1, (-1, 32)).abs().amax(-1)  # of a block
    largest = largest.repeat_interleave(32, dim=1)[:, :columns].double()
    assert (error <= 2.0**-21 * largest @ numbers.abs().T).all()
    x[3, 0] = math.nan
    assert project(weight, weights, x)[3].isnan().all()


def test_dropped_weights_need_less_memory_and_refuse_the_rest():
    model = build("gated_deltanet", intermediate_size=512, hidden_size=128, vocab_size=1000)
    parameters = sum(4 * p.numel() for p in model.parameters())
    model.prepare_decoding("int8", drop=True)
    storage = sum(p.untyped_storage().nbytes() for p in model.parameters()) + model._decoder.bytes()
    assert storage < 0.45 * parameters
    with pytest.raises(RuntimeError, match="float32 weights"):
        model.state_dict()
    with pytest.raises(RuntimeError, match="float32 weights"):
        model.train()(tokens(1, 3))
    with pytest.raises(TypeError, match="float32 weights"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match="drop"):
        build().prepare_decoding("float32", drop=True)
    with pytest.raises(ValueError, match="weights"):
        build().prepare_decoding("int4")


def test_changes_of_parameters_are_seen():
    model, ids = build("mamba"), tokens(1, 6)
    logits_by(model, ids, 2, 1)
    changes = [
        lambda: model.lm_head.weight.mul_(2),
        lambda: model.model.layers[0].mixer.A_log.add_(1),  # a copy is made of it
        lambda: setattr(model.model.layers[1].mixer.out_proj, "weight", nn.Parameter(torch.randn(36, 72))),
        lambda: model.load_state_dict({k: v + 0.01 for k, v in model.state_dict().items()}),
        lambda: setattr(model.model.layers[1].mixer, "in_proj", nn.Linear(36, 144, bias=False)),
    ]
    for change in changes:
        with torch.no_grad():
            change()
        assert_close(logits_by(model, ids, 2, 1)[0], logits_by(ordinary(model), ids, 2, 1)[0])
        assert is_native(model)


def test_what_it_does_not_cover_goes_the_ordinary_way_and_says_so(caplog):
    model, ids = build("gated_deltanet"), tokens(1, 6)
    logits_by(model, ids, 2, 1)
    calls = []
    handle = model.model.layers[0].mixer.register_forward_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.INFO, logger="muonssm"):
        logits_by(model, ids, 2, 1)
    assert len(calls) == 5
    assert "hook" in caplog.text
    assert "hook" in model.why_not_native()
    handle.remove()
    assert model.why_not_native() is None

    class Adapter(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model.model.layers[0].mlp.down_proj = Adapter(52, 36, bias=False)
    assert "Adapter" in model.why_not_native()
    assert_close(logits_by(model, ids, 2, 1)[0], logits_by(ordinary(model), ids, 2, 1)[0])
    with pytest.raises(ValueError, match="Adapter"):
        model.prepare_decoding("int8")
    assert "training" in build().train().why_not_native()
    reference = build("mamba")
    for block in reference.model.layers:
        block.mixer.impl = "reference"
    assert "reference" in reference.why_not_native()
    assert "bfloat16" in build().to(torch.bfloat16).why_not_native()
    sigmoid = build("momentum_deltanet", mixer={"num_heads": 2, "gate_activation": "sigmoid"})
    assert "gate_activation='sigmoid'" in sigmoid.why_not_native()


def test_threads_of_python_share_a_model():
    model = build("gated_deltanet", hybrid=True)
    prompts = [tokens(1, 9, seed=s) for s in range(4)]
    expected = [logits_by(model, prompt, 3, 1)[0] for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: logits_by(model, prompt, 3, 1)[0], prompts * 4))
    assert all(torch.equal(a, b) for a, b in zip(found, expected * 4, strict=True))


def test_gradients_are_recorded_the_ordinary_way():
    model, cache = build("mamba"), MuonSSMCache(build("mamba").config)
    with torch.no_grad():
        model(tokens(1, 4), past_key_values=cache)
    assert model(tokens(1, 1), past_key_values=cache).logits.requires_grad


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_tokens_outside_of_the_vocabulary_are_refused(token):
    model, cache = build(), MuonSSMCache(build().config)
    with torch.no_grad():
        model(tokens(1, 4), past_key_values=cache)
        with pytest.raises(IndexError, match="input_ids"):
            model(torch.tensor([[token]]), past_key_values=cache)


# ---- snapshots


@pytest.mark.parametrize("native", [True, False], ids=["native", "ordinary"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["pure", "hybrid"])
def test_prompts_that_share_a_prefix(hybrid, native):
    model = build("gated_deltanet", hybrid=hybrid)
    model = model if native else ordinary(model)
    prefix, endings = tokens(2, 12), [tokens(2, 6, seed=s) for s in (2, 3)]
    cache = MuonSSMCache(model.config)
    with torch.no_grad():
        start = model(prefix[:, :10], past_key_values=cache).past_key_values.snapshot()
        model(prefix[:, 10:], past_key_values=cache)  # what is read now must not change the snapshot
        for ending in (*endings, endings[0]):
            cache.restore(start)
            assert cache.get_seq_length() == 10
            parts = [model(ending[:, i : i + 1], past_key_values=cache).logits for i in range(6)]
            whole = model(torch.cat([prefix[:, :10], ending], dim=1)).logits[:, -6:]
            assert_close(torch.cat(parts, dim=1), whole)
        cache.reset()
        cache.restore(start)
        assert_close(model(endings[0][:, :1], past_key_values=cache).logits, model(
            torch.cat([prefix[:, :10], endings[0][:, :1]], dim=1)).logits[:, -1:])  # fmt: skip


def test_a_rejected_draft_is_taken_back():
    model = build("longhorn", hybrid=True)
    text, draft = tokens(1, 30), tokens(1, 5, seed=9)
    expected = logits_by(model, text, 10, 1)[0]
    cache, parts = MuonSSMCache(model.config), []
    with torch.no_grad():
        model(text[:, :10], past_key_values=cache)
        for i in range(10, 30, 2):
            before = cache.snapshot()
            model(draft, past_key_values=cache)
            cache.restore(before)
            parts.append(model(text[:, i : i + 2], past_key_values=cache).logits)
    assert_close(torch.cat(parts, dim=1), expected)


def test_snapshots_of_an_empty_cache_and_bad_ones():
    model = build("mamba", hybrid=True)
    cache = MuonSSMCache(model.config)
    empty = cache.snapshot()
    first = logits_by(model, tokens(1, 8), 4, 1, cache)[0]
    cache.restore(empty)
    assert cache.get_seq_length() == 0
    assert_close(logits_by(model, tokens(1, 8), 4, 1, cache)[0], first)
    with pytest.raises(TypeError, match="snapshot"):
        cache.restore(None)
    with pytest.raises(ValueError, match="layers"):
        MuonSSMCache(build("mamba", num_hidden_layers=2).config).restore(empty)
    start = time.perf_counter()
    for _ in range(100):
        cache.snapshot()
    assert (time.perf_counter() - start) / 100 < 1e-3  # microseconds; the bound cannot flake
