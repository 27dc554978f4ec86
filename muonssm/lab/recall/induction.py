"""Induction heads, as used in Mamba (Gu and Dao, 2023), from H3 (Dao et al., 2023).

    input   4 11 15  6  2  9 ... 15
    label   -  -  -  -  -  -      6

Random tokens with a special token (the last one of the vocabulary) at a random position and at the end. At the end the
model must output the token that followed the first special token.
"""

from __future__ import annotations

import numpy as np

from muonssm.lab.core.scorer import IGNORED


def generate(rng: np.random.Generator, sequences: int, length: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate inputs and labels, int64 `[sequences, length]`; only the last position has a label."""
    special = vocabulary - 1
    inputs = rng.integers(0, special, (sequences, length))
    position = rng.integers(0, length - 2, (sequences, 1))
    np.put_along_axis(inputs, position, special, axis=1)
    inputs[:, -1] = special
    labels = np.full((sequences, length), IGNORED, dtype=np.int64)
    labels[:, -1:] = np.take_along_axis(inputs, position + 1, axis=1)
    return inputs, labels
