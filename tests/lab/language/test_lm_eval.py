"""Zero-shot evaluation through lm-eval on small local tasks, against scores computed here; without a network."""

from __future__ import annotations

import json
import math
import os
import socket

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"  # read when these libraries are imported

import datasets
import huggingface_hub.constants
import pytest
import torch
import yaml
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from muonssm.lab.language.generate import evaluation_mode
from muonssm.lab.language.lm_eval import TaskDataError, run_harness
from muonssm.lab.language.needle import paper_needle
from muonssm.lab.language.zero_shot import AVERAGE, PAPER_TASKS, paper_zero_shot, table

QUESTIONS = [
    {"question": "The cat sat on the", "choices": ["mat", "moon and the stars", "green"], "answer": 0},
    {"question": "A dog ran over", "choices": ["the hill", "a", "quickly the"], "answer": 1},
    {"question": "Birds sing in the morning because", "choices": ["tree", "sun", "of the light"], "answer": 2},
    {"question": "Two and two", "choices": ["are four", "are five of them", "is"], "answer": 1},
    {"question": "The sky", "choices": ["is blue", "is", "was green and the grass red"], "answer": 0},
]
PAGES = [
    {"page": "The cat sat on the mat. The dog ran over the hill, and the birds sang."},
    {"page": "Rain.\n\nIt rained on the hill for two days and two nights; the river rose."},
    {"page": "One word"},
]


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No connection and an empty cache, also for libraries that were imported before."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    def refuse(*_):
        raise AssertionError("a test used the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator([page["page"] for page in PAGES], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, state_size=4)
    model = MambaForCausalLM(config).eval()
    torch.nn.init.normal_(model.backbone.embeddings.weight, std=0.3)  # so that choices differ
    return model


def write(folder, name, rows, **config):
    """Write a task in lm-eval's YAML, and its samples as JSON lines; return the path of the YAML file."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    task = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**task, "test_split": "test", **config}))
    return path


def write_choices(folder, name="choices", rows=QUESTIONS, **config):
    metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]
    texts = {"doc_to_text": "{{question}}", "doc_to_choice": "choices", "doc_to_target": "answer"}
    return write(folder, name, rows, output_type="multiple_choice", metric_list=metrics, **texts, **config)


def write_pages(folder, name="pages"):
    rolling = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{page}}"}
    return write(folder, name, PAGES, metric_list=[{"metric": "word_perplexity"}], **rolling)


@pytest.fixture
def folder(tmp_path):
    """Both tasks."""
    write_choices(tmp_path / "own")
    write_pages(tmp_path / "own")
    return tmp_path / "own"


def log_likelihood(model, ids, start):
    """The log-likelihood of the tokens from `start` on, given those before; one forward pass without padding."""
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(scores[i - 1, ids[i]].item() for i in range(start, len(ids)))


def expected_choices(model, tokenizer, rows=QUESTIONS):
    """Accuracy of the most likely choice, and of the most likely per character."""
    plain = normalized = 0
    for row in rows:
        context = tokenizer(row["question"])["input_ids"]
        texts = [tokenizer(f"{row['question']} {choice}")["input_ids"] for choice in row["choices"]]
        found = [log_likelihood(model, ids, len(context)) for ids in texts]
        by_length = [value / len(choice) for value, choice in zip(found, row["choices"], strict=True)]
        plain += max(range(3), key=found.__getitem__) == row["answer"]
        normalized += max(range(3), key=by_length.__getitem__) == row["answer"]
    return {"acc": plain / len(rows), "acc_norm": normalized / len(rows)}


def expected_perplexity(model, tokenizer, window=10**9):
    """exp of minus the log-likelihood per word; pages longer than `window` are scored window by window."""
    total = words = 0
    for row in PAGES:
        ids = [tokenizer.bos_token_id, *tokenizer(row["page"])["input_ids"]]
        for begin in range(0, len(ids) - 1, window):
            end = min(begin + window, len(ids) - 1)
            first = max(0, end - window)  # the last window is extended to the left
            total += log_likelihood(model, ids[first : end + 1], begin + 1 - first)
        words += len(row["page"].split())
    return math.exp(-total / words)


def test_scores_equal_those_of_a_forward_pass(model, tokenizer, folder):
    saved = []
    result = run_harness(model, tokenizer, ["choices", "pages"], include_path=folder, save=saved.append, batch_size=4)
    choices, pages = result["tasks"]["choices"], result["tasks"]["pages"]
    assert choices["metrics"] == pytest.approx(expected_choices(model, tokenizer))
    assert 0 < choices["metrics"]["acc"] < 1  # so that a wrong order of choices would show
    assert pages["metrics"]["word_perplexity"] == pytest.approx(expected_perplexity(model, tokenizer), rel=1e-4)
    assert (choices["samples"], pages["samples"]) == (5, 3)
    assert choices["truncated"] == pages["truncated"] == 0
    assert result["settings"]["shots"] == 0
    assert [list(each["tasks"]) for each in saved] == [["choices"], ["choices", "pages"]]
    assert saved[-1] == result == json.loads(json.dumps(result))


def test_scores_do_not_depend_on_the_batch_size(model, tokenizer, folder):
    model.train()
    one, many = (
        run_harness(model, tokenizer, [str(folder / "pages.yaml")], batch_size=n, progress=False) for n in (1, 8)
    )
    assert model.training
    model.eval()
    assert tokenizer.pad_token is None
    assert one["tasks"]["pages"]["metrics"] == pytest.approx(many["tasks"]["pages"]["metrics"], rel=1e-5)


def test_long_texts_are_scored_in_windows(model, tokenizer, folder):
    result = run_harness(model, tokenizer, [str(folder / "pages.yaml")], max_length=7)
    found = result["tasks"]["pages"]["metrics"]["word_perplexity"]
    assert found == pytest.approx(expected_perplexity(model, tokenizer, window=7), rel=1e-4)
    assert found != pytest.approx(expected_perplexity(model, tokenizer), rel=1e-4)
    assert result["tasks"]["pages"]["truncated"] == 0


def test_long_contexts_are_cut_and_counted(model, tokenizer, folder):
    texts = [(len(tokenizer(f"{q['question']} {choice}")["input_ids"])) for q in QUESTIONS for choice in q["choices"]]
    length = max(texts) - 3
    result = run_harness(model, tokenizer, [f"{folder}/"], max_length=length)
    cut = sum(text > length + 1 for text in texts)
    assert result["tasks"]["choices"]["truncated"] == cut > 0
    assert f"choices: {cut} texts cut at the beginning, to {length} tokens" in table(result)
    message = r"task choices cannot be run: max_length must be >= \d+, .* got 2"
    with pytest.raises(ValueError, match=message):
        run_harness(model, tokenizer, [f"{folder}/"], max_length=2)


def test_tasks_run_without_examples_in_the_prompt(model, tokenizer, tmp_path):
    plain = write_choices(tmp_path / "plain")
    shots = write_choices(tmp_path / "shots", num_fewshot=2, fewshot_split="test")
    one, other = (run_harness(model, tokenizer, [str(path)]) for path in (plain, shots))
    assert one["tasks"] == other["tasks"]


def test_generated_answers(model, tokenizer, tmp_path):
    """Prompts of different lengths in one batch give the same answers as alone."""
    questions, answers = [row["question"] for row in QUESTIONS], []
    for question in questions:
        ids = tokenizer(question, return_tensors="pt")["input_ids"]
        found = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=1, pad_token_id=1)
        answers.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))
    answers[0] += " not"
    options = {"until": [], "max_gen_toks": 4, "do_sample": False}
    path = write(
        tmp_path / "own",
        "answers",
        [{"question": question, "answer": answer} for question, answer in zip(questions, answers, strict=True)],
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs=options,
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    result = run_harness(model, tokenizer, [str(path)], max_length=64)
    assert result["tasks"]["answers"]["metrics"] == {"exact_match": 4 / 5}
    with pytest.raises(ValueError, match=r"task answers cannot be run: .*less than model's maximum sequence length"):
        run_harness(model, tokenizer, [str(path)], max_length=4)


def test_a_group_of_own_tasks(model, tokenizer, folder):
    write_choices(folder, "more", QUESTIONS[:2])
    group = {"group": "both", "task": ["choices", "more"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    result = run_harness(model, tokenizer, ["both"], include_path=folder)
    tasks = {name: score["metrics"].get("acc") for name, score in result["tasks"].items()}
    assert set(tasks) == {"both", "choices", "more"}
    assert tasks["both"] == pytest.approx((5 * tasks["choices"] + 2 * tasks["more"]) / 7)


def test_an_interrupted_run_is_resumed(model, tokenizer, folder):
    whole = run_harness(model, tokenizer, ["choices", "pages"], include_path=folder)

    class Stop(Exception):  # noqa: N818  stands for any interruption
        pass

    saved = []

    def stop(result):
        saved.append(json.loads(json.dumps(result)))
        raise Stop

    with pytest.raises(Stop):
        run_harness(model, tokenizer, ["choices", "pages"], include_path=folder, save=stop)
    (folder / "choices.jsonl").unlink()  # finished tasks are not even read again
    resumed = run_harness(
        model, tokenizer, ["choices", "pages"], include_path=folder, save=saved.append, earlier_result=saved[0]
    )
    assert resumed == whole
    assert len(saved) == 2


def test_results_with_other_settings_or_weights_are_not_resumed(model, tokenizer, folder):
    tasks = [str(folder / "choices.yaml")]
    earlier = run_harness(model, tokenizer, tasks, limit=2)
    assert earlier["tasks"]["choices"]["samples"] == 2
    assert "at most 2 samples per task" in table(earlier)
    with pytest.raises(ValueError, match=r"limit must be 2, .* got None"):
        run_harness(model, tokenizer, tasks, earlier_result=earlier)
    other = MambaForCausalLM(model.config)
    with pytest.raises(ValueError, match="weights must be"):
        run_harness(other, tokenizer, tasks, limit=2, earlier_result=earlier)


def test_tasks_with_unavailable_data_are_named_and_the_others_run(model, tokenizer, folder):
    away = folder / "away.yaml"
    away.write_text(yaml.safe_dump({"task": "away", "dataset_path": "nobody/no-such-data", "test_split": "test"}))
    saved = []
    with (
        pytest.warns(UserWarning, match="task away cannot be loaded"),
        pytest.raises(TaskDataError, match=r"task away .*its data, nobody/no-such-data, comes from a hub") as caught,
    ):
        run_harness(model, tokenizer, ["away", "choices"], include_path=folder, save=saved.append)
    assert list(caught.value.result["tasks"]) == ["choices"]
    assert saved == [caught.value.result]
    assert isinstance(caught.value, OSError)


def test_unreadable_local_files_are_rejected(model, tokenizer, folder):
    (folder / "pages.jsonl").unlink()
    with pytest.raises(ValueError, match=r"task pages cannot be loaded: .*pages\.jsonl"):
        run_harness(model, tokenizer, ["choices", "pages"], include_path=folder)
    (folder / "broken.yaml").write_text("task: [1, 2")
    for tasks, include in ((["choices"], folder), ([f"{folder}/"], None), ([str(folder / "broken.yaml")], None)):
        with pytest.raises(ValueError, match=r"must have readable YAML files, got .*broken\.yaml"):
            run_harness(model, tokenizer, tasks, include_path=include)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("tasks", "choices", TypeError),
        ("tasks", [], ValueError),
        ("batch_size", 0, ValueError),
        ("batch_size", None, TypeError),
        ("limit", 0, ValueError),
        ("limit", 0.5, TypeError),
        ("max_length", -1, ValueError),
        ("include_path", "nowhere", ValueError),
        ("tasks", ["nowhere.yaml"], ValueError),
    ],
)
def test_invalid_arguments_are_rejected(model, tokenizer, folder, name, value, error):
    arguments = {"tasks": ["choices"], "include_path": folder, name: value}
    with pytest.raises(error, match=f"^{name} must"):
        run_harness(model, tokenizer, **arguments)


def test_ambiguous_and_empty_tasks_are_rejected(model, tokenizer, folder, tmp_path):
    write_choices(tmp_path / "again")
    with pytest.raises(ValueError, match="tasks must have distinct names, got two tasks named 'choices'"):
        run_harness(model, tokenizer, ["choices", f"{tmp_path}/again/"], include_path=folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="tasks must be YAML files with the key `task`"):
        run_harness(model, tokenizer, [f"{tmp_path}/empty"])


def test_unsuitable_tokenizers_are_rejected(model, tokenizer, folder):
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="tokenizer must have a BOS or an EOS token"):
        run_harness(model, without, ["choices"], include_path=folder)
    larger = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<new>")
    with pytest.raises(ValueError, match="tokenizer must have ids in"):
        run_harness(model, larger, ["choices"], include_path=folder)


def test_a_text_without_tokens_is_rejected(model, tokenizer, tmp_path):
    texts = {"doc_to_text": "a", "doc_to_target": "{{page[:0]}}", "target_delimiter": ""}
    metrics = [{"metric": "perplexity"}]
    path = write(tmp_path / "own", "empty", PAGES, output_type="loglikelihood", metric_list=metrics, **texts)
    with pytest.raises(ValueError, match="task empty cannot be run: a text to score must have tokens"):
        run_harness(model, tokenizer, [str(path)])


def test_nothing_is_printed_without_progress(model, tokenizer, folder, capfd):
    run_harness(model, tokenizer, [f"{folder}/"], progress=False, max_length=22)
    assert capfd.readouterr() == ("", "")
    assert datasets.are_progress_bars_disabled() is False


def test_the_model_is_in_evaluation_mode_inside(model):
    model.train()
    with evaluation_mode(model):
        assert not model.training
        assert not torch.is_grad_enabled()
    assert model.training
    model.eval()


@pytest.mark.slow
def test_the_papers_tasks_are_in_lm_evals_index(model, tokenizer, monkeypatch):
    """The index needs no network. An unknown name is rejected with similar names."""
    manager = TaskManager()
    for column in PAPER_TASKS:
        entry = manager.task_index[column.task]
        assert entry.kind.name == "TASK"
        assert column.metric in [metric["metric"] for metric in entry.cfg["metric_list"]]
        assert not entry.cfg.get("num_fewshot")
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: manager)  # building the index once is slow enough
    with pytest.raises(ValueError, match=r"tasks must be .* got 'hellaswg'; similar names: hellaswag"):
        run_harness(model, tokenizer, ["hellaswg"])
    with pytest.raises(TaskDataError) as caught:
        run_harness(model, tokenizer, ["paper", "ai2_arc"])
    assert list(caught.value.failed) == list(dict.fromkeys(column.task for column in PAPER_TASKS))
    assert "task social_iqa cannot be loaded; its data, lighteval/siqa, comes from a hub" in str(caught.value)


def full_result():
    """A result of all the paper's tasks, with accuracies of 20%, 21%, ... 27%."""
    tasks: dict = {}
    values = iter(range(20, 28))
    for column in PAPER_TASKS:
        score = tasks.setdefault(column.task, {"metrics": {}, "samples": 101})
        score["metrics"][column.metric] = next(values) / 100 if column.is_accuracy else 43.5
    return {"settings": {"limit": None, "max_length": 2048}, "tasks": tasks}


def test_the_table_has_the_papers_columns_and_rows():
    lines = table(full_result(), paper_zero_shot("mamba"), "ours").splitlines()
    assert len(lines) == 6
    assert " ".join(lines[0].split()) == "Wiki. LMB. LMB. PIQA Hella. Wino. ARC-e ARC-c SIQA BoolQ Avg."
    assert " ".join(lines[1].split()) == "ppl ppl acc acc acc_n acc acc acc_n acc acc acc"
    assert " ".join(lines[2].split()) == "ours 43.50 43.50 20.00 21.00 22.00 23.00 24.00 25.00 26.00 27.00 23.50"
    assert lines[3].split()[:5] == ["standard", "error", "-", "-", "4.00"]  # sqrt(.2 x .8 / 100)
    assert lines[4].split()[:4] == ["paper,", "plain", "42.17", "102.51"]
    assert lines[5].split()[-2:] == ["63.82", "44.23"]
    assert len({len(line) for line in lines}) == 1
    assert len(table(full_result(), paper_zero_shot("deltanet")).splitlines()) == 4


def test_there_is_no_average_without_all_tasks():
    result = full_result()
    del result["tasks"]["piqa"]
    result["tasks"]["mine"] = {"metrics": {"f1": 0.25}, "samples": 4}
    result["tasks"]["wikitext"]["metrics"]["word_perplexity"] = None  # inf, as JSON has it
    lines = table(result, {}, "ours").splitlines()
    assert " ".join(lines[2].split()) == "ours nan 43.50 20.00 - 22.00 23.00 24.00 25.00 26.00 27.00 -"
    assert lines[4:] == ["missing: piqa acc; no average without them", "mine f1: 0.2500"]
    result = full_result()
    del result["tasks"]["wikitext"]  # not one of the eight
    assert table(result).splitlines()[2].split()[-1] == "23.50"
    assert table(result).splitlines()[-1] == "missing: wikitext word_perplexity"


def test_the_papers_averages_match_its_scores():
    assert paper_zero_shot("deltanet") == paper_needle("deltanet") == {}
    for backbone in ("mamba", "longhorn", "gated_deltanet"):
        rows = paper_zero_shot(backbone)
        assert tuple(rows) == tuple(paper_needle(backbone)) == ("plain", "muon")
        for row in rows.values():
            accuracies = [row[column.key] for column in PAPER_TASKS if column.is_accuracy]
            assert row[AVERAGE] == pytest.approx(sum(accuracies) / 8, abs=0.0051)
    assert paper_needle("longhorn")["muon"]["number"] == {2048: 75.1, 4096: 71.4, 8192: 36.8}
