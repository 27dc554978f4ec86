"""Synthetic tests of memory: what has to be kept is known, so is what has to be said.

    inputs, labels = make_recall(RecallConfig("mqar", length=256), "train")    # int64 [100000, 256] each

`labels[i, t]` is the token that a model says AT position t, having read inputs up to t and with it: labels are shifted
already, `logits[:, t]` predicts `labels[:, t]`. Where nothing is asked they are -100, which cross entropy skips.
One file a kind says what its sequences look like: `mqar`, `copying`, `induction`, `passkey`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from muonssm.checks import is_int, is_number
from muonssm.lab.language.shards import IGNORED

from . import copying, induction, mqar, passkey

KINDS = ("mqar", "copying", "induction", "passkey")
PARTS = ("train", "validation", "test")
# Settings that not every kind has, with their usual values; None: it depends, see RecallConfig.
OWN: dict[str, dict[str, Any]] = {
    "mqar": {"vocabulary": 8192, "pairs": None, "power": 0.01, "noise": False},
    "copying": {"vocabulary": 16, "tokens": 16},
    "induction": {"vocabulary": 16},
    "passkey": {"vocabulary": len(passkey.WORDS), "digits": 5},
}


@dataclass(frozen=True)
class RecallConfig:
    """Which test, and how large. None stands for what is usual for the kind; for a setting of another kind it stays.

    Attributes:
        kind: `"mqar"`, `"copying"` (selective copying), `"induction"` (induction heads) or `"passkey"`.
        length: tokens of a training sequence, with all that is asked.
        vocabulary: tokens there are: 8192 for mqar, 16 for copying and induction; that of passkey is closed.
        pairs: of key and value, for mqar; a sixteenth of the length, as published up to length 256 (512 goes with 64).
        power: for mqar, a of the power law: a gap of i is drawn with probability ~ i^(a - 1); 0.01, 1 is uniform.
        noise: for mqar, whether random tokens stand between queries (as in Based) or token 0 (as in Zoology; usual).
        tokens: to be copied; 16.
        digits: of a passkey; 5.
        train_examples, test_examples: sequences of the parts; validation has `test_examples` too.
        test_lengths: lengths of the test part. Once, twice and four times `length` for passkey, otherwise `length`.
        seed: of all random draws. The parts, and the test lengths, have streams of their own.
    """

    kind: str = "mqar"
    length: int = 256
    vocabulary: int | None = None
    pairs: int | None = None
    power: float | None = None
    noise: bool | None = None
    tokens: int | None = None
    digits: int | None = None
    train_examples: int = 100_000
    test_examples: int = 3_000
    test_lengths: tuple[int, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}; it may be one of {KINDS}")
        for name, least in (("length", 1), ("train_examples", 1), ("test_examples", 1), ("seed", 0)):
            _check_integer(name, getattr(self, name), least)
        self._fill()
        for name in ("pairs", "tokens", "digits"):
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), 1)
        if self.power is not None and not (is_number(self.power) and 0 < self.power <= 10):
            raise ValueError(f"power is {self.power!r}; it may be in (0, 10]: 0.01 as published, 1 for uniform gaps")
        if self.noise is not None and not isinstance(self.noise, bool):
            raise ValueError(f"noise is {self.noise!r}; it may be True or False")
        self._check_vocabulary()
        self._check_lengths()

    def _fill(self) -> None:
        """Puts in what is usual for the kind; settings of other kinds are refused rather than left unused."""
        own = {**OWN[self.kind]}
        if self.kind == "mqar":
            own["pairs"] = max(1, self.length // 16)
        for name in ("vocabulary", "pairs", "power", "noise", "tokens", "digits"):
            given = getattr(self, name)
            if name not in own and given is not None:
                owner = next(kind for kind in KINDS if name in OWN[kind])
                raise ValueError(f"{name} is {given!r} with kind {self.kind!r}; it may be None: it is for {owner!r}")
            if name in own and given is None:
                object.__setattr__(self, name, own[name])
        lengths = self.test_lengths
        if lengths is None:
            times = (1, 2, 4) if self.kind == "passkey" else (1,)
            lengths = tuple(n * self.length for n in times)
        if not isinstance(lengths, (tuple, list)) or not lengths or any(lengths.count(n) > 1 for n in lengths):
            raise ValueError(f"test_lengths is {lengths!r}; it may be None or one or more lengths, each once")
        object.__setattr__(self, "test_lengths", tuple(lengths))

    def _check_vocabulary(self) -> None:
        fixed = OWN["passkey"]["vocabulary"]
        if self.kind == "passkey":
            if self.vocabulary != fixed:
                raise ValueError(f"vocabulary is {self.vocabulary!r} with kind 'passkey'; it may be None or {fixed}")
            return
        least = {"mqar": 2 * (self.pairs or 0) + 2, "copying": 4, "induction": 3}[self.kind]
        _check_integer("vocabulary", self.vocabulary, least, self._with())

    def _check_lengths(self) -> None:
        least = {
            "mqar": 4 * (self.pairs or 0),  # two positions for a pair, two for a query
            "copying": 2 * (self.tokens or 0) + 1,  # one of noise, or there is nothing to select
            "induction": 3,
            "passkey": passkey.least_length(self.digits or 0),
        }[self.kind]
        _check_integer("length", self.length, least, self._with())
        for length in self.test_lengths or ():
            _check_integer("a length in test_lengths", length, least, self._with())

    def _with(self) -> str:
        sizes = [f" and {name} {getattr(self, name)}" for name in ("pairs", "tokens", "digits") if getattr(self, name)]
        return f" with kind {self.kind!r}{''.join(sizes)}"


def _check_integer(name: str, value: object, least: int, beside: str = "") -> None:
    if not is_int(value, least):
        raise ValueError(f"{name} is {value!r}{beside}; it may be an integer >= {least}")


def make_recall(config: RecallConfig, part: str, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and labels of `"train"`, `"validation"` or `"test"`, int64 `[n, L]` each.

    L is `config.length`, and for the test part `length`, one of `config.test_lengths`; None takes the first of them.
    """
    if part not in PARTS:
        raise ValueError(f"part is {part!r}; it may be one of {PARTS}")
    lengths = config.test_lengths or () if part == "test" else (config.length,)
    length = lengths[0] if length is None else length
    if length not in lengths:
        raise ValueError(f"length is {length!r} with part {part!r}; it may be None or one of {lengths}")
    rows = config.train_examples if part == "train" else config.test_examples
    streams = np.random.SeedSequence(config.seed, spawn_key=(PARTS.index(part), length))
    inputs, labels = _generate(config, np.random.default_rng(streams), rows, length)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


def _generate(config: RecallConfig, rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    c: Any = config  # its own settings are no longer None
    if c.kind == "mqar":
        return mqar.generate(rng, rows, length, c.vocabulary, c.pairs, c.power, c.noise)
    if c.kind == "copying":
        return copying.generate(rng, rows, length, c.vocabulary, c.tokens)
    if c.kind == "induction":
        return induction.generate(rng, rows, length, c.vocabulary)
    return passkey.generate(rng, rows, length, c.digits)


def score(predicted: Tensor | np.ndarray, labels: Tensor | np.ndarray) -> dict[str, float]:
    """How much of `labels` `[n, L]` the tokens `predicted` `[n, L]` have right, in percent.

    `accuracy` is the share of labelled tokens, `exact` that of sequences with every label right.
    """
    found, wanted = torch.as_tensor(predicted), torch.as_tensor(labels)
    if found.shape != wanted.shape or found.ndim != 2:
        raise ValueError(f"predicted is {tuple(found.shape)} and labels {tuple(wanted.shape)}; both may be [n, L]")
    asked = wanted != IGNORED
    if not asked.any():
        raise ValueError(f"labels has no label: all {wanted.numel()} are {IGNORED}")
    right = found.to(wanted.device) == wanted
    whole = (right | ~asked).all(dim=1)[asked.any(dim=1)]
    return {"accuracy": 100 * right[asked].double().mean().item(), "exact": 100 * whole.double().mean().item()}
