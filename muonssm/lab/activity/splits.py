"""Which recordings are for training, validation and test. A recording is in one of them, whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .recordings import Listing, Recording

PARTS = ("train", "validation", "test")
Parts = list[str | None]


def assign(listing: Listing, split: str, fold: int, folds: int, seed: int) -> list[Recording]:
    """The recordings with their `split` filled in.

    `"subject"` and `"kfold"` deal subjects (`"kfold"` recordings, where there are no subjects) into `folds` groups:
    group `fold` is the test part, the next one validation, the others training, so that every group is tested once.
    Any other split comes with the data; where it has no validation part, one group out of the training part is it.
    """
    recordings = listing.recordings
    if split == "subject" and subjects_of(recordings) is None:
        raise ValueError("split is 'subject', and the recordings have no subjects; it may be 'kfold'")
    if split == "subject" and listing.folds:
        parts = _rotate(_fixed(recordings, listing.folds, folds), fold, folds)
    elif split in ("subject", "kfold"):
        parts = _rotate(deal(recordings, folds, seed), fold, folds)
    elif split in listing.published:
        parts = with_validation(recordings, listing.published[split], fold, folds, seed)
    else:
        may = [*listing.published, "subject", "kfold"] if subjects_of(recordings) else [*listing.published, "kfold"]
        raise ValueError(f"split is {split!r}, which these recordings do not have; it may be one of {may}")
    for part in PARTS:
        if part not in parts:
            raise ValueError(f"split is {split!r}, which leaves no recordings for {part}")
    return [replace(recording, split=part) for recording, part in zip(recordings, parts, strict=True)]


def subjects_of(recordings: Sequence[Recording]) -> list[str] | None:
    """The subject of each recording; None if none has one."""
    names = [recording.subject for recording in recordings if recording.subject is not None]
    if names and len(names) < len(recordings):
        nameless = next(recording.name for recording in recordings if recording.subject is None)
        raise ValueError(f"{len(recordings) - len(names)} recordings have no subject ({nameless} is one), others have")
    return names or None


def deal(recordings: Sequence[Recording], folds: int, seed: int) -> list[int]:
    """The group of each recording, of about equal sizes, from a seed.

    Subjects stay whole. Where there are none, recordings are dealt class by class, so that each group has its share of
    every class.
    """
    generator = np.random.default_rng(seed)
    subjects = subjects_of(recordings)
    if subjects is None:
        names, what = [recording.name for recording in recordings], "recordings"
        order = sorted(generator.permutation(len(names)), key=lambda i: recordings[i].label)
        hands = {names[i]: position % folds for position, i in enumerate(order)}
    else:
        names, what = subjects, "subjects"
        distinct = sorted(set(subjects))
        hands = {distinct[i]: position % folds for position, i in enumerate(generator.permutation(len(distinct)))}
    if len(hands) < folds:
        raise ValueError(f"folds is {folds}, and there are {len(hands)} {what}; it may be {len(hands)} at most")
    return [hands[name] for name in names]


def _fixed(recordings: Sequence[Recording], groups: Sequence[Sequence[str]], folds: int) -> list[int]:
    if folds != len(groups):
        raise ValueError(
            f"folds is {folds}, and this source has {len(groups)} fixed groups of subjects; it may be {len(groups)}, "
            "or split may be 'kfold'"
        )
    group_of = {subject: number for number, group in enumerate(groups) for subject in group}
    return [group_of[str(recording.subject)] for recording in recordings]


def _rotate(groups: Sequence[int], fold: int, folds: int) -> Parts:
    part_of = {fold: "test", (fold + 1) % folds: "validation"}
    return [part_of.get(group, "train") for group in groups]


def with_validation(recordings: Sequence[Recording], given: Parts, fold: int, folds: int, seed: int) -> Parts:
    """A split as it is, or with one of `folds` groups of its training part as validation where it has none.

    The groups are of subjects where there are two or more to part, and of recordings otherwise.
    """
    if "validation" in given or "train" not in given:
        return given
    training = [i for i, part in enumerate(given) if part == "train"]
    chosen = [recordings[i] for i in training]
    subjects = set(subjects_of(chosen) or ())
    if len(subjects) < 2:
        chosen = [replace(recording, subject=None) for recording in chosen]
    groups = min(folds, len(subjects) if len(subjects) >= 2 else len(chosen))
    parts = list(given)
    for i, group in zip(training, deal(chosen, groups, seed), strict=True):
        parts[i] = "validation" if group == fold % groups else "train"
    return parts
