"""Sequences of the synthetic memory tests: what must be kept in memory is known exactly.

    inputs, labels = make_sequences(RecallConfig("mqar", length=256), "train")    # int64 [100000, 256] each

`labels[i, t]` is the token that a model must output at position t, after reading the inputs up to and including t. So
labels are shifted already: `logits[:, t]` predicts `labels[:, t]`. A label of -100 means that nothing is asked.
There is one file per problem: `mqar`, `copying`, `induction`, `passkey`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muonssm.checks import check_bool, check_choice, check_int, check_number
from muonssm.lab.core.scorer import IGNORED

from . import copying, induction, mqar, passkey

SPLITS = ("train", "validation", "test")
# Settings that only some problems have, with their defaults; None depends on the length, see RecallConfig.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mqar": {"vocabulary": 8192, "pairs": None, "fewest_pairs": None, "power": 0.01, "noise": False},
    "copying": {"vocabulary": 16, "tokens": 16},
    "induction": {"vocabulary": 16},
    "passkey": {"vocabulary": len(passkey.WORDS), "digits": 5},
}
PROBLEMS = tuple(DEFAULTS)


@dataclass(frozen=True)
class RecallConfig:
    """Which problem, and its size. None selects the problem's default, and stays None for settings of other problems.

    Attributes:
        problem: `"mqar"`, `"copying"` (selective copying), `"induction"` (induction heads) or `"passkey"`.
        length: tokens of a training sequence, including the queries.
        vocabulary: number of tokens; default 8192 for mqar, 16 for copying and induction; fixed for passkey.
        pairs: for mqar, pairs of key and value; default length / 16, as published up to length 256 (512 uses 64).
        fewest_pairs: for mqar, training sequences have between this and `pairs` pairs, which helps to leave the
            plateau; default `pairs`. Validation and test sequences have `pairs`.
        power: for mqar, the exponent a of the power law: a gap of i has probability ~ i^(a - 1); default 0.01, 1 is
            uniform.
        noise: for mqar, whether random tokens (as in Based) or token 0 (as in Zoology, the default) separate queries.
        tokens: for copying, how many tokens to copy; default 16.
        digits: for passkey, digits of the key; default 5.
        train_examples: sequences of the training set.
        test_examples: sequences of the test set, and of the validation set.
        test_lengths: lengths of the test sets. Default: `length`; for passkey also twice and four times `length`.
        seed: seed of all random draws. Each split and each test length has its own random stream.
    """

    problem: str = "mqar"
    length: int = 256
    vocabulary: int | None = None
    pairs: int | None = None
    fewest_pairs: int | None = None
    power: float | None = None
    noise: bool | None = None
    tokens: int | None = None
    digits: int | None = None
    train_examples: int = 100_000
    test_examples: int = 3_000
    test_lengths: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("problem", self.problem, PROBLEMS)
        for name, least in (("length", 1), ("train_examples", 1), ("test_examples", 1), ("seed", 0)):
            check_int(name, getattr(self, name), least)
        self._fill_defaults()
        for name in ("pairs", "fewest_pairs", "tokens", "digits"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.fewest_pairs is not None and self.fewest_pairs > (self.pairs or 0):
            raise ValueError(f"fewest_pairs must be <= pairs = {self.pairs}, got {self.fewest_pairs}")
        if self.power is not None:
            check_number("power", self.power, 0, 10, open_low=True)
        if self.noise is not None:
            check_bool("noise", self.noise)
        self._check_vocabulary()
        self._check_lengths()

    def _fill_defaults(self) -> None:
        """Fill in the problem's defaults; refuse settings of other problems, which would have no effect."""
        defaults = {**DEFAULTS[self.problem]}
        if self.problem == "mqar":
            defaults["pairs"] = max(1, self.length // 16)
            defaults["fewest_pairs"] = defaults["pairs"] if self.pairs is None else self.pairs
        for name in ("vocabulary", "pairs", "fewest_pairs", "power", "noise", "tokens", "digits"):
            value = getattr(self, name)
            if name not in defaults and value is not None:
                raise ValueError(f"{name} must be None for problem {self.problem!r}, got {value!r}")
            if name in defaults and value is None:
                object.__setattr__(self, name, defaults[name])
        if self.test_lengths is None:
            factors = (1, 2, 4) if self.problem == "passkey" else (1,)
            object.__setattr__(self, "test_lengths", tuple(factor * self.length for factor in factors))

    def _check_vocabulary(self) -> None:
        fixed = DEFAULTS["passkey"]["vocabulary"]
        if self.problem == "passkey":
            if self.vocabulary != fixed:
                raise ValueError(f"vocabulary must be None or {fixed} for problem 'passkey', got {self.vocabulary!r}")
            return
        least = {"mqar": 2 * (self.pairs or 0) + 2, "copying": 4, "induction": 3}[self.problem]
        self._check_size("vocabulary", self.vocabulary, least)

    def _check_lengths(self) -> None:
        least = {
            "mqar": 4 * (self.pairs or 0),  # two positions per pair, two per query
            "copying": 2 * (self.tokens or 0) + 1,  # one position of noise, or there is nothing to select
            "induction": 3,
            "passkey": passkey.min_length(self.digits or 0),
        }[self.problem]
        self._check_size("length", self.length, least)
        lengths = self.test_lengths
        if not isinstance(lengths, tuple | list):
            raise TypeError(f"test_lengths must be None or a tuple of lengths, got {lengths!r}")
        if not lengths or any(lengths.count(length) > 1 for length in lengths):
            raise ValueError(f"test_lengths must be one or more different lengths, got {lengths!r}")
        object.__setattr__(self, "test_lengths", tuple(lengths))
        for length in lengths:
            self._check_size("test_lengths", length, least)

    def _check_size(self, name: str, value: Any, least: int) -> None:
        """Check a size whose lower bound depends on the problem; the error says on what."""
        if check_int(name, value) < least:
            sizes = [f", {size} {getattr(self, size)}" for size in ("pairs", "tokens", "digits") if getattr(self, size)]
            raise ValueError(f"{name} must be >= {least} for problem {self.problem!r}{''.join(sizes)}, got {value}")


def make_sequences(config: RecallConfig, split: str, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Make the inputs and labels of `"train"`, `"validation"` or `"test"`, int64 `[n, L]` each.

    L is `config.length`; for the test set it is `length`, one of `config.test_lengths`, by default the first.
    """
    check_choice("split", split, SPLITS)
    lengths = config.test_lengths or () if split == "test" else (config.length,)
    length = lengths[0] if length is None else length
    if length not in lengths:
        raise ValueError(f"length must be None or one of {lengths} for split {split!r}, got {length!r}")
    sequences = config.train_examples if split == "train" else config.test_examples
    stream = np.random.SeedSequence(config.seed, spawn_key=(SPLITS.index(split), length))
    if split != "train":
        config = replace(config, fewest_pairs=config.pairs)
    inputs, labels = _generate(config, np.random.default_rng(stream), sequences, length)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _generate(
    config: RecallConfig, rng: np.random.Generator, sequences: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    c: Any = config  # the problem's own settings are no longer None
    if c.problem == "mqar":
        return mqar.generate(rng, sequences, length, c.vocabulary, c.pairs, c.power, c.noise, c.fewest_pairs)
    if c.problem == "copying":
        return copying.generate(rng, sequences, length, c.vocabulary, c.tokens)
    if c.problem == "induction":
        return induction.generate(rng, sequences, length, c.vocabulary)
    return passkey.generate(rng, sequences, length, c.digits)


def score_predictions(predictions: Tensor | np.ndarray, labels: Tensor | np.ndarray) -> dict[str, float]:
    """Score predicted token ids `[n, L]` against labels `[n, L]`, in percent.

    `accuracy` is the fraction of correct labels, `exact` the fraction of sequences whose labels are all correct.
    """
    predicted, expected = torch.as_tensor(predictions), torch.as_tensor(labels)
    if predicted.shape != expected.shape or predicted.ndim != 2:
        raise ValueError(
            f"predictions must be [n, L] like labels, got {tuple(predicted.shape)} and {tuple(expected.shape)}"
        )
    asked = expected != IGNORED
    if not asked.any():
        raise ValueError(f"labels must have one or more labels other than {IGNORED}, got none")
    correct = predicted.to(expected.device) == expected
    exact = (correct | ~asked).all(dim=1)[asked.any(dim=1)]
    return {"accuracy": 100 * correct[asked].double().mean().item(), "exact": 100 * exact.double().mean().item()}
