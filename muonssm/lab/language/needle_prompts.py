"""A needle in a haystack: the three single-needle tests (S-NIAH) of RULER (Hsieh et al., 2024).

    samples = make_needle(NeedleConfig("number", length=4096), tokenizer)
    samples[0].prompt, samples[0].answer

| variant | haystack | key | value |
|---|---|---|---|
| `pk` | five sentences of noise, over and over | word | number of 7 digits |
| `number` | an essay | word | number of 7 digits |
| `uuid` | an essay | word | UUID, version 4 |

Wording, budget and score are RULER's. Here the haystack is the largest that fits, to the word, where RULER goes by 500;
depths are spread evenly over the samples; and any text may be the essay. Without one it is the prose of the Python
reference, which comes with Python: with another version of Python it reads a little different.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muonssm.checks import is_int

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
LONGEST = 50  # words after which a sentence is taken to end: text without full stops has places for a needle too


@dataclass(frozen=True)
class NeedleConfig:
    """Which test, and how long.

    Attributes:
        variant: `"pk"`, `"number"` or `"uuid"`.
        length: tokens of prompt and answer together, at most.
        samples: how many.
        answer_tokens: room for the answer.
        seed: of keys, values and depths.
    """

    variant: str = "pk"
    length: int = 2048
    samples: int = 500
    answer_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant is {self.variant!r}; it may be one of {VARIANTS}")
        for name, least in (("length", 1), ("samples", 1), ("answer_tokens", 1), ("seed", 0)):
            value = getattr(self, name)
            if not is_int(value, least):
                raise ValueError(f"{name} is {value!r}; it may be an integer >= {least}")


@dataclass(frozen=True)
class NeedleSample:
    """One question.

    Attributes:
        prompt: text up to where the model goes on.
        answer: the value it has to say.
        key: what the value is of.
        depth: share of the haystack in front of the needle, in [0, 1].
        tokens: of the prompt.
        size: of the haystack: lines of noise, or words of the essay.
        repeated: whether the essay is shorter than the haystack, and begins anew.
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
    """`units` over and over, with `joint` between; a needle may stand after as many units as `ends` says, or first."""

    units: tuple[str, ...]
    joint: str
    ends: tuple[int, ...]

    def hide(self, needle: str, depth: float, size: int) -> tuple[str, float]:
        """`size` units with the needle in the place nearest to `depth`, and the depth of that place."""
        target, period = depth * size, len(self.units)
        begun = int(target // period) * period
        i = bisect_left(self.ends, target - begun)
        around = (begun + (self.ends[i - 1] if i else 0), begun + self.ends[i], size)
        place = min((end for end in around if end <= size), key=lambda end: abs(end - target))
        units = [self.units[i % period] for i in range(size)]
        return self.joint.join([*units[:place], needle, *units[place:]]), place / size


def default_essay() -> str:
    """The prose of the Python reference that `help()` shows, without headings, grammar and code."""
    from pydoc_data.topics import topics

    paragraphs = (part for _, text in sorted(topics.items()) for part in text.split("\n\n"))
    prose = (part for part in paragraphs if part[:1].strip() and part.rstrip().endswith((".", ":", ".)")))
    return "\n\n".join(prose)


def make_haystack(variant: str, essay: str | None) -> Haystack:
    """What the needle of this variant is hidden in; `essay` None takes `default_essay`."""
    if variant == "pk":
        return Haystack((NOISE,), "\n", (1,))
    if essay is not None and not (isinstance(essay, str) and essay.strip()):
        raise ValueError(f"essay is {essay!r:.40}; it may be any text with words, or None for the Python reference")
    words = (default_essay() if essay is None else essay).split()
    ends, begin = [], 0
    for i, word in enumerate(words, start=1):
        if word.rstrip("\"')]\u201d\u2019").endswith((".", "!", "?")) or i - begin == LONGEST or i == len(words):
            ends.append(i)
            begin = i
    return Haystack(tuple(words), " ", tuple(ends))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids as a model reads them before it goes on: with a first special token, without one for the end."""
    ids = list(tokenizer(text)["input_ids"])
    end = getattr(tokenizer, "eos_token_id", None)
    return ids[:-1] if len(ids) > 1 and end is not None and ids[-1] == end else ids


@dataclass(frozen=True)
class _Draw:
    """What is random in a sample."""

    kind: str
    key: str
    value: str
    depth: float

    def prompt(self, haystack: Haystack, size: int) -> tuple[str, float]:
        names = {"kind": self.kind, "key": self.key}
        context, depth = haystack.hide(NEEDLE.format(**names, value=self.value), self.depth, size)
        return TASK.format(**names) + context + QUESTION.format(**names), depth


def _draw(config: NeedleConfig) -> list[_Draw]:
    """One depth from each of as many equal parts of [0, 1) as there are samples, in random order.

    The same for every length: what differs between lengths is then not that keys or values were harder.
    """
    streams = np.random.SeedSequence(config.seed, spawn_key=(VARIANTS.index(config.variant),))
    rng = np.random.default_rng(streams)
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
    """The least `length` that every sample of this test fits in, with one line or word for a haystack."""
    haystack = make_haystack(config.variant, essay)
    return max(len(encode(tokenizer, draw.prompt(haystack, 1)[0])) for draw in _draw(config)) + config.answer_tokens


def make_needle(config: NeedleConfig, tokenizer: Any, essay: str | None = None) -> list[NeedleSample]:
    """The samples; in each, prompt and `answer_tokens` are at most `length` tokens, and with one unit more are not.

    Args:
        tokenizer: as transformers has them, called with a text.
        essay: the haystack of `"number"` and `"uuid"`; None takes `default_essay`.
    """
    check_room(config, tokenizer, essay)
    haystack, samples = make_haystack(config.variant, essay), []
    guess = config.length // 20
    for draw in _draw(config):
        samples.append(_fit(config, tokenizer, haystack, draw, guess))
        guess = samples[-1].size  # samples differ by a few tokens
    return samples


def check_room(config: NeedleConfig, tokenizer: Any, essay: str | None = None) -> None:
    """Raises a ValueError where `length` has no room for the prompt, or `answer_tokens` none for the answer."""
    least = least_length(config, tokenizer, essay)
    if config.length < least:
        raise ValueError(
            f"length is {config.length} with variant {config.variant!r} and answer_tokens {config.answer_tokens}; "
            f"with this tokenizer it may be an integer >= {least}"
        )
    values = (f" {draw.value}" for draw in _draw(config))
    needed = max(len(tokenizer(value, add_special_tokens=False)["input_ids"]) for value in values)
    if needed > config.answer_tokens:
        raise ValueError(
            f"answer_tokens is {config.answer_tokens} with variant {config.variant!r}; "
            f"with this tokenizer it may be an integer >= {needed}"
        )


def _fit(config: NeedleConfig, tokenizer: Any, haystack: Haystack, draw: _Draw, guess: int) -> NeedleSample:
    def fits(size: int) -> bool:
        return len(encode(tokenizer, draw.prompt(haystack, size)[0])) + config.answer_tokens <= config.length

    size = _largest(fits, guess, config.length)
    prompt, depth = draw.prompt(haystack, size)
    repeated = config.variant != "pk" and size > len(haystack.units)
    return NeedleSample(prompt, draw.value, draw.key, depth, len(encode(tokenizer, prompt)), size, repeated)


def _largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """The largest size that fits, where 1 does: steps that double from a guess, then halves."""
    low, high, step = 1, max(2, guess), 1
    while fits(high):
        low, high, step = high, high + step, 2 * step
        if low > most:
            raise ValueError(f"the tokenizer has less than a token for a word: {low} words fit in {most} tokens")
    while high - step > low and not fits(high - step):
        high, step = high - step, 2 * step
    low = max(low, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def is_found(answer: str, sample: NeedleSample) -> bool:
    """Whether the answer contains the value, in upper or lower case."""
    return sample.answer.lower() in answer.lower()


def score_needle(answers: Sequence[str], samples: Sequence[NeedleSample]) -> float:
    """The share of answers that contain their value, in percent."""
    if len(answers) != len(samples) or not samples:
        raise ValueError(f"answers has {len(answers)} and samples {len(samples)}; there may be one answer a sample")
    found = sum(is_found(answer, sample) for answer, sample in zip(answers, samples, strict=True))
    return 100 * found / len(samples)
