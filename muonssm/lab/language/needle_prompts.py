"""Prompts for the needle in a haystack: the three single-needle tests (S-NIAH) of RULER (Hsieh et al., 2024).

    samples = make_needle(NeedleConfig("number", length=4096), tokenizer)
    samples[0].prompt, samples[0].answer

| variant | haystack | key | value |
|---|---|---|---|
| `pk` | five sentences of noise, repeated | word | number of 7 digits |
| `number` | an essay | word | number of 7 digits |
| `uuid` | an essay | word | UUID, version 4 |

Wording, token budget and score are RULER's. Departures: the haystack is the largest that fits, to the word (RULER steps
by 500); depths are spread evenly over the samples; any text can be the essay. The default essay is the prose of the
Python reference, which comes with Python and differs slightly between its versions.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muonssm.checks import check_choice, check_int

VARIANTS = ("pk", "number", "uuid")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
TASK = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
QUESTION = (
    "\nWhat is the special magic {kind} for {key} mentioned in the provided text? "
    "The special magic {kind} for {key} mentioned in the provided text is"
)
ADJECTIVES = (
    "amber ancient bitter blunt brave brief bright brisk calm careful cheerful clever coarse cosy crisp curious "
    "distant eager early earnest faint famous fancy fierce formal frozen gentle giddy glossy golden grand hidden "
    "hollow humble idle jolly keen lively loyal lucky mellow merry modest narrow noble patient plain polite proud "
    "quaint quiet rapid rustic silent simple sleepy sturdy tidy vivid wistful"
)
NOUNS = (
    "acorn anchor apron barrel basket beacon bridge bucket candle canyon carpet castle cellar comet compass cottage "
    "cradle desert drum easel falcon feather fiddle forest fountain garden glacier hammer harbour helmet island "
    "jacket kettle ladder lantern lemon magnet meadow mirror mitten nutmeg orchard otter paddle pebble pepper pigeon "
    "pillow quarry ribbon saddle shovel sparrow teapot thimble tunnel valley violin walnut window"
)
MAX_SENTENCE = 50  # words; so that a needle can also be hidden in text without full stops


@dataclass(frozen=True)
class NeedleConfig:
    """One test.

    Attributes:
        variant: `"pk"`, `"number"` or `"uuid"`.
        length: the most tokens of prompt and answer together.
        samples: number of samples.
        answer_tokens: tokens reserved for the answer.
        seed: seed of keys, values and depths.
    """

    variant: str = "pk"
    length: int = 2048
    samples: int = 500
    answer_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, VARIANTS)
        for name, least in (("length", 1), ("samples", 1), ("answer_tokens", 1), ("seed", 0)):
            check_int(name, getattr(self, name), least)


@dataclass(frozen=True)
class NeedleSample:
    """One question.

    Attributes:
        prompt: the text that the model continues.
        answer: the value to find.
        key: the word that the value belongs to.
        depth: share of the haystack before the needle, in [0, 1].
        tokens: number of tokens of the prompt.
        size: size of the haystack: lines of noise, or words of the essay.
        repeated: whether the essay is shorter than the haystack and is repeated.
    """

    prompt: str
    answer: str
    key: str
    depth: float
    tokens: int
    size: int
    repeated: bool


@dataclass(frozen=True)
class Haystack:
    """`units`, repeated as often as needed.

    Attributes:
        units: lines or words.
        separator: text between units.
        ends: a needle can be placed after this many units (the end of a sentence), or at the start.
    """

    units: tuple[str, ...]
    separator: str
    ends: tuple[int, ...]

    def hide(self, needle: str, depth: float, size: int) -> tuple[str, float]:
        """`size` units with the needle at the possible position nearest to `depth`, and the depth of that position."""
        target, period = depth * size, len(self.units)
        repeats = int(target // period) * period
        i = bisect_left(self.ends, target - repeats)
        candidates = (repeats + (self.ends[i - 1] if i else 0), repeats + self.ends[i], size)
        position = min((end for end in candidates if end <= size), key=lambda end: abs(end - target))
        units = [self.units[i % period] for i in range(size)]
        return self.separator.join([*units[:position], needle, *units[position:]]), position / size


def default_essay() -> str:
    """The prose of the Python reference that `help()` shows, without headings, grammar and code."""
    from pydoc_data.topics import topics

    paragraphs = (each for _, text in sorted(topics.items()) for each in text.split("\n\n"))
    prose = (each for each in paragraphs if each[:1].strip() and each.rstrip().endswith((".", ":", ".)")))
    return "\n\n".join(prose)


def make_haystack(variant: str, essay: str | None) -> Haystack:
    """The haystack of a variant; `essay` None: `default_essay`."""
    if variant == "pk":
        return Haystack((NOISE,), "\n", (1,))
    wanted = f"essay must be a text with words, or None for the Python reference, got {essay!r:.40}"
    if essay is not None and not isinstance(essay, str):
        raise TypeError(wanted)
    if essay is not None and not essay.strip():
        raise ValueError(wanted)
    words = (default_essay() if essay is None else essay).split()
    ends, begin = [], 0
    for i, word in enumerate(words, start=1):
        if word.rstrip("\"')]\u201d\u2019").endswith((".", "!", "?")) or i - begin == MAX_SENTENCE or i == len(words):
            ends.append(i)
            begin = i
    return Haystack(tuple(words), " ", tuple(ends))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a prompt: with the tokenizer's BOS, if it adds one, and without EOS, so that the model continues."""
    ids = list(tokenizer(text)["input_ids"])
    eos = getattr(tokenizer, "eos_token_id", None)
    return ids[:-1] if len(ids) > 1 and eos is not None and ids[-1] == eos else ids


@dataclass(frozen=True)
class _Draw:
    """The random choices of a sample."""

    kind: str
    key: str
    value: str
    depth: float

    def prompt(self, haystack: Haystack, size: int) -> tuple[str, float]:
        names = {"kind": self.kind, "key": self.key}
        context, depth = haystack.hide(NEEDLE.format(**names, value=self.value), self.depth, size)
        return TASK.format(**names) + context + QUESTION.format(**names), depth


def _draw(config: NeedleConfig) -> list[_Draw]:
    """Draw keys, values and depths: one depth from each of `samples` equal intervals of [0, 1), in random order.

    The draws do not depend on the length, so that lengths are compared on the same keys and values.
    """
    sequence = np.random.SeedSequence(config.seed, spawn_key=(VARIANTS.index(config.variant),))
    rng = np.random.default_rng(sequence)
    depths = (rng.permutation(config.samples) + rng.random(config.samples)) / config.samples
    adjectives, nouns, draws = ADJECTIVES.split(), NOUNS.split(), []
    for depth in depths.tolist():
        key = f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"
        if config.variant == "uuid":
            draws.append(_Draw("uuid", key, str(uuid.UUID(bytes=rng.bytes(16), version=4)), depth))
        else:
            draws.append(_Draw("number", key, str(rng.integers(10**6, 10**7)), depth))
    return draws


def least_length(config: NeedleConfig, tokenizer: Any, essay: str | None = None) -> int:
    """The smallest `length` that fits every sample, with a haystack of one line or word."""
    haystack = make_haystack(config.variant, essay)
    return max(len(encode(tokenizer, draw.prompt(haystack, 1)[0])) for draw in _draw(config)) + config.answer_tokens


def make_needle(config: NeedleConfig, tokenizer: Any, essay: str | None = None) -> list[NeedleSample]:
    """Make the samples of a test, each with the largest haystack that fits `length`.

    Args:
        tokenizer: a transformers tokenizer.
        essay: the haystack of `"number"` and `"uuid"`; None: `default_essay`.
    """
    check_room(config, tokenizer, essay)
    haystack, samples = make_haystack(config.variant, essay), []
    guess = config.length // 20
    for draw in _draw(config):
        samples.append(_fit(config, tokenizer, haystack, draw, guess))
        guess = samples[-1].size  # the sizes differ by a few tokens only
    return samples


def check_room(config: NeedleConfig, tokenizer: Any, essay: str | None = None) -> None:
    """Raise if `length` is too short for the prompt, or `answer_tokens` for the answer."""
    least = least_length(config, tokenizer, essay)
    if config.length < least:
        raise ValueError(
            f"length must be >= {least} for variant {config.variant!r}, answer_tokens {config.answer_tokens} and this "
            f"tokenizer, got {config.length}"
        )
    values = (f" {draw.value}" for draw in _draw(config))
    needed = max(len(tokenizer(value, add_special_tokens=False)["input_ids"]) for value in values)
    if needed > config.answer_tokens:
        raise ValueError(
            f"answer_tokens must be >= {needed} for variant {config.variant!r} and this tokenizer, "
            f"got {config.answer_tokens}"
        )


def _fit(config: NeedleConfig, tokenizer: Any, haystack: Haystack, draw: _Draw, guess: int) -> NeedleSample:
    def fits(size: int) -> bool:
        return len(encode(tokenizer, draw.prompt(haystack, size)[0])) + config.answer_tokens <= config.length

    size = _largest(fits, guess, config.length)
    prompt, depth = draw.prompt(haystack, size)
    repeated = config.variant != "pk" and size > len(haystack.units)
    return NeedleSample(prompt, draw.value, draw.key, depth, len(encode(tokenizer, prompt)), size, repeated)


def _largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest size that fits, given that 1 does: doubling steps from a guess, then bisection."""
    low, high, step = 1, max(2, guess), 1
    while fits(high):
        low, high, step = high, high + step, 2 * step
        if low > most:
            raise ValueError(f"tokenizer must have at least one token per word, got {low} words in {most} tokens")
    while high - step > low and not fits(high - step):
        high, step = high - step, 2 * step
    low = max(low, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def is_found(answer: str, sample: NeedleSample) -> bool:
    """Whether the answer contains the value, ignoring case."""
    return sample.answer.lower() in answer.lower()


def score_needle(answers: Sequence[str], samples: Sequence[NeedleSample]) -> float:
    """The share of answers that contain the value, in percent."""
    if len(answers) != len(samples) or not samples:
        raise ValueError(f"answers must have one per sample ({len(samples)}), got {len(answers)}")
    found = sum(is_found(answer, sample) for answer, sample in zip(answers, samples, strict=True))
    return 100 * found / len(samples)
