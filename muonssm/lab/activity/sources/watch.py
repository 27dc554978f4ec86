"""`watch`: shoulder exercises recorded with a smartwatch, embedded in the package seglearn.

140 recordings at 50 Hz: 10 subjects, 7 exercises, left and right arm. D. Burns et al., Shoulder physiotherapy exercise
recognition, 2018 (arXiv 1802.01489).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..csv_files import read_csv
from ..recordings import Channels, Recording, Signal
from .source import Listing, Source

CHANNELS = ("ax", "ay", "az", "wx", "wy", "wz")
RATE = 50.0
# Four pairs of subjects seem to have moved at the same tempo: the lengths of their recordings of an exercise differ by
# 2 to 4% (median), those of any other two subjects by 5% or more. A pair stays in one split, because otherwise the test
# set would contain a rhythm known from training. Subjects 1 and 2 are the remaining two. The recordings of subjects 3
# and 4 are much shorter than the others; this pair is third, so that fold 0 neither tests nor validates on it.
PAIRS = (("1", "2"), ("5", "6"), ("3", "4"), ("7", "10"), ("8", "9"))


def load_seglearn() -> dict[str, Any]:
    """Load seglearn's data: lists of samples, labels, subjects and sides."""
    try:
        from seglearn.datasets import load_watch
    except ImportError as error:
        raise ImportError(f"source 'watch' needs seglearn: pip install 'muonssm[activity]' ({error})") from error
    return load_watch()


def find_recordings(root: Path, channels: Channels | None) -> Listing:
    """List all recordings. `root` is not used."""
    data = load_seglearn()
    names = tuple(data["X_labels"])
    recordings, samples = [], {}
    for x, label, subject, right in zip(data["X"], data["y"], data["subject"], data["side"], strict=True):
        name = f"subject{int(subject)}/{data['y_labels'][int(label)]}-{'right' if right else 'left'}"
        recordings.append(Recording(name, int(label), str(int(subject))))
        samples[name] = x

    def read(recording: Recording) -> Signal:
        x = samples[recording.name]
        return Signal.sorted_by_time(x, np.arange(len(x)) / RATE, names).select(channels)

    return Listing(recordings, tuple(data["y_labels"]), read, subject_groups=PAIRS)


SOURCE = Source(("subject", "kfold"), find_recordings, read_csv, CHANNELS, RATE, embedded=True)
