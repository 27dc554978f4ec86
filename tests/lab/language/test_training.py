"""Language runs: one process or several, killed and resumed, fine-tuned, compared, loaded by transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from muonssm.cli import main
from muonssm.lab.core.evaluate import evaluate
from muonssm.lab.core.recipe import Recipe
from muonssm.lab.core.run_folder import RunFolder
from muonssm.lab.core.trainer import train
from muonssm.lab.language.packed_weights import packed_perplexities
from muonssm.lab.language.prepare import PrepareConfig, prepare
from tests.lab.several import ENVIRONMENT, curve, launcher, torchrun, train_command

SIZES = [
    "data.length=24", "model.hidden_size=16", "model.intermediate_size=24", "model.num_hidden_layers=2",
    "model.mixer={num_heads=2}", "training.steps=6", "training.evaluate_every=3", "training.batch_size=8",
    "training.learning_rate=0.01",
]  # fmt: skip

SLOW = """
import sys, time
from muonssm.lab.core.torchvision_cpu import prepare_torchvision
prepare_torchvision()
from muonssm.models.language import MuonSSMForCausalLM
forward = MuonSSMForCausalLM.forward
def slow(self, *arguments, **options):
    time.sleep(0.2)
    return forward(self, *arguments, **options)
MuonSSMForCausalLM.forward = slow
from muonssm.cli import main
sys.exit(main(sys.argv[1:]))
"""  # the command line, with models slow enough to be killed between two checkpoints


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A small prepared folder of numbered sentences, which a model can learn."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "text").mkdir()
    for i in range(12):
        lines = [f"step {j} of page {i}: the memory keeps what it reads and reads what it keeps.\n" for j in range(12)]
        (folder / "text" / f"{i:02}.txt").write_text("".join(lines))
    config = PrepareConfig(str(folder / "text"), vocab_size=300, validation=0.2)
    prepare(config, folder / "tokens", progress=False)
    return folder / "tokens"


@pytest.fixture(scope="module")
def changes(tokens):
    return [*SIZES, f"data.source={tokens}"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, changes):
    """An uninterrupted run on one process."""
    output = tmp_path_factory.mktemp("runs") / "alone"
    return output, train(Recipe.load("language-demo", changes), output)


def command(changes, output, *more):
    return train_command("language-demo", changes, output, *more)


@pytest.mark.slow
def test_a_run_learns_and_transformers_loads_it(alone):
    output, metrics = alone
    losses = curve(output)
    assert losses[-1] < losses[0] - 0.05
    assert metrics["validation"]["perplexity"] == pytest.approx(torch.tensor(losses[-1]).exp().item(), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    ids = tokenizer("the memory", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] == ids.shape[1] + 4
    assert tokenizer.eos_token_id == model.config.eos_token_id
    assert evaluate(output)["validation"]["loss"] == pytest.approx(metrics["validation"]["loss"], rel=1e-6)
    rows = RunFolder(output).read("timing.json")
    assert rows[-1]["step"] == 6
    assert rows[-1]["tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("distributed", ["ddp", "fsdp2"])
def test_two_processes_give_the_curve_of_one_and_resume(alone, changes, tmp_path, distributed):
    """The global batch is the same. Then resume as if killed after the first checkpoint."""
    run = tmp_path / distributed
    arguments = command([*changes, f"training.distributed={distributed}"], run)
    torchrun(arguments)
    whole = curve(run)
    assert whole == pytest.approx(curve(alone[0]), abs=1e-4)
    for name, tensor in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(tensor, load_file(alone[0] / "model.safetensors")[name], atol=1e-4, rtol=1e-3)
    metrics = RunFolder(run).read("metrics.json")
    for path in (
        run / "metrics.json",
        run / "model.safetensors",
        *(run / "checkpoints" / "checkpoint-6").glob("*.json"),
    ):
        path.unlink()
    torchrun([*arguments, "--resume"])
    assert curve(run) == whole
    assert RunFolder(run).read("metrics.json") == metrics


@pytest.mark.slow
def test_processes_that_share_sequences_give_the_curve_of_one_killed_and_resumed(changes, tmp_path, monkeypatch):
    """Two processes with a half of every sequence each; kill -9 all of them after a checkpoint.

    Both runs multiply as torch does: oneDNN rounds other sizes of a matrix otherwise, which Adam enlarges in single
    weights with tiny gradients. The test of four processes compares curves with the default.
    """
    monkeypatch.setenv("MUONSSM_MATMUL", "torch")
    monkeypatch.setitem(ENVIRONMENT, "MUONSSM_MATMUL", "torch")
    alone = tmp_path / "alone", train(Recipe.load("language-demo", changes), tmp_path / "alone")
    run, script = tmp_path / "context", tmp_path / "slow.py"
    half = "time.sleep(0.2); assert options['input_ids'].shape[1] == 12, 'half of a sequence of 24'"
    script.write_text(SLOW.replace("time.sleep(0.2)", half))
    arguments = command([*changes, "training.context=2"], run)
    process = subprocess.Popen([*launcher(2), str(script), *arguments], env=ENVIRONMENT, start_new_session=True)
    state, end = run / "checkpoints" / "checkpoint-3" / "trainer_state.json", time.monotonic() + 200
    while not state.is_file() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert state.is_file()
    assert not RunFolder(run).is_finished
    torchrun([*arguments, "--resume"])
    assert curve(run) == pytest.approx(curve(alone[0]), abs=1e-4)
    for name, tensor in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(tensor, load_file(alone[0] / "model.safetensors")[name], atol=1e-4, rtol=1e-3)
    metrics = RunFolder(run).read("metrics.json")
    assert metrics["validation"]["loss"] == pytest.approx(alone[1]["validation"]["loss"], abs=1e-4)


@pytest.mark.slow
def test_batches_and_sequences_are_shared_at_once(changes, tmp_path):
    """Four processes: two batches of packed documents, each shared by two; weights are sharded over all four."""
    apart = [*changes, "data.keep_apart=true", "training.checkpointing=true"]
    train(Recipe.load("language-demo", apart), tmp_path / "alone")
    shared = [*apart, "training.context=2", "training.distributed=fsdp2"]
    torchrun(command(shared, tmp_path / "shared"), processes=4)
    assert curve(tmp_path / "shared") == pytest.approx(curve(tmp_path / "alone"), abs=1e-4)


def test_what_cannot_share_sequences_says_so(changes, tmp_path):
    with pytest.raises(ValueError, match="context must divide the number of processes, 1, got 2"):
        train(Recipe.load("language-demo", [*changes, "training.context=2"]), tmp_path / "one")
    hybrid = Recipe.load("language-demo", [*changes, "model.ssm_every=2"]).task
    assert not hybrid.can_split(hybrid.build_model({"eos_token_id": 0, "vocab_size": 300}))


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_curve(alone, changes, tmp_path):
    """kill -9 between two checkpoints."""
    run = tmp_path / "killed"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    process = subprocess.Popen([sys.executable, "-c", SLOW, *command(changes, run)], env=environment)
    state, end = run / "checkpoints" / "checkpoint-3" / "trainer_state.json", time.monotonic() + 200
    while not state.is_file() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not RunFolder(run).is_finished
    metrics = train(Recipe.load("language-demo", changes), run, resume=True)
    assert curve(run) == curve(alone[0])
    assert metrics == alone[1]


@pytest.mark.slow
def test_accumulation_and_checkpointing_keep_the_curve_and_keep_apart_changes_it(alone, changes, tmp_path):
    train(Recipe.load("language-demo", [*changes, "training.accumulation=4"]), tmp_path / "parts")
    assert curve(tmp_path / "parts") == pytest.approx(curve(alone[0]), abs=1e-4)
    train(Recipe.load("language-demo", [*changes, "data.keep_apart=true"]), tmp_path / "apart")
    assert curve(tmp_path / "apart") != pytest.approx(curve(alone[0]), abs=1e-4)
    train(Recipe.load("language-demo", [*changes, "training.checkpointing=true"]), tmp_path / "again")
    assert curve(tmp_path / "again") == pytest.approx(curve(alone[0]), abs=1e-5)


@pytest.mark.slow
def test_bfloat16_is_close(changes, tmp_path):
    """At a learning rate that does not amplify the rounding of the first steps."""
    for precision in ("float32", "bfloat16"):
        change = [*changes, f"training.precision={precision}", "training.learning_rate=0.001"]
        train(Recipe.load("language-demo", change), tmp_path / precision)
    one, other = curve(tmp_path / "float32"), curve(tmp_path / "bfloat16")
    assert one == pytest.approx(other, abs=0.01)
    assert one != other


@pytest.mark.slow
def test_a_run_is_fine_tuned_on_instructions(alone, changes, tmp_path):
    rows = [{"instruction": f"Say {n}", "input": "", "output": f"{n} it is"} for n in range(40)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = PrepareConfig(str(tmp_path / "rows.json"), kind="instructions", tokenizer=str(alone[0]), validation=0.2)
    prepare(config, tmp_path / "tokens", progress=False)
    tuned = [f"data.source={tmp_path / 'tokens'}", f"model.start={alone[0]}", "data.length=160", "training.epochs=2",
             "training.batch_size=8", "training.accumulation=2", "training.learning_rate=0.01",
             "training.precision=float32"]  # fmt: skip
    metrics = train(Recipe.load("sft-alpaca", tuned), tmp_path / "tuned")
    history = RunFolder(tmp_path / "tuned").read("history.json")
    assert history[-1]["validation_loss"] < history[0]["validation_loss"]
    assert metrics["validation"]["loss"] == pytest.approx(history[-1]["validation_loss"])
    before = load_file(alone[0] / "model.safetensors")
    after = load_file(tmp_path / "tuned" / "model.safetensors")
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


@pytest.mark.slow
def test_weights_that_mean_nothing_are_refused(alone, tmp_path, capsys):
    for limit in (0, -1):
        with pytest.raises(ValueError, match=f"limit must be an integer >= 1, got {limit}"):
            packed_perplexities(alone[0], ["int8"], limit)
    run = tmp_path / "run"
    shutil.copytree(alone[0], run)
    metadata = json.loads((run / "metadata.json").read_text())
    (run / "metadata.json").write_text(json.dumps({**metadata, "kind": "instructions"}))
    with pytest.raises(ValueError, match=r"RUN must be a run on text .* a run on instructions"):
        packed_perplexities(run, ["int8"])
    (run / "metadata.json").write_text(json.dumps(metadata))
    weights = load_file(run / "model.safetensors")
    weights["model.norm.weight"][0] = torch.nan
    save_file(weights, run / "model.safetensors", metadata={"format": "pt"})
    needle = ["needle", str(run), "--lengths", "300", "--samples", "1"]
    for command in (["generate", str(run), "the"], needle, ["eval", str(run), "--weights", "int8"]):
        assert main(command) == 2
        assert "RUN must have finite weights, got" in capsys.readouterr().err
    assert list(RunFolder(run).read_recipe().task.sample_outputs(run)) == ["no samples: some weights are not finite"]


@pytest.mark.slow
def test_decoding_with_packed_weights(alone, capsys):
    run, metrics = str(alone[0]), alone[1]
    found = packed_perplexities(run, ["bfloat16", "int8"])
    assert list(found) == ["float32", "bfloat16", "int8"]
    assert found["float32"] == pytest.approx(metrics["validation"]["perplexity"], rel=1e-4)
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=2e-3)
    assert found["int8"] == pytest.approx(found["float32"], rel=1e-2)
    assert main(["eval", run, "--weights", "int8", "--limit", "2"]) == 0
    assert "int8" in capsys.readouterr().out
    assert main(["generate", run, "the memory", "--max-new-tokens", "5", "--weights", "int8"]) == 0
    assert capsys.readouterr().out.startswith("the memory")
    assert main(["generate", run, "the memory", "--weights", "int4"]) == 2
    assert "weights must be" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_on_a_run(alone, tmp_path, capsys):
    run = str(alone[0])
    assert main(["generate", run, "the memory", "--max-new-tokens", "5", "--seed", "1"]) == 0
    assert capsys.readouterr().out.startswith("the memory")
    for arguments, message in ((["x", "--top-p", "2"], "top_p must be"), (["the memory " * 99], "PROMPT must have")):
        assert main(["generate", run, *arguments]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert printed.out == ""
    assert main(["generate", run, "the memory " * 99, "--beyond", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("the memory the memory")
    small = ["--lengths", "700", "--variants", "pk", "--samples", "2", "--answer-tokens", "20"]
    assert main(["needle", run, *small]) == 0
    assert "pk" in capsys.readouterr().out
    assert (alone[0] / "needle.html").is_file()
    assert main(["needle", run, *small]) == 2
    assert "use --resume" in capsys.readouterr().err
    (tmp_path / "essay").write_bytes(b"caf\xe9")
    assert main(["needle", run, "--essay", str(tmp_path / "essay")]) == 2
    assert "--essay must be a UTF-8 text file" in capsys.readouterr().err
    assert main(["predict", run, "x.csv"]) == 2
    assert "RUN must be a run of activity" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["generate", str(tmp_path / "empty"), "x"]) == 2
    assert "RUN must be" in capsys.readouterr().err
    assert main(["prepare", str(tmp_path / "empty"), "--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_plain_and_muon_are_compared_by_perplexity(changes, tmp_path, capsys):
    arguments = ["compare", "language-demo", "--output", str(tmp_path / "compare")]
    for change in [*changes, "training.steps=3"]:
        arguments += ["--set", change]
    assert main(arguments) == 0
    assert "muon minus plain, perplexity" in capsys.readouterr().out
    page = (tmp_path / "compare" / "report.html").read_text()
    assert "perplexity" in page
    assert "Confusion" not in page
    assert main([*arguments, "--seeds", "2", "--resume"]) == 0
    assert "over 2 paired runs" in capsys.readouterr().out


def test_invalid_settings_are_rejected(changes, tokens, tmp_path):
    with pytest.raises(ValueError, match="batch_size must be a multiple of"):
        train(Recipe.load("language-demo", [*changes, "training.accumulation=3"]), tmp_path / "run")
    with pytest.raises(ValueError, match="source must be a folder with prepared tokens"):
        train(Recipe.load("language-demo", [*changes, f"data.source={tmp_path / 'no'}"]), tmp_path / "run")
    with pytest.raises(ValueError, match=r"model\.preset must be"):
        Recipe.load("pretrain-170m", ["model.preset=9b"])
    with pytest.raises(ValueError, match="task must be one of"):
        Recipe.from_dict({"task": "poetry"})
    assert not (tmp_path / "run").exists()


def test_recipes_have_the_papers_settings():
    recipe = Recipe.load("pretrain-170m")
    t, config = recipe.training, recipe.task.model.build(recipe.task.muon)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (672, 6144, 10)
    assert config.vocab_size == 32000
    assert (t.steps, t.batch_size, recipe.task.data.length) == (4768, 512, 4096)
    assert (t.learning_rate, t.final_rate, t.warmup) == (1e-3, 0.1, 0.01)
    assert (t.beta1, t.beta2, t.weight_decay, t.clip) == (0.9, 0.95, 0.1, 1.0)
    assert (t.seed, t.precision) == (3407, "auto")  # bfloat16 where the machine has it
    tuning = Recipe.load("sft-alpaca")
    t = tuning.training
    assert (t.epochs, t.batch_size, t.learning_rate, t.warmup) == (3, 128, 2e-5, 0.03)
    assert tuning.task.data.length == 2048
