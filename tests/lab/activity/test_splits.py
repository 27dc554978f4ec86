"""Which recordings are in which split."""

from __future__ import annotations

from collections import Counter

import pytest

from muonssm.lab.activity.recordings import Recording
from muonssm.lab.activity.sources.source import Listing
from muonssm.lab.activity.splits import SPLITS, assign_splits, deal_into_groups


def listing(subjects: int = 7, takes: int = 3, named: bool = True, **changes) -> Listing:
    recordings = [
        Recording(f"{subject}-{label}-{take}", label, f"p{subject}" if named else None)
        for subject in range(subjects)
        for label in range(2)
        for take in range(takes)
    ]
    return Listing(recordings, ("run", "walk"), lambda recording: None, **changes)


def subjects(recordings, split: str) -> set:
    return {recording.subject for recording in recordings if recording.split == split}


@pytest.mark.parametrize("protocol", ["subject", "kfold"])
def test_subjects_are_in_one_split_and_tested_once(protocol):
    tested = Counter()
    for fold in range(4):
        recordings = assign_splits(listing(), protocol, fold, 4, seed=0)
        sets = [subjects(recordings, split) for split in SPLITS]
        assert all(sets)
        assert sum(len(members) for members in sets) == len(set.union(*sets)) == 7
        tested.update(sets[2])
    assert set(tested.values()) == {1}
    assert len(tested) == 7


def test_without_subjects_recordings_are_dealt_class_by_class():
    tested = Counter()
    for fold in range(5):
        recordings = assign_splits(listing(5, 5, named=False), "kfold", fold, 5, seed=3)
        for split, share in (("train", 15), ("validation", 5), ("test", 5)):
            assert Counter(r.label for r in recordings if r.split == split) == {0: share, 1: share}
        tested.update(r.name for r in recordings if r.split == "test")
    assert set(tested.values()) == {1}
    assert len(tested) == 50


def test_the_seed_decides_the_groups():
    one, other = listing().recordings, listing(10, named=False).recordings
    for recordings in (one, other):
        assert deal_into_groups(recordings, 5, seed=1) == deal_into_groups(recordings, 5, seed=1)
        assert any(
            deal_into_groups(recordings, 5, seed=1) != deal_into_groups(recordings, 5, seed=seed) for seed in (2, 3, 4)
        )


def test_fixed_groups_ignore_the_seed():
    fixed = listing(6, subject_groups=(("p0", "p3"), ("p1", "p4"), ("p2", "p5")))
    for seed in range(3):
        recordings = assign_splits(fixed, "subject", 1, 3, seed)
        assert subjects(recordings, "test") == {"p1", "p4"}
        assert subjects(recordings, "validation") == {"p2", "p5"}
    with pytest.raises(ValueError, match="folds must be 3"):
        assign_splits(fixed, "subject", 0, 5, 0)


def test_a_published_split_is_used_unchanged():
    made = listing(3, 1)
    splits = ["train", "train", "validation", "test", None, "test"]
    made.published_splits["given"] = splits
    assert [r.split for r in assign_splits(made, "given", 0, 5, 0)] == splits


@pytest.mark.parametrize("named", [True, False])
def test_a_missing_validation_set_is_taken_from_training(named):
    made = listing(10, 1, named)
    made.published_splits["given"] = given = ["train"] * 14 + ["test"] * 6
    folds = [assign_splits(made, "given", fold, 3, 0) for fold in range(3)]
    for recordings in folds:
        assert [r.split == "test" for r in recordings] == [split == "test" for split in given]
        assert {r.split for r in recordings[:14]} == {"train", "validation"}
        if named:
            assert not subjects(recordings, "train") & subjects(recordings, "validation")
    held = [{r.name for r in recordings if r.split == "validation"} for recordings in folds]
    assert len(set.union(*held)) == sum(len(names) for names in held) == 14


def test_one_training_subject_is_split_by_recordings():
    made = listing(2, 4)
    made.published_splits["given"] = ["train"] * 8 + ["test"] * 8
    assert Counter(r.split for r in assign_splits(made, "given", 4, 5, 0))["validation"] in (1, 2)


def test_errors():
    for made, error in ((listing(4), "folds must be 4 or less for 4 subjects"), (listing(2, 1, named=False), "folds")):
        with pytest.raises(ValueError, match=error):
            assign_splits(made, "kfold", 0, 5, 0)
    with pytest.raises(ValueError, match="split must be 'kfold'"):
        assign_splits(listing(named=False), "subject", 0, 5, 0)
    with pytest.raises(ValueError, match="split must be one of subject, kfold"):
        assign_splits(listing(), "given", 0, 5, 0)
    with pytest.raises(ValueError, match="split must be one of kfold"):
        assign_splits(listing(named=False), "given", 0, 5, 0)
    mixed = listing()
    mixed.recordings[3] = Recording("nobody", 0)
    with pytest.raises(ValueError, match=r"subject .* nobody"):
        assign_splits(mixed, "kfold", 0, 5, 0)
    made = listing(3, 1)
    made.published_splits["given"] = ["train"] * 5 + ["validation"]
    with pytest.raises(ValueError, match=r"split .* test"):
        assign_splits(made, "given", 0, 5, 0)
