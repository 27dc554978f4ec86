"""Passkey retrieval, after landmark attention (Mohtashami and Jaggi, 2023), in a closed vocabulary of words.

    task, filler, "The pass key is 4 0 7 1 9 . Remember it . 4 0 7 1 9 is the pass key .", filler,
    "What is the pass key ? The pass key is", 4 0 7 1

The labels are the digits, from the question's last word on. The model sees the right digit before the next, which makes
`exact` the same as writing freely: all digits are right if and only if each is, with right ones before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from muonssm.lab.language.shards import IGNORED

TASK = (
    "There is an important info hidden inside a lot of irrelevant text . Find it and memorize them . "
    "I will quiz you about the important information there ."
)
FILLER = "The grass is green . The sky is blue . The sun is yellow . Here we go . There and back again ."
BEFORE, BETWEEN, AFTER = "The pass key is", ". Remember it .", "is the pass key ."
QUESTION = "What is the pass key ? The pass key is"
DIGITS = "0 1 2 3 4 5 6 7 8 9"
WORDS = tuple(dict.fromkeys(" ".join((DIGITS, TASK, FILLER, BEFORE, BETWEEN, AFTER, QUESTION)).split()))
IDS = {word: i for i, word in enumerate(WORDS)}  # the id of a digit is the digit


def text(ids: Iterable[int]) -> str:
    """Token ids as words, to read."""
    return " ".join(WORDS[i] for i in ids)


def _ids(words: str) -> np.ndarray:
    return np.array([IDS[word] for word in words.split()], dtype=np.int64)


def least_length(digits: int) -> int:
    """Tokens of an input without filler."""
    return len(_ids(f"{TASK} {BEFORE} {BETWEEN} {AFTER} {QUESTION}")) + 2 * digits + (digits - 1)


def generate(rng: np.random.Generator, rows: int, length: int, digits: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, int64 `[rows, length]`; the key stands at a uniformly random place in the filler."""
    key = rng.integers(0, 10, (rows, digits))
    task, before, between, after, question = (
        np.tile(_ids(words), (rows, 1)) for words in (TASK, BEFORE, BETWEEN, AFTER, QUESTION)
    )
    line = np.concatenate([before, key, between, key, after], axis=1)
    place = rng.integers(0, length - least_length(digits) + 1, (rows, 1))
    middle = _insert(line, place, length - len(task[0]) - len(question[0]) - (digits - 1))
    inputs = np.concatenate([task, middle, question, key[:, :-1]], axis=1)
    labels = np.full(inputs.shape, IGNORED, dtype=np.int64)
    labels[:, -digits:] = key
    return inputs, labels


def _insert(line: np.ndarray, place: np.ndarray, length: int) -> np.ndarray:
    """`[rows, length]`: filler with `line` `[rows, n]` at `place` `[rows, 1]`; behind it the filler begins anew.

    Every line is equally long, so that an index moves all of them at once.
    """
    position = np.arange(length)[None]
    inside, behind = position - place, position - place - line.shape[1]
    filler = _ids(FILLER)
    around = filler[np.where(inside < 0, position, behind) % len(filler)]
    said = np.take_along_axis(line, inside.clip(0, line.shape[1] - 1), axis=1)
    return np.where((inside >= 0) & (behind < 0), said, around)
