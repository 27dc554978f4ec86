"""The language task: batches of text, packed documents and instructions, their losses, and the models."""

from __future__ import annotations

import json
import math
import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Subset

from muonssm.lab.core.evaluate import evaluate
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train
from muonssm.lab.language.instructions import prompt
from muonssm.lab.language.prepare import PrepareConfig, prepare
from muonssm.lab.language.pretrained import load_pretrained
from muonssm.lab.language.shards import open_tokens
from muonssm.lab.language.task import LanguageConfig, LanguageModelConfig, LanguageTask
from muonssm.models.language import MuonSSMConfig, MuonSSMForCausalLM
from muonssm.ops import Muon

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 40
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "mixer": {"num_heads": 2}}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Prepared folders: `text`; `rows`, instructions with the same tokenizer; `other`, with a larger one."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "source").mkdir()
    for i in range(60):
        lines = [f"page {i}: the memory keeps line {j} of what it reads.\n" for j in range(1 + i % 3)]
        (folder / "source" / f"{i:02}.txt").write_text("".join(lines))
    prepare(PrepareConfig(str(folder / "source"), vocab_size=300, validation=0.2), folder / "text", progress=False)
    rows = [{"instruction": f"Say {i}", "input": "twice" * (i % 2), "output": f"{i} " * (1 + i % 4)} for i in range(24)]
    (folder / "rows.json").write_text(json.dumps(rows))
    kind = {"kind": "instructions", "validation": 0.2}
    source, own = str(folder / "rows.json"), str(folder / "text")
    prepare(PrepareConfig(source, tokenizer=own, **kind), folder / "rows", progress=False)
    prepare(PrepareConfig(source, vocab_size=320, **kind), folder / "other", progress=False)
    return folder


def make(root, source="text", muon=None, model=None, **data):
    config = LanguageConfig(str(root / source), **{"length": LENGTH if source == "text" else 300, **data})
    return LanguageTask(config, LanguageModelConfig(**{**SIZES, **(model or {})}), Muon() if muon is None else muon)


def build(task, data=None):
    """A model whose loss depends on its context: its weights are larger than initial ones."""
    torch.manual_seed(0)
    model = task.build_model((data or task.load_data()).metadata).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                parameter.mul_(8)
    return model


def loss_of(model, ids, labels):
    """The summed loss of one sequence alone, and its number of labels."""
    logits = model(ids[None], use_cache=False).logits[0]
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), int((labels != -100).sum())


def mean_alone(model, pairs):
    """The mean loss per label of sequences that the model reads one by one."""
    sums, counts = zip(*(loss_of(model, ids, labels) for ids, labels in pairs), strict=True)
    return torch.stack(sums).sum() / sum(counts)


# ---- text


def test_text_becomes_blocks_labeled_with_the_next_tokens(root):
    task = make(root)
    data = task.load_data()
    tokens = torch.from_numpy(open_tokens(root / "text").train.read(0, 3 * LENGTH + 1).astype("int64"))
    batch = task.collate([data.train[i] for i in range(3)], training=True)
    assert set(batch) == {"input_ids", "labels", "shift_labels"}
    assert torch.equal(batch["input_ids"], tokens[:-1].view(3, LENGTH))
    assert torch.equal(batch["labels"], tokens[1:].view(3, LENGTH))
    assert torch.equal(batch["shift_labels"], batch["labels"])
    assert data.test is None
    assert data.metadata["kind"] == "text"
    assert data.metadata["vocab_size"] == 300
    assert f"sequences of {LENGTH}: {len(data.train):,} for training" in data.metadata["summary"]
    assert data.metadata["tokens_per_item"] == LENGTH


def test_the_loss_is_the_mean_over_next_tokens(root):
    task = make(root)
    data = task.load_data()
    model = build(task, data)
    items = [data.train[i] for i in range(3)]
    wanted = mean_alone(model, [(item["input_ids"], item["labels"]) for item in items])
    torch.testing.assert_close(model(**task.collate(items, training=True)).loss, wanted)


def test_validation_items_are_evenly_spaced(root):
    whole = make(root).load_data().validation
    n = len(whole)
    assert n > 4
    few = make(root, validation_items=3).load_data().validation
    assert isinstance(few, Subset)
    assert list(few.indices) == [0, n // 3, 2 * n // 3]
    assert torch.equal(few[2]["input_ids"], whole[2 * n // 3]["input_ids"])
    assert len(make(root, validation_items=n + 5).load_data().validation) == n
    assert len(make(root, "rows", validation_items=2).load_data().validation) == 2


def test_scores_follow_from_the_loss(root):
    def scores(loss):
        scorer = make(root).scorer(None)
        scorer.add({"labels": torch.tensor([1, 2, -100])}, {"loss": torch.tensor(loss, dtype=torch.float64)})
        return scorer.result()

    assert scores(math.log(7.0)) == {"perplexity": pytest.approx(7.0), "loss": math.log(7.0)}
    assert math.isfinite(scores(1e9)["perplexity"])
    assert math.isnan(scores(math.nan)["loss"])
    assert [metric.higher_is_better for metric in LanguageTask.metrics] == [False, False]


# ---- packed documents


def documents(split):
    return [torch.from_numpy(split.document(i)[0].astype("int64")) for i in range(split.documents)]


def test_documents_are_packed_into_one_row_with_bounds(root):
    task = make(root, keep_apart=True)
    data = task.load_data()
    batch = task.collate([data.train[i] for i in (4, 1, 2)], training=True)
    bounds, inputs, labels = batch["cu_seq_lens_q"].tolist(), batch["input_ids"], batch["labels"]
    assert inputs.shape == labels.shape == batch["position_ids"].shape == (1, 3 * LENGTH)
    assert torch.equal(batch["shift_labels"], labels)
    assert (bounds[0], bounds[-1]) == (0, 3 * LENGTH)
    assert bounds == sorted(set(bounds))
    assert {LENGTH, 2 * LENGTH} < set(bounds), "blocks are separate documents too, and documents end inside blocks"
    known = [document.tolist() for document in documents(open_tokens(root / "text").train)]
    eos = data.metadata["eos_token_id"]
    for start, stop in pairwise(bounds):
        assert batch["position_ids"][0, start:stop].tolist() == list(range(stop - start))
        piece = inputs[0, start:stop].tolist()
        assert any(piece == text[i : i + len(piece)] for text in known for i in range(len(text))), (
            "each piece is part of one document"
        )
        assert labels[0, start : stop - 1].tolist() == piece[1:]
        assert eos not in piece[:-1]
        if piece[-1] == eos:
            assert labels[0, stop - 1] == -100, "the next document is not predicted from this one"
        else:
            assert stop % LENGTH == 0
            assert labels[0, stop - 1] != -100


@pytest.mark.parametrize("model", [{}, {"ssm_every": 2}, {"backbone": "mamba", "mixer": {}}], ids=str)
def test_the_loss_of_packed_documents_is_that_of_separate_ones(root, model):
    task = make(root, keep_apart=True, model=model)
    data = task.load_data()
    network = build(task, data)
    items = [data.train[i] for i in range(4)]
    batch = task.collate(items, training=True)
    bounds = batch["cu_seq_lens_q"].tolist()
    pairs = [(batch["input_ids"][0, i:j], batch["labels"][0, i:j]) for i, j in pairwise(bounds)]
    wanted = mean_alone(network, pairs)
    torch.testing.assert_close(network.train()(**batch).loss, wanted, atol=1e-5, rtol=1e-5)
    network.eval()
    together = [(item["input_ids"], item["labels"]) for item in items]
    assert abs(mean_alone(network, together).item() - wanted.item()) > 1e-4, "joined documents must have another loss"


# ---- instructions


def test_labels_of_instructions_are_their_responses(root):
    task = make(root, "rows")
    data = task.load_data()
    tokenizer = open_tokens(root / "rows").load_tokenizer()
    rows = json.loads((root / "rows.json").read_text())
    texts = {prompt(row["instruction"], row["input"]): row["output"] for row in rows}
    assert len(data.train) + len(data.validation) == len(rows)
    for split in (data.train, data.validation):
        for i in range(len(split)):
            ids, labels = split[i]["input_ids"], split[i]["labels"]
            first = int((labels != -100).nonzero()[0])
            asked = tokenizer.decode(ids[: first + 1])
            assert tokenizer.decode(labels[first:-1]) == texts.pop(asked)
            assert labels[-1] == tokenizer.eos_token_id
            assert (labels[:first] == -100).all()
            assert torch.equal(labels[first:-1], ids[first + 1 :])
    assert not texts
    assert data.metadata["kind"] == "instructions"
    mean = sum(len(data.train[i]["input_ids"]) + 1 for i in range(len(data.train))) / len(data.train)
    assert data.metadata["tokens_per_item"] == pytest.approx(mean)


def test_the_loss_of_a_padded_batch_is_the_mean_over_its_labels(root):
    task = make(root, "rows")
    data = task.load_data()
    model = build(task, data)
    items = [data.train[i] for i in range(6)]
    counts = {int((item["labels"] != -100).sum()) for item in items}
    assert len(counts) > 1, "with equal counts a mean of means would be the same"
    batch = task.collate(items, training=True)
    assert batch["attention_mask"].sum(dim=1).tolist() == [len(item["input_ids"]) for item in items]
    assert batch["input_ids"].shape[1] % 8 == 0
    wanted = mean_alone(model, [(item["input_ids"], item["labels"]) for item in items])
    torch.testing.assert_close(model(**batch).loss, wanted, atol=1e-5, rtol=1e-5)
    in_parts = torch.stack([model(**task.collate([item], training=True), num_items_in_batch=batch_labels(batch)).loss
                            for item in items]).sum()  # fmt: skip
    torch.testing.assert_close(in_parts, wanted, atol=1e-5, rtol=1e-5)


def batch_labels(batch):
    return (batch["shift_labels"] != -100).sum()


def test_examples_of_one_length_are_not_padded_and_long_ones_are_cut(root):
    task = make(root, "rows")
    data = task.load_data()
    alone = task.collate([data.train[0]], training=False)
    assert set(alone) == {"input_ids", "labels", "shift_labels"}
    assert alone["input_ids"].shape == (1, len(data.train[0]["input_ids"]))
    longest = max(len(data.train[i]["input_ids"]) for i in range(len(data.train)))
    cut = make(root, "rows", length=longest - 2).load_data().train
    assert max(len(cut[i]["input_ids"]) for i in range(len(cut))) == longest - 2
    with pytest.raises(ValueError, match=r"length must be >= \d+, the shortest prompt of .*rows"):
        make(root, "rows", length=20).load_data()


# ---- models


def test_a_new_model_is_configured_by_its_data(root):
    task = make(root, muon=Muon(gamma=0.5), model={"momentum": "per_head", "dropout": 0.1})
    data = task.load_data()
    model = task.build_model(data.metadata)
    config = model.config
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (300, 0, 0)
    assert config.max_position_embeddings == LENGTH
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 2, 48)
    assert config.build_muon() == Muon(gamma=0.5)
    assert (config.momentum, config.dropout, config.mixer) == ("per_head", 0.1, {"num_heads": 2})
    assert config.architectures == ["MuonSSMForCausalLM"]


def test_a_preset_fixes_sizes_and_keeps_other_settings():
    config = LanguageModelConfig(preset="170m", backbone="longhorn", momentum="per_step", dropout=0.2)
    built = config.build(Muon(gamma=0.7), vocab_size=1234, eos_token_id=3)
    assert (built.hidden_size, built.intermediate_size, built.num_hidden_layers) == (672, 6144, 10)
    assert (built.vocab_size, built.eos_token_id, built.backbone) == (1234, 3, "longhorn")
    assert (built.momentum, built.dropout, built.build_muon()) == ("per_step", 0.2, Muon(gamma=0.7))
    assert set(built.layer_types) == {"linear_attention"}
    assert config.build(Muon()).vocab_size == 32000
    hybrid = LanguageModelConfig(preset="170m", ssm_every=2).build(Muon())
    assert hybrid.layer_types == ["linear_attention", "sliding_attention"] * 5


def test_plain_differs_in_the_memory_rule_only(root):
    task = make(root, model={"momentum": "per_head"})
    plain = task.plain()
    assert plain.muon == Muon.off()
    assert (plain.model.momentum, plain.data, plain.model.hidden_size) == ("fixed", task.data, 32)
    one, two = (build(t).state_dict() for t in (make(root), make(root).plain()))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.fixture(scope="module")
def saved(root):
    """A saved model with its tokenizer, like a finished run."""
    task = make(root)
    data = task.load_data()
    model = build(task, data)
    model.save_pretrained(root / "saved")
    for file in task.files_to_copy(data.metadata):
        (root / "saved" / file.name).write_bytes(file.read_bytes())
    return model


def test_fine_tuning_starts_from_the_weights_and_sizes_of_another_run(root, saved):
    task = make(root, "rows", muon=Muon(gamma=0.3), model={"start": str(root / "saved"), "hidden_size": 64})
    model = task.build_model(task.load_data().metadata)
    assert model.config.hidden_size == 32
    assert model.config.build_muon() == Muon(gamma=0.3)
    weights = saved.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_start_with_a_smaller_vocabulary_is_rejected(root, saved):
    task = make(root, "other", model={"start": str(root / "saved")})
    data = task.load_data()
    assert data.metadata["vocab_size"] == 320
    with pytest.raises(
        ValueError, match=r"model\.start must have the vocabulary of the data \(320 tokens\), got .* with 300"
    ):
        task.build_model(data.metadata)


def test_a_saved_model_loads_with_its_tokenizer_and_generates_samples(root, saved):
    model, tokenizer = load_pretrained(root / "saved")
    assert tokenizer.eos_token_id == model.config.eos_token_id
    before = open_tokens(root / "text").load_tokenizer()
    assert tokenizer("the memory")["input_ids"] == before("the memory")["input_ids"]
    first, second = (list(make(root).sample_outputs(root / "saved")) for _ in range(2))
    assert first == second
    assert len(first) == 1
    assert first[0].startswith("--- sample ---\n")
    assert len(first[0]) > 20


def test_the_task_builds_transformers_classes(root):
    assert isinstance(make(root).build_model(make(root).load_data().metadata), MuonSSMForCausalLM)
    assert isinstance(LanguageModelConfig(**SIZES).build(Muon(), vocab_size=300), MuonSSMConfig)
    assert make(root).title == "gated_deltanet on text"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"source": ""}, ValueError),
        ({"source": None}, TypeError),
        ({"length": 1}, ValueError),
        ({"length": True}, TypeError),
        ({"vocab_size": 100}, ValueError),
        ({"validation_items": -1}, ValueError),
        ({"keep_apart": "yes"}, TypeError),
    ],
    ids=str,
)
def test_invalid_data_settings_are_rejected(change, error):
    (name,) = change
    with pytest.raises(error, match=f"^{name} must be"):
        LanguageConfig(**change)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"preset": "9b"}, ValueError),
        ({"backbone": "lstm"}, ValueError),
        ({"hidden_size": 0}, ValueError),
        ({"intermediate_size": -1}, ValueError),
        ({"ssm_every": 0}, ValueError),
        ({"dropout": 1.0}, ValueError),
        ({"mixer": 3}, TypeError),
    ],
    ids=str,
)
def test_invalid_model_settings_are_rejected(change, error):
    (name,) = change
    with pytest.raises(error, match=name):
        LanguageModelConfig(**change)


def test_blocks_need_enough_tokens(root):
    with pytest.raises(ValueError, match=r"length must be <= .* got 100000"):
        make(root, length=100_000).load_data()
    with pytest.raises(ValueError, match="fold must be 0"):
        make(root).with_fold(1)


SMALL = ["model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=2", "model.mixer={num_heads=2}",
         "training.steps=2", "training.evaluate_every=1", "training.batch_size=4"]  # fmt: skip


@pytest.mark.parametrize("with_positions", [True, False])
def test_packed_documents_are_separate_in_evaluation_too(root, with_positions):
    task = make(root, keep_apart=True, model={"ssm_every": 2})
    data = task.load_data()
    network = build(task, data)
    batch = task.collate([data.train[i] for i in range(4)], training=True)
    wanted = network.train()(**batch).loss
    if not with_positions:
        del batch["position_ids"]
    torch.testing.assert_close(network.eval()(**batch).loss, wanted)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        network(**batch, use_cache=True)


@pytest.mark.parametrize("source", ["text", pytest.param("rows", marks=pytest.mark.full)])
def test_evaluate_gives_the_scores_of_training(root, tmp_path, source):
    length = "data.length=40" if source == "text" else "data.length=300"
    changes = [f"data.source={root / source}", length, "data.keep_apart=true", "data.validation_items=5", *SMALL]
    metrics = train(Recipe.load("language-demo", changes), tmp_path / "run")
    assert evaluate(tmp_path / "run")["validation"]["loss"] == pytest.approx(metrics["validation"]["loss"], rel=1e-6)


@pytest.mark.full
def test_label_smoothing_does_not_depend_on_accumulation(root, tmp_path):
    curves = []
    for accumulation in (1, 4):
        changes = [f"data.source={root / 'rows'}", "data.length=300", "training.label_smoothing=0.1", *SMALL]
        run = tmp_path / str(accumulation)
        train(Recipe.load("language-demo", [*changes, f"training.accumulation={accumulation}"]), run)
        curves.append([row["loss"] for row in RunFolder(run).read("history.json") if "loss" in row])
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


def test_an_incompatible_start_is_rejected(root, saved, tmp_path):
    rows = [{"instruction": f"Add {i}", "output": f"{i} and zebras"} for i in range(20)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = PrepareConfig(str(tmp_path / "rows.json"), kind="instructions", vocab_size=300, validation=0.2)
    prepare(config, tmp_path / "tokens", progress=False)
    task = make(tmp_path, "tokens", model={"start": str(root / "saved")})
    data = task.load_data()
    assert data.metadata["vocab_size"] == 300
    with pytest.raises(ValueError, match=r"model\.start must have the tokenizer of the data"):
        task.build_model(data.metadata)
    with pytest.raises(ValueError, match=r"model\.start must be .* got 'nowhere'"):
        make(root, "rows", model={"start": "nowhere"}).build_model(data.metadata)
    learned = make(root, model={"momentum": "per_head"})
    build(learned).save_pretrained(tmp_path / "learned")
    with pytest.raises(ValueError, match=r"model\.momentum must be 'per_head', .* got 'fixed'"):
        make(root, model={"start": str(tmp_path / "learned")}).build_model(learned.load_data().metadata)


def test_a_tuned_run_does_not_need_its_start_again(root, saved, tmp_path):
    saved.save_pretrained(tmp_path / "start")
    changes = [f"data.source={root / 'rows'}", "data.length=300", f"model.start={tmp_path / 'start'}", *SMALL[4:]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics = train(Recipe.load("language-demo", changes), tmp_path / "run")
    (tmp_path / "start").rename(tmp_path / "gone")
    assert evaluate(tmp_path / "run")["validation"]["loss"] == pytest.approx(metrics["validation"]["loss"], rel=1e-6)
    assert RunFolder(tmp_path / "run").load_model()[2].config.max_position_embeddings == 300
    task = make(root, "rows", model={"start": str(tmp_path / "gone")}).plain()
    with pytest.warns(UserWarning, match=r"model\.start .* training continues with Muon"):
        task.build_model(task.load_data().metadata)


@pytest.mark.parametrize(
    ("recipe", "change", "message"),
    [
        ("language-demo", "model.mixer={foo=1}", r"model: .*foo"),
        ("recall", "model.mixer={foo=1}", r"model: .*foo"),
        ("language-demo", "model.hidden_size=abc", r"model\.hidden_size must be"),
        ("pretrain-170m", "model.hidden_size=8", r"model\.hidden_size must be left out with a preset"),
        ("pretrain-170m", "model.ssm_every=3", r"model\.ssm_every must be 1 or 2 with a preset"),
    ],
)
def test_errors_in_a_recipe_name_section_and_key(recipe, change, message):
    with pytest.raises(ValueError, match=message):
        Recipe.load(recipe, [change])
    Recipe.load("language-demo", ["model.hidden_size=200", "model.ssm_every=2", "model.mixer={num_heads=2}"])
