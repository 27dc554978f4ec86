"""Induction heads, as Mamba (Gu and Dao, 2023) takes it from H3 (Dao et al., 2023).

    input   4 11 15  6  2  9 ... 15
    label   -  -  -  -  -  -      6

Random tokens, and the special token (the last of the vocabulary) twice: somewhere, and at the end. There the model says
the token that came after the first.
"""

from __future__ import annotations

import numpy as np

from muonssm.lab.language.shards import IGNORED


def generate(rng: np.random.Generator, rows: int, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, int64 `[rows, length]`; the one label is at the last position."""
    special = vocabulary - 1
    inputs = rng.integers(0, special, (rows, length))
    place = rng.integers(0, length - 2, (rows, 1))
    np.put_along_axis(inputs, place, special, axis=1)
    inputs[:, -1] = special
    labels = np.full((rows, length), IGNORED, dtype=np.int64)
    labels[:, -1:] = np.take_along_axis(inputs, place + 1, axis=1)
    return inputs, labels
