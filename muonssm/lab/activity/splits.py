"""Assign recordings to the training, validation and test set. A recording belongs to one of them as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .recordings import Recording
from .sources.source import Listing, SplitNames

SPLITS = ("train", "validation", "test")


def assign_splits(listing: Listing, protocol: str, fold: int, folds: int, seed: int) -> list[Recording]:
    """Fill in the `split` of every recording.

    The protocols `"subject"` and `"kfold"` deal subjects (`"kfold"`: recordings, if there are no subjects) into `folds`
    groups. Group `fold` is the test set, the next group is the validation set, all others are the training set, so that
    over all folds every group is tested once. Any other protocol is published with the data; if it has no validation
    set, one group of its training set becomes the validation set.
    """
    recordings = listing.recordings
    if protocol == "subject" and subjects_of(recordings) is None:
        raise ValueError("split must be 'kfold' for recordings without subjects, got 'subject'")
    if protocol == "subject" and listing.subject_groups:
        splits = _rotate(_fixed_groups(recordings, listing.subject_groups, folds), fold, folds)
    elif protocol in ("subject", "kfold"):
        splits = _rotate(deal_into_groups(recordings, folds, seed), fold, folds)
    elif protocol in listing.published_splits:
        splits = add_validation(recordings, listing.published_splits[protocol], fold, folds, seed)
    else:
        known = [*listing.published_splits, *(["subject"] if subjects_of(recordings) else []), "kfold"]
        raise ValueError(f"split must be one of {', '.join(known)} for these recordings, got {protocol!r}")
    for split in SPLITS:
        if split not in splits:
            raise ValueError(f"split must leave recordings for {split}, got {protocol!r}, which leaves none")
    return [replace(recording, split=split) for recording, split in zip(recordings, splits, strict=True)]


def subjects_of(recordings: Sequence[Recording]) -> list[str] | None:
    """The subject of each recording; None if no recording has one."""
    subjects = [recording.subject for recording in recordings if recording.subject is not None]
    if subjects and len(subjects) < len(recordings):
        missing = [recording.name for recording in recordings if recording.subject is None]
        raise ValueError(f"subject must be given for all recordings or for none, got none for {missing[0]}")
    return subjects or None


def deal_into_groups(recordings: Sequence[Recording], groups: int, seed: int) -> list[int]:
    """Deal recordings into groups of about equal size; returns the group of each recording.

    All recordings of a subject get the same group. If there are no subjects, recordings are dealt class by class, so
    that each group has its share of every class.
    """
    generator = np.random.default_rng(seed)
    subjects = subjects_of(recordings)
    if subjects is None:
        names, unit = [recording.name for recording in recordings], "recordings"
        order = sorted(generator.permutation(len(names)), key=lambda i: recordings[i].label)
        group_of = {names[i]: position % groups for position, i in enumerate(order)}
    else:
        names, unit = subjects, "subjects"
        distinct = sorted(set(subjects))
        group_of = {distinct[i]: position % groups for position, i in enumerate(generator.permutation(len(distinct)))}
    if len(group_of) < groups:
        raise ValueError(f"data.folds must be {len(group_of)} or less for {len(group_of)} {unit}, got {groups}")
    return [group_of[name] for name in names]


def add_validation(recordings: Sequence[Recording], splits: SplitNames, fold: int, folds: int, seed: int) -> SplitNames:
    """Move one of `folds` groups of the training set to the validation set, unless there is a validation set already.

    Groups consist of subjects if the training set has two or more, and of recordings otherwise.
    """
    if "validation" in splits or "train" not in splits:
        return splits
    training = [i for i, split in enumerate(splits) if split == "train"]
    chosen = [recordings[i] for i in training]
    subjects = set(subjects_of(chosen) or ())
    if len(subjects) < 2:
        chosen = [replace(recording, subject=None) for recording in chosen]
    groups = min(folds, len(subjects) if len(subjects) >= 2 else len(chosen))
    result = list(splits)
    for i, group in zip(training, deal_into_groups(chosen, groups, seed), strict=True):
        result[i] = "validation" if group == fold % groups else "train"
    return result


def _fixed_groups(recordings: Sequence[Recording], groups: Sequence[Sequence[str]], folds: int) -> list[int]:
    if folds != len(groups):
        raise ValueError(
            f"folds must be {len(groups)}, the number of fixed groups of subjects of this source, got {folds}; "
            "use split 'kfold' for another number"
        )
    group_of = {subject: number for number, group in enumerate(groups) for subject in group}
    return [group_of[str(recording.subject)] for recording in recordings]


def _rotate(groups: Sequence[int], fold: int, folds: int) -> SplitNames:
    split_of = {fold: "test", (fold + 1) % folds: "validation"}
    return [split_of.get(group, "train") for group in groups]
