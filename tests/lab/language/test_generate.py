"""Generated text: streamed pieces, sampling, seeds, and characters of several tokens."""

from __future__ import annotations

import warnings

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from muonssm.lab.language.generate import generate_text

TEXTS = ["the cat sat on the mat and the dog ran over the hill"] * 4
ODD = "naïve 日本語 🦜\n  two lines, café"


def byte_tokenizer(**special):
    """Byte-level: a character outside ASCII has two to four tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def word_tokenizer():
    """Marks spaces at the start of words and drops the first one, like the tokenizers of the Llama family."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=["\n"])
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def tiny(vocab_size, model_class=MambaForCausalLM, **options):
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, state_size=4, **options)
    model = model_class(config).eval()
    torch.nn.init.normal_(model.backbone.embeddings.weight, std=0.5)  # far from uniform, so that samples differ
    return model


class ScriptedMamba(MambaForCausalLM):
    """Generates the tokens of `script`, then token 5. (`generate` finds the cache by the name of the class.)"""

    script: tuple[int, ...] = ()
    step = 0

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        token = self.script[self.step] if self.step < len(self.script) else 5
        output.logits[:, -1] = torch.nn.functional.one_hot(torch.tensor(token), output.logits.shape[-1]) * 100.0
        self.step += 1
        return output


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny(len(tokenizer))


def generate_script(tokenizer, text, prompt="the cat", end=True, **options):
    """The generated text, its pieces and the model, for a model that generates `text` after `prompt`."""
    whole, start = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (prompt + text, prompt))
    assert whole[: len(start)] == start
    speaker = tiny(len(tokenizer), ScriptedMamba)
    speaker.script = (*whole[len(start) :], *([tokenizer.eos_token_id] if end else []))
    pieces = []
    generated = generate_text(speaker, tokenizer, prompt, stream=pieces.append, **{"max_new_tokens": 100, **options})
    return generated, pieces, speaker


def test_greedy_equals_transformers_generate(model, tokenizer):
    pieces = []
    found = generate_text(model, tokenizer, "the dog", max_new_tokens=30, greedy=True, stream=pieces.append)
    ids = tokenizer("the dog", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, eos_token_id=1, pad_token_id=1)
    assert found == tokenizer.decode(expected[0], skip_special_tokens=True)[len("the dog") :]
    assert "".join(pieces) == found
    assert len(found) > 5


def test_pieces_join_to_the_result_and_seeds_are_deterministic(model, tokenizer):
    def draw(seed, **options):
        pieces = []
        found = generate_text(model, tokenizer, "the", 12, seed=seed, stream=pieces.append, **options)
        assert "".join(pieces) == found
        return found

    state = torch.random.get_rng_state()
    assert draw(3) == draw(3)
    assert len({draw(seed, temperature=2.0, top_p=1.0) for seed in range(3)}) > 1
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random state is restored
    greedy = generate_text(model, tokenizer, "the", 12, greedy=True)
    assert draw(4, top_k=1) == draw(5, top_p=1e-9) == draw(6, temperature=1e-6) == greedy
    torch.manual_seed(3)
    unseeded = generate_text(model, tokenizer, "the", 12)
    assert unseeded == draw(3)
    assert not torch.equal(torch.random.get_rng_state(), state)


def test_characters_of_several_tokens_are_streamed_complete(tokenizer):
    found, pieces, _ = generate_script(tokenizer, f": {ODD}")
    assert found == "".join(pieces) == f": {ODD}"
    assert len(tokenizer(ODD)["input_ids"]) > len(ODD)
    assert len(pieces) > 10  # streamed, not all at the end
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert {"日", "🦜"} <= set(pieces)


def test_an_incomplete_character_at_the_end_is_kept(tokenizer):
    parrot = tokenizer("🦜", add_special_tokens=False)["input_ids"]
    found, pieces, _ = generate_script(tokenizer, " 🦜", max_new_tokens=len(parrot))
    assert found == "".join(pieces) == " \N{REPLACEMENT CHARACTER}"


def test_spaces_marked_on_words_are_kept():
    found, pieces, _ = generate_script(word_tokenizer(), " sat\n on the mat")
    assert found == "".join(pieces) == " sat\n on the mat"


def test_stops_at_the_end_token(tokenizer):
    found, _, speaker = generate_script(tokenizer, " sat on")
    assert found == " sat on"
    assert speaker.step == len(speaker.script)
    found, _, speaker = generate_script(tokenizer, " sat", end=False, max_new_tokens=20)
    assert found.startswith(" sat")
    assert speaker.step == 20
    assert generate_script(tokenizer, "")[:2] == ("", [])


def test_an_empty_prompt_starts_from_bos_or_eos(model, tokenizer):
    ends_only = byte_tokenizer(eos_token="</s>")
    for each, start in ((tokenizer, 0), (ends_only, 1)):
        expected = model.generate(
            torch.tensor([[start]]), max_new_tokens=8, do_sample=False, eos_token_id=1, pad_token_id=1
        )
        found = generate_text(model, each, "", max_new_tokens=8, greedy=True)
        assert found == each.decode(expected[0], skip_special_tokens=True)
    with pytest.raises(ValueError, match="prompt must have tokens"):
        generate_text(model, byte_tokenizer(), "")


def test_eos_after_the_prompt_is_dropped(model, tokenizer):
    ending = byte_tokenizer(bos_token="<s>", eos_token="</s>")
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    assert ending("the cat")["input_ids"][-1] == 1
    both = [generate_text(model, each, "the cat", 10, greedy=True) for each in (tokenizer, ending)]
    assert both[0] == both[1]


def test_a_prompt_longer_than_the_training_length_warns(tokenizer):
    short = tiny(len(tokenizer), max_position_embeddings=4)
    n = len(tokenizer("the cat sat on the mat")["input_ids"])
    with pytest.warns(UserWarning, match=f"the prompt has {n} tokens; the model was trained on at most 4"):
        generate_text(short, tokenizer, "the cat sat on the mat", max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate_text(short, tokenizer, "the", max_new_tokens=2)


def test_the_mode_of_the_model_is_restored(model, tokenizer):
    model.train()
    try:
        generate_text(model, tokenizer, "the", max_new_tokens=2)
        assert model.training
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": 0}, ValueError),
        ({"temperature": float("nan")}, ValueError),
        ({"top_p": 0.0}, ValueError),
        ({"top_p": 1.5}, ValueError),
        ({"max_new_tokens": 0}, ValueError),
        ({"max_new_tokens": 2.0}, TypeError),
        ({"top_k": -1}, ValueError),
        ({"seed": -1}, ValueError),
        ({"seed": 2**63}, ValueError),
        ({"prompt": None}, TypeError),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(model, tokenizer, options, error):
    (name,) = options
    with pytest.raises(error, match=f"^{name} must be"):
        generate_text(model, tokenizer, **{"prompt": "the", **options})


def test_a_tokenizer_of_another_model_is_rejected(tokenizer):
    with pytest.raises(ValueError, match="tokenizer must give ids in 0 to 9"):
        generate_text(tiny(10), tokenizer, "the")
