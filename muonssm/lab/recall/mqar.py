"""Multi-query associative recall (MQAR), after Zoology (Arora et al., 2024).

    input   k1 v1 k2 v2 ... kP vP |  0  0 k2  0 k1  0  0  0 ...
    label    -  -  -  -  ...    - |  -  - v2  - v1  -  -  - ...

P pairs of different keys and different values, then every key once as a query. Keys are in the lower half of the
vocabulary without token 0, values in the upper half.
"""

from __future__ import annotations

import numpy as np

from muonssm.lab.core.scorer import IGNORED


def draw_distinct(rng: np.random.Generator, rows: int, count: int, choices: int) -> np.ndarray:
    """Draw `count` different numbers below `choices` per row, uniformly and in random order; `[rows, count]`.

    Floyd's sampling for all rows at once: the cost grows with `count`, not with `choices`.
    """
    drawn = np.empty((rows, count), dtype=np.int64)
    for i, last in enumerate(range(choices - count, choices)):
        draw = rng.integers(0, last + 1, rows)
        repeated = (drawn[:, :i] == draw[:, None]).any(axis=1)
        drawn[:, i] = np.where(repeated, last, draw)
    return rng.permuted(drawn, axis=1)


def draw_gaps(rng: np.random.Generator, rows: int, count: int, positions: int, power: float) -> np.ndarray:
    """Draw different query positions, one per key; `[rows, count]`.

    Position i (from 0) is drawn with probability proportional to (i + 1)^(power - 1) among the remaining ones; power 1
    is uniform. Drawing without replacement is equivalent to ordering exponential variables with these rates.
    """
    rates = np.arange(1, positions + 1) ** (power - 1.0)
    exponentials = rng.exponential(size=(rows, positions)) / rates
    smallest = np.argpartition(exponentials, count - 1, axis=1)[:, :count]
    order = np.argsort(np.take_along_axis(exponentials, smallest, axis=1), axis=1)
    return np.take_along_axis(smallest, order, axis=1)


def generate(
    rng: np.random.Generator,
    sequences: int,
    length: int,
    vocabulary: int,
    pairs: int,
    power: float,
    noise: bool,
    fewest_pairs: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Generate inputs and labels, int64 `[sequences, length]`; `noise` puts random tokens in place of token 0.

    Each sequence has between `fewest_pairs` and `pairs` pairs, drawn uniformly. What the absent pairs and their queries
    leave free is filled like the gaps.
    """
    half = vocabulary // 2
    keys = 1 + draw_distinct(rng, sequences, pairs, half - 1)
    values = half + draw_distinct(rng, sequences, pairs, vocabulary - half)
    context = 2 * pairs
    # Queries are at every other position, so that a model could write a query's value after it.
    queries = context + 2 * draw_gaps(rng, sequences, pairs, (length - context) // 2, power)

    shape = (sequences, length)
    inputs = rng.integers(0, vocabulary, shape) if noise else np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    present = np.ones(keys.shape, dtype=bool)
    if fewest_pairs < pairs:
        present = np.arange(pairs) < rng.integers(fewest_pairs, pairs + 1, (sequences, 1))
    inputs[:, 0:context:2] = np.where(present, keys, inputs[:, 0:context:2])
    inputs[:, 1:context:2] = np.where(present, values, inputs[:, 1:context:2])
    filling = np.take_along_axis(inputs, queries, axis=1)
    np.put_along_axis(inputs, queries, np.where(present, keys, filling), axis=1)
    np.put_along_axis(labels, queries, np.where(present, values, IGNORED), axis=1)
    return inputs, labels
