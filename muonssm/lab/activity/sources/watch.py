"""`watch`: shoulder exercises with a smart watch, embedded in seglearn.

140 recordings at 50 Hz: 10 subjects, 7 exercises, left and right. D. Burns et al., Shoulder physiotherapy exercise
recognition, 2018 (arXiv 1802.01489).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..recordings import Channels, Listing, Recording, Signal, Source, read_csv, signal

CHANNELS = ("ax", "ay", "az", "wx", "wy", "wz")
RATE = 50.0
# Four pairs of subjects seem to have moved at one tempo: their recordings of an exercise differ in length by 2 to 4 per
# cent (median), any other two subjects' by 5 or more. A pair stays in one part, as a split through it would test on a
# known rhythm. 1 and 2 are those left over. The recordings of 3 and 4 are much shorter than the rest; they come third,
# and so into neither test nor validation of fold 0.
PAIRS = (("1", "2"), ("5", "6"), ("3", "4"), ("7", "10"), ("8", "9"))


def load() -> dict[str, Any]:
    """seglearn's data: lists of samples, labels, subjects and sides."""
    try:
        from seglearn.datasets import load_watch
    except ImportError as error:
        raise ImportError(f"source 'watch' needs seglearn: pip install 'muonssm[activity]' ({error})") from error
    return load_watch()


def find(root: Path | None, channels: Channels | None) -> Listing:
    """All recordings; there is no folder to look into."""
    data = load()
    names = tuple(data["X_labels"])
    recordings, samples = [], {}
    for x, label, subject, right in zip(data["X"], data["y"], data["subject"], data["side"], strict=True):
        name = f"subject{int(subject)}/{data['y_labels'][int(label)]}-{'right' if right else 'left'}"
        recordings.append(Recording(name, int(label), str(int(subject))))
        samples[name] = x

    def read(recording: Recording) -> Signal:
        x = samples[recording.name]
        return signal(x, np.arange(len(x)) / RATE, names).select(channels)

    return Listing(recordings, tuple(data["y_labels"]), read, folds=PAIRS)


SOURCE = Source("watch", ("subject", "kfold"), find, read_csv, CHANNELS, RATE, embedded=True)
