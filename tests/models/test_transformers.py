"""The language model as transformers' own tests see one: outputs, export, packing, offload, loading, heads, adapters.

tests/models/test_language.py has the model's mathematics, test_transformers_cache.py its caches.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorWithFlattening,
)

import muonssm
from muonssm.layers import BACKBONES
from muonssm.models.language import (
    MuonSSMCache,
    MuonSSMConfig,
    MuonSSMForCausalLM,
    MuonSSMForTokenClassification,
)
from muonssm.models.language.cache import MuonSSMStaticCache
from muonssm.ops import decompositions

from .test_language import HYBRID, MUON_HYBRID, VOCABULARY, build, combinations, each_layout, tokens

each_backbone = pytest.mark.parametrize("backbone", BACKBONES)
each_combination = combinations([*MUON_HYBRID, ("mamba", False, "pure")])
each_combination_slow = combinations([("mamba", True, "pure"), ("gated_deltanet", True, "hybrid")])


def assert_equal(a, b):
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def padded():
    """Tokens, and a mask with padding on the left of one row and in the middle of another."""
    ids, mask = tokens(3, 14), torch.ones(3, 14, dtype=torch.long)
    mask[1, :5] = 0
    mask[2, 4:7] = 0
    return ids, mask


# ---- outputs and switches


@each_combination
def test_outputs_are_recorded(backbone, muon, changes):
    model, ids = build(backbone, muon, attn_implementation="eager", **changes), tokens(2, 7)
    out = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(ids))
    assert_equal(model.lm_head(out.hidden_states[-1]), out.logits)
    attention_layers = model.config.layer_types.count("sliding_attention")
    assert [weights.shape for weights in out.attentions or ()] == [(2, 4, 7, 7)] * attention_layers
    model.config.output_hidden_states = model.config.output_attentions = True
    by_config = model(ids)
    assert all(map(torch.equal, by_config.hidden_states, out.hidden_states))
    assert len(by_config.attentions or ()) == attention_layers
    as_tuple = model(ids, use_cache=False, return_dict=False)
    assert torch.equal(as_tuple[0], out.logits)
    assert len(as_tuple[1]) == 3


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_scaled_rotary_embeddings_of_a_hybrid(kind):
    """Scaling changes what lies beyond the trained length; the dynamic kind, as its name says, nothing within it."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    model, plain, ids = build(**HYBRID, max_position_embeddings=8, rope_parameters=rope), build(**HYBRID), tokens(2, 14)
    assert model.config.head_dim == 8
    changed = (model(ids).logits - plain(ids).logits).abs().amax((0, 2))
    assert changed[-1] > 1e-4
    if kind == "dynamic":
        assert_equal(model(ids[:, :7]).logits, plain(ids[:, :7]).logits)


def test_some_layers_and_gradients_of_hidden_states():
    model, ids = build(), tokens(2, 7)
    out = model(ids, output_hidden_states=[1])
    assert [state is not None for state in out.hidden_states] == [False, True]
    out = model(ids, output_hidden_states=True)
    out.hidden_states[1].retain_grad()
    out.logits.square().sum().backward()
    assert out.hidden_states[1].grad.abs().sum() > 0


@each_layout
def test_gradient_checkpointing_returns_no_cache(changes):
    model, ids = build(**changes).train(), tokens(2, 7)
    model.gradient_checkpointing_enable()
    assert model(ids, use_cache=True).past_key_values is None
    cache = MuonSSMCache(model.config)
    assert model(ids, past_key_values=cache, use_cache=True).past_key_values is None
    assert cache.get_seq_length() == 0


@each_backbone
def test_dtype_converts_all_weights_and_the_memory_stays_wide(backbone, tmp_path):
    """As transformers' Mamba: `dtype=` also converts A_log, D and dt_bias; they are computed with in float32."""
    build(backbone).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    cache = model(tokens(1, 5), use_cache=True).past_key_values
    assert cache.layers[0].recurrent_states[0].dtype == torch.float32


# ---- export and compile


def exported(model, **inputs):
    with torch.no_grad():
        return torch.export.export(model, (), inputs, strict=False).module()


@pytest.mark.slow
@each_combination_slow
def test_export_with_a_mask(backbone, muon, changes):
    """The program takes any mask: nothing in it depends on the values of this one."""
    model, (ids, mask) = build(backbone, muon, **changes), padded()
    program = exported(model, input_ids=ids, attention_mask=torch.ones_like(mask), use_cache=False)
    out = program(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert_equal(out[mask == 1], model(ids, attention_mask=mask, use_cache=False).logits[mask == 1])


@pytest.mark.slow
@each_layout
def test_export_with_dynamic_shapes(changes):
    model, (ids, mask) = build(**changes), padded()
    rows, steps = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("steps", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(
            model,
            (),
            {"input_ids": ids, "attention_mask": mask, "use_cache": False},
            strict=False,
            dynamic_shapes={
                "input_ids": {0: rows, 1: steps},
                "attention_mask": {0: rows, 1: steps},
                "use_cache": None,
            },
        ).module()
    longer = tokens(4, 23, seed=3)
    mask = torch.ones_like(longer)
    mask[1, :9] = 0
    out = program(input_ids=longer, attention_mask=mask, use_cache=False).logits
    assert_equal(out[mask == 1], model(longer, attention_mask=mask, use_cache=False).logits[mask == 1])


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["mamba", "gated_deltanet"])
def test_an_exported_step_serves_every_step(backbone):
    """The number of tokens is no part of the program: a pure model decodes by one exported step."""
    model, ids = build(backbone), tokens(2, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = model(ids[:, :5], use_cache=True).past_key_values
        step = exported(model, input_ids=ids[:, 5:6], past_key_values=copy.deepcopy(cache), use_cache=True)
        for i in range(5, 9):
            out = step(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            assert_equal(out.logits[:, 0], expected[:, i])
    with pytest.raises(ValueError, match="past_key_values must have counted its tokens"):
        cache.get_seq_length()


@pytest.mark.slow
def test_an_exported_step_of_a_static_cache_counts_tokens():
    model, ids = build("mamba"), tokens(2, 9)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = MuonSSMStaticCache(model.config, max_cache_len=9)
        model(ids[:, :5], past_key_values=cache, use_cache=True)
        step = exported(model, input_ids=ids[:, 5:6], past_key_values=copy.deepcopy(cache), use_cache=True)
        for i in range(5, 9):
            out = step(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            assert_equal(out.logits[:, 0], expected[:, i])
    assert cache.get_seq_length() == 9


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@each_layout
def test_transformers_exporter_of_prefill_and_decoding(changes, dynamic):
    """With dynamic shapes, decoding is a program for several new tokens."""
    from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
    from transformers.exporters.utils import decompose_for_generation, get_leaf_tensors

    model, ids = build(**changes), tokens(2, 9)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    stages = decompose_for_generation(model, inputs, multi_token_decode=dynamic)
    assert set(stages) == {"prefill", "decode"}
    for stage, given in stages.values():
        with torch.no_grad():
            expected = get_leaf_tensors(stage(**copy.deepcopy(given)))
            program = DynamoExporter().export(stage, given, config=DynamoConfig(dynamic=dynamic)).module()
            found = get_leaf_tensors(program(**copy.deepcopy(given)))
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value)


@pytest.mark.slow
@each_combination_slow
def test_compiles_with_a_mask(backbone, muon, changes):
    model, (ids, mask) = build(backbone, muon, **changes), padded()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for padding in (torch.ones_like(mask), mask):
        out = compiled(ids, attention_mask=padding, use_cache=False).logits
        expected = model(ids, attention_mask=padding, use_cache=False).logits
        assert_equal(out[padding == 1], expected[padding == 1])


# ---- packed documents


def documents():
    return [tokens(1, length, seed=length)[0] for length in (11, 7, 3)]


@pytest.mark.parametrize("bounds", [False, True], ids=["position_ids", "cu_seq_lens"])
@each_combination
def test_flattened_batches_keep_documents_apart(backbone, muon, changes, bounds):
    model, collator = build(backbone, muon, **changes), DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    batch = collator([{"input_ids": document.tolist()} for document in documents()])
    alone = torch.cat([model(document[None], use_cache=False).logits for document in documents()], dim=1)
    assert_equal(model(**batch, use_cache=False).logits, alone)
    del batch["labels"]
    assert_equal(model.train()(**batch).logits, alone)


@each_layout
def test_several_rows_of_flattened_documents(changes):
    model, (a, b, _) = build(**changes), documents()
    rows = torch.stack([torch.cat([b, a[:4]]), a])
    positions = torch.stack([torch.cat([torch.arange(7), torch.arange(4)]), torch.arange(11)])
    logits = model(rows, position_ids=positions, use_cache=False).logits
    assert_equal(logits[:1, 7:], model(a[None, :4], use_cache=False).logits)
    assert_equal(logits[1:], model(a[None], use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "changes"), [("mamba", {}), ("gated_deltanet", {}), ("gated_deltanet", HYBRID)])
def test_compiled_bounds_are_checked_when_they_are_used(backbone, changes):
    model, ids = build(backbone, **changes), torch.cat(documents())[None]
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    bounds = torch.tensor([0, 11, 18, 21], dtype=torch.int32)
    expected = model(ids, cu_seq_lens_q=bounds, use_cache=False).logits
    assert_equal(compiled(ids, cu_seq_lens_q=bounds, use_cache=False).logits, expected)
    with pytest.raises(ValueError, match="cu_seqlens must start at 0, never decrease and end at L = 21"):
        compiled(ids, cu_seq_lens_q=torch.tensor([0, 11, 18, 99], dtype=torch.int32), use_cache=False)


# ---- offload, plans


@each_combination
def test_offloaded_layers_compute_the_same(backbone, muon, changes, tmp_path):
    """Weights stay on disk until a layer is called, so no code may reach for the weights of another layer."""
    momentum = {"momentum": "per_step"} if muon and backbone != "momentum_deltanet" else {}
    model, ids = build(backbone, muon, **momentum, **changes), tokens(2, 9)
    model.save_pretrained(tmp_path / "model")
    expected = model(ids).logits
    text = model.generate(ids, max_new_tokens=4, do_sample=False)
    places = {name: "disk" for name, _ in model.named_modules() if name.count(".") == 2}  # model.layers.N
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.dropout": "cpu"}
    places |= {"model.rotary_emb": "cpu"} if changes else {}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "weights"
    )
    assert loaded.model.layers[0].mixer.out_proj.weight.is_meta if not changes else True
    assert_equal(loaded(ids).logits, expected)
    assert torch.equal(loaded.generate(ids, max_new_tokens=4, do_sample=False), text)


@each_layout
def test_plans_name_modules_that_exist(changes):
    for intermediate_size in (0, 48):
        model = build(**changes, intermediate_size=intermediate_size)
        names = {name.replace(".0.", ".*.").replace(".1.", ".*.") for name, _ in model.named_modules()}
        assert set(model.tp_plan) <= names
        assert ("model.layers.*.mlp.up_proj" in model.tp_plan) == bool(intermediate_size)
        assert ("model.layers.*.mixer.q_proj" in model.tp_plan) == bool(changes)
        assert set(model.fsdp_plan) == {"model.embed_tokens", "model.layers.*", "model.norm", "lm_head"}


SHARDED = """
import os, sys
folder, store, rank = sys.argv[1:]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
import muonssm, torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
dist.init_process_group("gloo", init_method="file://" + store, rank=int(rank), world_size=2)
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2)).train()
ids = torch.arange(1, 31).view(2, 15)
out = model(ids, labels=ids, use_cache=False)
out.loss.backward()
gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
units = sum(type(module).__name__.startswith("FSDP") for module in model.modules())
if rank == "0":
    torch.save((units, out.logits, out.loss, gradients), store + ".results")
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "changes"), [("gated_deltanet", HYBRID), ("longhorn", {})])
def test_the_fsdp2_plan_computes_the_same_on_two_processes(backbone, changes, tmp_path):
    """The loss comes from the same operations as in one process, without logits: otherwise rounding differs."""
    model, ids = build(backbone, **changes), torch.arange(1, 31).view(2, 15)
    model.save_pretrained(tmp_path / "model")
    out = model.train()(ids, labels=ids, use_cache=False)
    out.loss.backward()
    arguments = [str(tmp_path / "model"), str(tmp_path / "store")]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: run_python(SHARDED, *arguments, str(rank)), range(2)))
    units, logits, loss, gradients = torch.load(tmp_path / "store.results")
    assert units == 6  # embedding, two blocks, norm, head, and the model
    assert out.logits is logits is None
    assert loss == out.loss
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-7, rtol=1e-6, msg=name)


# ---- heads, adapters


@each_layout
def test_classification_heads(changes):
    model, ids = build(**changes, pad_token_id=0), tokens(2, 9)
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.num_labels = 3
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    ids[1, 6:] = 0  # padding on the right: the last real token decides
    out = classifier(ids, attention_mask=(ids != 0).long(), labels=torch.tensor([0, 2]))
    assert out.logits.shape == (2, 3)
    assert_equal(out.logits[1:], classifier(ids[1:, :6]).logits)
    out.loss.backward()
    config.num_labels = 4
    tagger = MuonSSMForTokenClassification(config)
    assert tagger(ids, labels=tokens(2, 9) % 4).logits.shape == (2, 9, 4)


@pytest.mark.parametrize(("backbone", "changes"), [*((name, {}) for name in BACKBONES), ("gated_deltanet", HYBRID)])
def test_lora_finds_its_targets_and_merges(backbone, changes):
    from peft import LoraConfig, get_peft_model

    model, ids = build(backbone, **changes), tokens(2, 9)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
    targets = {name.split(".")[-4] for name, p in adapted.named_parameters() if p.requires_grad}
    assert targets == {"in_proj", "out_proj"} | ({"q_proj", "v_proj"} if changes else set())
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    with torch.no_grad():
        expected = adapted(ids).logits
        steps = adapted(ids[:, :-1], use_cache=True).past_key_values
        assert_equal(adapted(ids[:, -1:], past_key_values=steps, use_cache=True).logits, expected[:, -1:])
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backbone", ["mamba", "longhorn"])
def test_adapters_of_gates_are_used(backbone):
    """The gates' projections are called, so that an adapter on them changes the output."""
    from peft import LoraConfig, get_peft_model

    model, ids = build(backbone), tokens(1, 9)
    before, gate = model(ids).logits, {"mamba": "dt_proj", "longhorn": "dt_head"}[backbone]
    adapted = get_peft_model(model, LoraConfig(target_modules=[gate], init_lora_weights=False))
    assert not torch.allclose(adapted(ids).logits, before)


def test_assisted_generation_is_refused_in_one_sentence():
    model, ids = build(), tokens(1, 9)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, assistant_model=build(seed=1), max_new_tokens=3)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(ids, prompt_lookup_num_tokens=2, max_new_tokens=3)


# ---- loading anywhere


def run_python(code: str, *arguments: str) -> str:
    """Run code in a new process, without the torchvision of this environment, which needs a helper to be imported."""
    code = f"import sys\nsys.modules['torchvision'] = None\n{code}"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_import_registers_without_importing():
    code = (
        "import muonssm\n"
        "assert not [name for name in sys.modules if name.startswith('transformers')]\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names\n"
        "assert names['muonssm'] == 'MuonSSMForCausalLM'\n"
        "assert 'muonssm.models.language' not in sys.modules\n"
        "config = AutoConfig.for_model('muonssm', vocab_size=9, hidden_size=16, num_hidden_layers=1)\n"
        "print(type(AutoModelForCausalLM.from_config(config)).__module__)\n"
    )
    assert run_python(code).strip() == "muonssm.models.language.network"
    first_transformers = "from transformers import AutoModelForCausalLM\n" + code.replace("assert not", "assert")
    assert run_python(first_transformers).strip() == "muonssm.models.language.network"


def test_saved_files_are_small_and_name_the_package(tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    names = {"config.json", "generation_config.json", "model.safetensors"}
    code = {"configuration_muonssm.py", "modeling_muonssm.py"}
    assert {path.name for path in tmp_path.iterdir()} == names | code
    assert all((tmp_path / name).stat().st_size < 1000 for name in code)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["auto_map"]["AutoModelForCausalLM"] == "modeling_muonssm.MuonSSMForCausalLM"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert type(loaded) is MuonSSMForCausalLM
    loaded.save_pretrained(tmp_path / "again")  # not a copy of the package's source
    assert json.loads((tmp_path / "again" / "config.json").read_text())["auto_map"] == saved["auto_map"]
    assert {path.name for path in (tmp_path / "again").iterdir()} == names | code


def test_where_the_package_is_missing_transformers_says_so(tmp_path):
    build().save_pretrained(tmp_path)
    code = (
        "class Missing:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] == 'muonssm': raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Missing())\n"
        "from transformers import AutoModelForCausalLM\n"
        "try:\n"
        "    AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "pip install muonssm" in run_python(code, str(tmp_path))


def tokenizer():
    """A tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {name: index for index, name in enumerate(["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz .,"])}
    inner = Tokenizer(models.WordLevel(letters, unk_token="<eos>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<eos>")


STRANGER = """
import copy, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline
folder, scratch = sys.argv[1:]
assert "muonssm" not in sys.modules
load = lambda folder=folder, **options: AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)
model, tokenizer = load(), AutoTokenizer.from_pretrained(folder)
ids = tokenizer("the cat", return_tensors="pt").input_ids
logits = model(ids).logits
print("generate", model.generate(ids, max_new_tokens=5, min_new_tokens=5).shape[1] - ids.shape[1])
write = pipeline("text-generation", folder, trust_remote_code=True)
print("pipeline", type(write("the cat", max_new_tokens=3)[0]["generated_text"]).__name__)
offloaded = load(device_map="auto", max_memory={"cpu": 12000}, offload_folder=scratch + "/offload")
print("offload", "disk" in offloaded.hf_device_map.values(), torch.allclose(offloaded(ids).logits, logits, atol=1e-5))
from peft import LoraConfig, PeftModel, get_peft_model
adapted = get_peft_model(load(), LoraConfig(task_type="CAUSAL_LM"))
data = [{"input_ids": ids[0], "labels": ids[0]}] * 2
options = TrainingArguments(scratch + "/trainer", max_steps=1, report_to=[], learning_rate=0.1, use_cpu=True)
before = {name: p.clone() for name, p in adapted.named_parameters() if p.requires_grad}
Trainer(adapted, options, train_dataset=data).train()
print("trained", any(not torch.equal(p, before[name]) for name, p in adapted.named_parameters() if name in before))
adapted.eval().save_pretrained(scratch + "/adapter")
again = PeftModel.from_pretrained(load(), scratch + "/adapter").eval()
print("adapter", torch.allclose(again(ids).logits, adapted(ids).logits, atol=1e-6))
merged = adapted.merge_and_unload()
merged.save_pretrained(scratch + "/merged")
print("merged", torch.allclose(load(scratch + "/merged")(ids).logits, again(ids).logits, atol=1e-5))
full = load()
Trainer(full, options, train_dataset=data).train()
from lm_eval.models.huggingface import HFLM
from lm_eval.api.instance import Instance
scorer = HFLM(folder, trust_remote_code=True, device="cpu", batch_size=2)
request = Instance("loglikelihood", {}, ("the cat", " sat"), 0)
expected = torch.log_softmax(model(tokenizer("the cat sat", return_tensors="pt").input_ids).logits[0], -1)
expected = sum(expected[len("the cat") - 1 + i, token] for i, token in enumerate(tokenizer(" sat").input_ids))
print("lm-eval", abs(scorer.loglikelihood([request])[0][0] - float(expected)) < 1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["mamba", "gated_deltanet"])
def test_a_process_that_never_imports_muonssm(backbone, tmp_path):
    torch.manual_seed(0)
    config = MuonSSMConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, backbone=backbone,
        pad_token_id=0, eos_token_id=1, mixer={"d_state": 8} if backbone == "mamba" else {}, **HYBRID,
    )  # fmt: skip
    MuonSSMForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    printed = run_python(STRANGER, str(tmp_path / "model"), str(tmp_path))
    for line in ("generate 5", "pipeline str", "offload True True", "trained True", "adapter True", "merged True"):
        assert line in printed.splitlines()
    assert "lm-eval True" in printed.splitlines()


def test_the_vision_model_loads_anywhere(tmp_path):
    from muonssm.models.vision import vision_config
    from muonssm.models.vision.transformers_model import MambaVisionBackbone, MambaVisionBackboneConfig

    model = MambaVisionBackbone(MambaVisionBackboneConfig.of(vision_config("micro", in_channels=3)))
    model.save_pretrained(tmp_path)
    code = (
        "from transformers import AutoModel, AutoConfig, AutoBackbone\n"
        "print(type(AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)\n"
        "print(type(AutoBackbone.from_config(AutoConfig.from_pretrained(sys.argv[1]))).__name__)\n"
    )
    assert run_python(code, str(tmp_path)).split() == ["MambaVisionBackbone"] * 2


def test_model_card_of_a_run(tmp_path):
    run, folder = tmp_path / "run", tmp_path / "saved"
    build("mamba", False, **HYBRID).save_pretrained(run)
    assert not (run / "README.md").exists()  # not trained by a run
    (run / "recipe.json").write_text(json.dumps({"task": "language", "training": {"epochs": 2}}))
    scores = {"loss": 1.25, "perplexity": 3.49}
    (run / "metrics.json").write_text(json.dumps({"parameters": 12345, "epochs": 2, "steps": 10, "test": scores}))
    (run / "metadata.json").write_text(json.dumps({"summary": "One million tokens of Python."}))
    model = AutoModelForCausalLM.from_pretrained(run)
    model.save_pretrained(folder)
    card = (folder / "README.md").read_text()
    for part in (
        "library_name: transformers", "mamba, plain", "12,345 parameters", "| split | loss | perplexity |",
        "| test | 1.25 | 3.49 |", "One million tokens of Python.", '"epochs": 2', "trust_remote_code=True",
        "nguyen2026muonssm", "Muon(gamma=0",
    ):  # fmt: skip
        assert part in card, part
    (folder / "README.md").write_text("mine")
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "mine"


def test_unknown_types_are_as_before():
    """The tables of transformers have our types beside theirs, nothing else."""
    assert muonssm.build_mixer is not None
    with pytest.raises(ValueError, match="muonsm"):
        AutoConfig.for_model("muonsm")
    assert AutoConfig.for_model("mamba").model_type == "mamba"
    assert AutoConfig.for_model("muonssm").vocab_size > VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize("with_mask", [False, True], ids=["plain", "mask"])
@pytest.mark.parametrize(("backbone", "changes"), [("mamba", {}), ("gated_deltanet", HYBRID), ("longhorn", {})])
def test_onnx_equals_torch(backbone, changes, with_mask, monkeypatch):
    """The kernels' operators become torch's own, which ONNX has; its reference evaluator runs the program.

    A model still compiles after an export.
    """
    monkeypatch.setenv("CI", "true")  # Inductor refuses operators that have a decomposition there
    if backbone == "longhorn":  # as with a torch whose exporter has no loops
        monkeypatch.setattr(decompositions, "_exports_scan", lambda: False)
    from onnx.reference import ReferenceEvaluator

    model, ids = build(backbone, num_hidden_layers=2, **changes), tokens(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    inputs = {"input_ids": ids, "use_cache": False, **({"attention_mask": mask} if with_mask else {})}
    with torch.no_grad():
        program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, verbose=False)
        expected = model(**inputs).logits
    given = {name: value.numpy() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    (logits, *_) = ReferenceEvaluator(program.model_proto).run(None, given)
    real = mask == 1 if with_mask else torch.ones_like(mask) == 1
    assert_equal(torch.from_numpy(logits)[real], expected[real])
    if not with_mask and backbone == "mamba":
        compiled = torch.compile(model, fullgraph=True)(**inputs).logits
        assert_equal(compiled, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "changes"), [("mamba", {}), ("gated_deltanet", HYBRID)])
def test_onnx_keeps_loops_and_serves_any_length(backbone, changes):
    """The recurrence is one loop in the program, whatever the length of the example."""
    from onnx.reference import ReferenceEvaluator

    model, ids = build(backbone, num_hidden_layers=2, **changes), tokens(2, 5)
    rows, steps = torch.export.Dim("rows", min=2, max=64), torch.export.Dim("steps", min=2, max=512)
    shapes = {"input_ids": {0: rows, 1: steps}, "attention_mask": {0: rows, 1: steps}, "use_cache": None}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with torch.no_grad():
        program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
    loops = [node for node in program.model_proto.graph.node if node.op_type == "Scan"]
    assert len(loops) == model.config.layer_types.count("linear_attention")
    longer, mask = tokens(3, 23, seed=3), torch.ones(3, 23, dtype=torch.long)
    mask[1, :9] = 0
    given = {"input_ids": longer.numpy(), "attention_mask": mask.numpy()}
    (logits, *_) = ReferenceEvaluator(program.model_proto).run(None, given)
    expected = model(longer, attention_mask=mask, use_cache=False).logits
    assert_equal(torch.from_numpy(logits)[mask == 1], expected[mask == 1])
