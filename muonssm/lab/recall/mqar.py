"""Multi-query associative recall, after Zoology (Arora et al., 2024).

    input   k1 v1 k2 v2 ... kP vP |  0  0 k2  0 k1  0  0  0 ...
    label    -  -  -  -  ...    - |  -  - v2  - v1  -  -  - ...

P pairs come first, every key and every value once; then every key is asked for once. The lower half of the vocabulary
without token 0 has the keys, the upper half the values.
"""

from __future__ import annotations

import numpy as np

from muonssm.lab.language.shards import IGNORED


def distinct(rng: np.random.Generator, rows: int, count: int, choices: int) -> np.ndarray:
    """`[rows, count]`: in each row `count` different numbers below `choices`, in random order, all equally likely.

    Floyd's sampling, for all rows at once: the cost grows with `count`, not with `choices`.
    """
    picked = np.empty((rows, count), dtype=np.int64)
    for i, last in enumerate(range(choices - count, choices)):
        draw = rng.integers(0, last + 1, rows)
        taken = (picked[:, :i] == draw[:, None]).any(axis=1)
        picked[:, i] = np.where(taken, last, draw)
    return rng.permuted(picked, axis=1)


def gaps(rng: np.random.Generator, rows: int, count: int, places: int, power: float) -> np.ndarray:
    """`[rows, count]`: in each row different places, one for every key in turn.

    Place i (from 0) is drawn with probability proportional to (i + 1)^(power - 1) among those that are left; power 1
    makes all alike. Drawing without replacement is the order in which exponential clocks of these rates ring.
    """
    rates = np.arange(1, places + 1) ** (power - 1.0)
    clocks = rng.exponential(size=(rows, places)) / rates
    first = np.argpartition(clocks, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(clocks, first, axis=1), axis=1)
    return np.take_along_axis(first, order, axis=1)


def generate(
    rng: np.random.Generator, rows: int, length: int, vocabulary: int, pairs: int, power: float, noise: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, int64 `[rows, length]`; `noise` puts random tokens where there would be token 0."""
    half = vocabulary // 2
    keys = 1 + distinct(rng, rows, pairs, half - 1)
    values = half + distinct(rng, rows, pairs, vocabulary - half)
    context = 2 * pairs
    # Queries stand at every other position, so that a model may write a query's value behind it.
    asked = context + 2 * gaps(rng, rows, pairs, (length - context) // 2, power)

    shape = (rows, length)
    inputs = rng.integers(0, vocabulary, shape) if noise else np.zeros(shape, dtype=np.int64)
    inputs[:, 0:context:2], inputs[:, 1:context:2] = keys, values
    np.put_along_axis(inputs, asked, keys, axis=1)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    np.put_along_axis(labels, asked, values, axis=1)
    return inputs, labels
