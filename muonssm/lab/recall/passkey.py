"""Passkey retrieval, after landmark attention (Mohtashami and Jaggi, 2023), in a closed vocabulary of words.

    task, filler, "The pass key is 4 0 7 1 9 . Remember it . 4 0 7 1 9 is the pass key .", filler,
    "What is the pass key ? The pass key is", 4 0 7 1

The labels are the digits, starting at the last word of the question. The input contains the correct digits before each
label. `exact` is still the same as for free generation: all digits are correct if and only if each one is correct given
the correct digits before it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from muonssm.lab.core.scorer import IGNORED

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


def decode(ids: Iterable[int]) -> str:
    """Convert token ids to text."""
    return " ".join(WORDS[i] for i in ids)


def _encode(words: str) -> np.ndarray:
    return np.array([IDS[word] for word in words.split()], dtype=np.int64)


def min_length(digits: int) -> int:
    """Tokens of an input without filler."""
    return len(_encode(f"{TASK} {BEFORE} {BETWEEN} {AFTER} {QUESTION}")) + 2 * digits + (digits - 1)


def generate(rng: np.random.Generator, sequences: int, length: int, digits: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate inputs and labels, int64 `[sequences, length]`; the key is at a random position in the filler."""
    key = rng.integers(0, 10, (sequences, digits))
    task, before, between, after, question = (
        np.tile(_encode(words), (sequences, 1)) for words in (TASK, BEFORE, BETWEEN, AFTER, QUESTION)
    )
    sentence = np.concatenate([before, key, between, key, after], axis=1)
    position = rng.integers(0, length - min_length(digits) + 1, (sequences, 1))
    middle = _insert_into_filler(sentence, position, length - len(task[0]) - len(question[0]) - (digits - 1))
    inputs = np.concatenate([task, middle, question, key[:, :-1]], axis=1)
    labels = np.full(inputs.shape, IGNORED, dtype=np.int64)
    labels[:, -digits:] = key
    return inputs, labels


def _insert_into_filler(sentence: np.ndarray, start: np.ndarray, length: int) -> np.ndarray:
    """Insert `sentence` `[sequences, n]` into filler at `start` `[sequences, 1]`; returns `[sequences, length]`.

    The filler starts again after the sentence. All sentences have the same length, so one gather serves all rows.
    """
    position = np.arange(length)[None]
    from_start, from_end = position - start, position - start - sentence.shape[1]
    filler = _encode(FILLER)
    around = filler[np.where(from_start < 0, position, from_end) % len(filler)]
    inside = np.take_along_axis(sentence, from_start.clip(0, sentence.shape[1] - 1), axis=1)
    return np.where((from_start >= 0) & (from_end < 0), inside, around)
