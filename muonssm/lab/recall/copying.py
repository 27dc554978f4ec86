"""Selective copying, after Mamba (Gu and Dao, 2023), with the alphabet of the copying task that it generalizes.

    input   0 7 0 0 3 0 9 0 | 15 15 15
    label   - - - - - - - - |  7  3  9

Data tokens are at random positions among noise (token 0). At the markers (the last token of the vocabulary) the model
must output them in order.
"""

from __future__ import annotations

import numpy as np

from muonssm.lab.core.scorer import IGNORED

from .mqar import draw_distinct

NOISE = 0


def generate(
    rng: np.random.Generator, sequences: int, length: int, vocabulary: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Generate inputs and labels, int64 `[sequences, length]`; the last `tokens` positions are the markers."""
    marker, context = vocabulary - 1, length - tokens
    data = rng.integers(1, marker, (sequences, tokens))
    positions = np.sort(draw_distinct(rng, sequences, tokens, context), axis=1)
    inputs = np.full((sequences, length), NOISE, dtype=np.int64)
    np.put_along_axis(inputs, positions, data, axis=1)
    inputs[:, context:] = marker
    labels = np.full((sequences, length), IGNORED, dtype=np.int64)
    labels[:, context:] = data
    return inputs, labels
