"""Needles are at the stated depth, prompts have RULER's wording, and haystacks are the largest that fit."""

from __future__ import annotations

import functools
import re
import uuid
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from muonssm.lab.language.needle_prompts import (
    ADJECTIVES,
    NEEDLE,
    NOISE,
    NOUNS,
    VARIANTS,
    Haystack,
    NeedleConfig,
    default_essay,
    encode,
    least_length,
    make_haystack,
    make_needle,
    score_needle,
)


def tokenizer(*, start=False, end=False):
    """A byte-level BPE of 800 tokens trained on the essay; it can add BOS and EOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    backend.train_from_iterator([default_essay()[:60_000]], trainer)
    template = " ".join(["<s>"] * start + ["$A"] + ["</s>"] * end)
    backend.post_processor = processors.TemplateProcessing(template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def words():
    return tokenizer()


def samples(words, variant, essay=None, **settings):
    return _samples(words, NeedleConfig(variant, **{"length": 700, "samples": 40, **settings}), essay)


@functools.cache
def _samples(words, config, essay):
    return make_needle(config, words, essay)


@pytest.mark.parametrize("variant", ["pk", pytest.param("number", marks=pytest.mark.full), "uuid"])
def test_a_prompt_has_rulers_wording(words, variant):
    kind = "uuid" if variant == "uuid" else "number"
    for sample in samples(words, variant):
        first, *context, last = sample.prompt.split("\n")
        assert first == (
            f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {kind} afterwards."
        )
        about = f"special magic {kind} for {sample.key} mentioned in the provided text"
        assert last == f"What is the {about}? The {about} is"
        needle = f"One of the special magic {kind}s for {sample.key} is: {sample.answer}."
        assert sample.prompt.count(needle) == sample.prompt.count(sample.answer) == 1
        if variant == "pk":
            assert sorted(context) == sorted([needle] + [NOISE] * sample.size)
            assert context.index(needle) == pytest.approx(sample.depth * sample.size)
        else:
            (line,) = context
            hay = line.replace(needle, " ").split()
            assert hay == default_essay().split()[: sample.size]
            assert len(line[: line.index(needle)].split()) == pytest.approx(sample.depth * sample.size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_are_words_and_values_are_numbers_or_uuids(words, variant):
    chosen = samples(words, variant)
    for sample in chosen:
        adjective, noun = sample.key.split("-")
        assert adjective in ADJECTIVES.split()
        assert noun in NOUNS.split()
        if variant == "uuid":
            assert uuid.UUID(sample.answer).version == 4
            assert str(uuid.UUID(sample.answer)) == sample.answer
        else:
            assert re.fullmatch(r"[1-9]\d{6}", sample.answer)
    assert len({sample.answer for sample in chosen}) == 40
    assert len({sample.key for sample in chosen}) > 30
    assert len(set(ADJECTIVES.split())) == len(set(NOUNS.split())) == 60


@pytest.mark.parametrize(
    ("variant", "start"),
    [
        ("pk", False),
        ("uuid", True),
        *(
            pytest.param(variant, start, marks=pytest.mark.full)
            for variant, start in (("pk", True), ("number", False), ("number", True), ("uuid", False))
        ),
    ],
)
def test_the_haystack_is_the_largest_that_fits(variant, start):
    words = tokenizer(start=start)
    haystack = make_haystack(variant, None)
    for sample in samples(words, variant, length=600, answer_tokens=64):
        assert sample.tokens == len(words(sample.prompt)["input_ids"])
        assert sample.tokens + 64 <= 600
        before, after = sample.prompt.split("\n")[0], sample.prompt.split("\n")[-1]
        needle = re.search(r"One of the special magic \w+ for \S+ is: \S+\.", sample.prompt)[0]
        more, _ = haystack.hide(needle, sample.depth, sample.size + 1)
        assert len(words(f"{before}\n{more}\n{after}")["input_ids"]) + 64 > 600


def test_eos_is_not_part_of_a_prompt():
    words = tokenizer(end=True)
    assert words("The sky")["input_ids"][-1] == 1
    assert encode(words, "The sky") == words("The sky")["input_ids"][:-1]
    sample = samples(words, "pk")[0]
    assert sample.tokens == len(words(sample.prompt)["input_ids"]) - 1


@pytest.mark.parametrize("variant", ["pk", pytest.param("number", marks=pytest.mark.full)])
def test_depths_are_uniform(words, variant):
    """Every tenth of the haystack has about as many, as far as its sentences allow."""
    depths = [sample.depth for sample in samples(words, variant, length=4096, samples=50)]
    assert all(0 <= depth <= 1 for depth in depths)
    counts = [sum(int(min(depth * 10, 9)) == i for depth in depths) for i in range(10)]
    assert min(counts) >= 3
    assert max(counts) <= 7
    assert sum(depths) / 50 == pytest.approx(0.5, abs=0.02)
    assert depths != sorted(depths)


def test_a_needle_is_placed_between_sentences():
    essay = 'It rained. "Again?" she asked (and sighed.) Then it was over and nobody knew why'
    haystack = make_haystack("number", essay)
    assert haystack.ends == (2, 3, 7, 15)
    hidden = {haystack.hide("#", depth / 100, 15) for depth in range(101)}
    assert {text.split(" # ")[0] for text, _ in hidden if " # " in text} == {
        "It rained.",
        'It rained. "Again?"',
        'It rained. "Again?" she asked (and sighed.)',
    }
    assert {round(depth * 15) for _, depth in hidden} == {0, 2, 3, 7, 15}


def test_a_needle_can_be_placed_in_text_without_sentences():
    haystack = make_haystack("number", "word " * 120)
    assert haystack.ends == (50, 100, 120)


def test_a_haystack_is_repeated():
    haystack = Haystack(("a", "b.", "c."), " ", (2, 3))
    assert haystack.hide("#", 0.0, 7)[0] == "# a b. c. a b. c. a"
    assert haystack.hide("#", 0.7, 7) == ("a b. c. a b. # c. a", 5 / 7)
    assert haystack.hide("#", 1.0, 7)[0] == "a b. c. a b. c. a #"
    assert haystack.hide("#", 0.3, 1) == ("# a", 0.0)


def test_a_short_essay_is_repeated_and_marked(words):
    essay = "A very short essay. It has two sentences, no more."
    chosen = samples(words, "number", essay)
    assert all(sample.repeated and sample.size > 10 for sample in chosen)
    assert chosen[0].prompt.count("A very short essay.") > 5
    assert not any(sample.repeated for variant in VARIANTS for sample in samples(words, variant))


def test_samples_depend_on_the_seed_and_not_on_the_length(words):
    assert samples(words, "uuid") == make_needle(NeedleConfig("uuid", length=700, samples=40), words)
    first, other = (samples(words, "uuid", seed=seed) for seed in (0, 1))
    assert not {sample.answer for sample in first} & {sample.answer for sample in other}
    for short, long in zip(samples(words, "pk"), samples(words, "pk", length=900), strict=True):
        assert (short.key, short.answer) == (long.key, long.answer)
    assert not {s.answer for s in samples(words, "pk")} & {s.answer for s in samples(words, "number")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_error_for_a_short_length_names_the_least_one(words, variant):
    config = NeedleConfig(variant, length=100, samples=20)
    with pytest.raises(ValueError, match=r"length must be >= \d+ for .* got 100") as error:
        make_needle(config, words)
    least = int(re.search(r">= (\d+) ", str(error.value))[1])
    assert least_length(config, words) == least
    assert all(sample.size >= 1 for sample in make_needle(replace(config, length=least), words))
    with pytest.raises(ValueError, match=f"length must be >= {least} "):
        make_needle(replace(config, length=least - 1), words)


def test_invalid_settings_are_rejected(words):
    with pytest.raises(ValueError, match="variant must be one of"):
        NeedleConfig("essay")
    with pytest.raises(ValueError, match="samples must be an integer >= 1, got 0"):
        NeedleConfig(samples=0)
    with pytest.raises(TypeError, match="length must be an integer >= 1"):
        NeedleConfig(length=2048.0)
    for essay, error in ((" \n ", ValueError), ("", ValueError), (b"bytes", TypeError)):
        with pytest.raises(error, match="essay must be a text"):
            samples(words, "number", essay=essay)
    with pytest.raises(ValueError, match=r"answer_tokens must be >= \d\d for variant 'uuid'"):
        samples(words, "uuid", answer_tokens=3)


def test_braces_in_an_essay_are_text(words):
    essay = "Braces {key} and {0} and {kind!r} stay. So do %s and \\n. "
    for sample in samples(words, "number", essay=essay * 3):
        assert "{key} and {0} and {kind!r} stay." in sample.prompt


def test_scores_equal_those_computed_by_hand(words):
    four = samples(words, "uuid")[:4]
    answers = [f" {four[0].answer.upper()}.", four[1].answer[:-1], f"it is{four[2].answer}x", ""]
    assert score_needle(answers, four) == 50.0
    with pytest.raises(ValueError, match=r"answers must have one per sample \(4\), got 3"):
        score_needle(answers[:3], four)
    assert NEEDLE.format(kind="number", key="k", value=1) == "One of the special magic numbers for k is: 1."


def test_the_default_essay_is_prose():
    text = default_essay()
    assert len(text.split()) > 20_000
    assert "::=" not in text[:20_000]
    assert not re.search(r"^[*=~-]{4,}$", text, re.MULTILINE)
