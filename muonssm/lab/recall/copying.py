"""Selective copying, after Mamba (Gu and Dao, 2023), with the alphabet of the copying task that it generalises.

    input   0 7 0 0 3 0 9 0 | 15 15 15
    label   - - - - - - - - |  7  3  9

Data tokens stand at random places among noise (token 0); at the markers (the last token of the vocabulary) the model
says them in order.
"""

from __future__ import annotations

import numpy as np

from muonssm.lab.language.shards import IGNORED

from .mqar import distinct

NOISE = 0


def generate(
    rng: np.random.Generator, rows: int, length: int, vocabulary: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels, int64 `[rows, length]`; the last `tokens` positions are the markers."""
    marker, context = vocabulary - 1, length - tokens
    data = rng.integers(1, marker, (rows, tokens))
    places = np.sort(distinct(rng, rows, tokens, context), axis=1)
    inputs = np.full((rows, length), NOISE, dtype=np.int64)
    np.put_along_axis(inputs, places, data, axis=1)
    inputs[:, context:] = marker
    labels = np.full((rows, length), IGNORED, dtype=np.int64)
    labels[:, context:] = data
    return inputs, labels
