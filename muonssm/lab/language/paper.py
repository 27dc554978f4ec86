"""The paper's figures for language: zero-shot scores and needles in haystacks, of 170M models."""

from __future__ import annotations

from .zero_shot import AVERAGE, PAPER_TASKS

KINDS = ("plain", "muon")  # the order of the rows of a backbone

# tab:lm_reasoning: perplexities, accuracies in percent, and their average; columns as PAPER_TASKS.
_ZERO_SHOT = {
    "mamba": (
        (42.17, 102.51, 20.57, 63.81, 30.10, 51.11, 52.39, 21.75, 37.41, 59.87, 42.13),
        (40.83, 89.17, 22.84, 63.47, 33.19, 53.36, 53.21, 25.58, 38.33, 63.82, 44.23),
    ),
    "longhorn": (
        (43.06, 96.80, 22.16, 62.79, 29.87, 52.25, 50.34, 21.24, 36.18, 55.02, 41.23),
        (41.71, 80.98, 24.00, 62.02, 32.85, 54.38, 51.17, 25.12, 37.15, 59.44, 43.27),
    ),
    "gated_deltanet": (
        (39.58, 97.92, 21.36, 62.45, 30.02, 51.30, 51.85, 21.42, 36.90, 55.23, 41.32),
        (38.12, 83.47, 23.91, 62.88, 33.51, 53.76, 52.74, 23.13, 38.02, 56.85, 43.10),
    ),
}

NEEDLES = ("pk", "number", "uuid")  # S-NIAH-PK, S-NIAH-N and S-NIAH-UUID, by the names of `data.needle`
NEEDLE_LENGTHS = (2048, 4096, 8192)

# tab:unified_downstream_: accuracies in percent, after instruction tuning; lengths 2K, 4K, 8K of each needle in turn.
_NEEDLE = {
    "mamba": (
        ((29.3, 16.4, 8.8), (18.6, 14.3, 4.1), (48.6, 32.9, 25.0)),
        ((32.1, 20.5, 15.8), (22.4, 19.1, 10.2), (53.8, 38.2, 31.5)),
    ),
    "longhorn": (
        ((67.9, 52.1, 20.0), (70.7, 55.7, 35.6), (46.4, 30.7, 19.3)),
        ((66.7, 55.9, 39.3), (75.1, 71.4, 36.8), (52.9, 37.9, 28.6)),
    ),
    "gated_deltanet": (
        ((61.4, 43.6, 25.7), (69.3, 43.6, 27.1), (52.1, 35.0, 24.3)),
        ((63.2, 48.9, 44.5), (74.1, 57.8, 29.4), (58.3, 42.6, 33.1)),
    ),
}


def published_zero_shot(backbone: str) -> dict[str, dict[str, float]]:
    """What the paper reports, by kind (`"plain"`, `"muon"`) and column; nothing where it reports nothing."""
    columns = (*(column.key for column in PAPER_TASKS), AVERAGE)
    rows = zip(KINDS, _ZERO_SHOT.get(backbone, ()), strict=False)
    return {kind: dict(zip(columns, figures, strict=True)) for kind, figures in rows}


def published_needle(backbone: str) -> dict[str, dict[str, dict[int, float]]]:
    """What the paper reports, by kind, needle and length in tokens; nothing where it reports nothing."""
    rows = zip(KINDS, _NEEDLE.get(backbone, ()), strict=False)
    return {
        kind: {needle: dict(zip(NEEDLE_LENGTHS, its, strict=True)) for needle, its in zip(NEEDLES, row, strict=True)}
        for kind, row in rows
    }
