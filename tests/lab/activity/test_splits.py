"""Who is in which part."""

from __future__ import annotations

from collections import Counter

import pytest

from muonssm.lab.activity.recordings import Listing, Recording
from muonssm.lab.activity.splits import assign, deal


def listing(subjects: int = 7, takes: int = 3, named: bool = True, **changes) -> Listing:
    recordings = [
        Recording(f"{subject}-{label}-{take}", label, f"p{subject}" if named else None)
        for subject in range(subjects)
        for label in range(2)
        for take in range(takes)
    ]
    return Listing(recordings, ("run", "walk"), lambda recording: None, **changes)


def subjects(recordings, part: str) -> set:
    return {recording.subject for recording in recordings if recording.split == part}


@pytest.mark.parametrize("split", ["subject", "kfold"])
def test_subjects_are_never_in_two_parts_and_tested_once(split):
    tested = Counter()
    for fold in range(4):
        recordings = assign(listing(), split, fold, 4, seed=0)
        parts = [subjects(recordings, part) for part in ("train", "validation", "test")]
        assert all(parts)
        assert sum(len(part) for part in parts) == len(set.union(*parts)) == 7
        tested.update(parts[2])
    assert set(tested.values()) == {1}
    assert len(tested) == 7


def test_without_subjects_recordings_are_dealt_class_by_class():
    tested = Counter()
    for fold in range(5):
        recordings = assign(listing(5, 5, named=False), "kfold", fold, 5, seed=3)
        for part, share in (("train", 15), ("validation", 5), ("test", 5)):
            assert Counter(r.label for r in recordings if r.split == part) == {0: share, 1: share}
        tested.update(r.name for r in recordings if r.split == "test")
    assert set(tested.values()) == {1}
    assert len(tested) == 50


def test_a_seed_is_a_split():
    one, other = listing().recordings, listing(10, named=False).recordings
    for recordings in (one, other):
        assert deal(recordings, 5, seed=1) == deal(recordings, 5, seed=1)
        assert any(deal(recordings, 5, seed=1) != deal(recordings, 5, seed=seed) for seed in (2, 3, 4))


def test_fixed_groups_ignore_the_seed():
    fixed = listing(6, folds=(("p0", "p3"), ("p1", "p4"), ("p2", "p5")))
    for seed in range(3):
        recordings = assign(fixed, "subject", 1, 3, seed)
        assert subjects(recordings, "test") == {"p1", "p4"}
        assert subjects(recordings, "validation") == {"p2", "p5"}
    with pytest.raises(ValueError, match="folds is 5, and this source has 3 fixed groups of subjects; it may be 3, or"):
        assign(fixed, "subject", 0, 5, 0)


def test_a_given_split_is_taken_as_it_is():
    made = listing(3, 1)
    parts = ["train", "train", "validation", "test", None, "test"]
    made.published["given"] = parts
    assert [r.split for r in assign(made, "given", 0, 5, 0)] == parts


@pytest.mark.parametrize("named", [True, False])
def test_validation_is_taken_from_training_where_there_is_none(named):
    made = listing(10, 1, named)
    made.published["given"] = given = ["train"] * 14 + ["test"] * 6
    folds = [assign(made, "given", fold, 3, 0) for fold in range(3)]
    for recordings in folds:
        assert [r.split == "test" for r in recordings] == [part == "test" for part in given]
        assert {r.split for r in recordings[:14]} == {"train", "validation"}
        if named:
            assert not subjects(recordings, "train") & subjects(recordings, "validation")
    held = [{r.name for r in recordings if r.split == "validation"} for recordings in folds]
    assert len(set.union(*held)) == sum(len(names) for names in held) == 14


def test_one_training_subject_is_parted_by_recordings():
    made = listing(2, 4)
    made.published["given"] = ["train"] * 8 + ["test"] * 8
    assert Counter(r.split for r in assign(made, "given", 4, 5, 0))["validation"] in (1, 2)


def test_errors():
    with pytest.raises(ValueError, match="folds is 5, and there are 4 subjects; it may be 4 at most"):
        assign(listing(4), "subject", 0, 5, 0)
    with pytest.raises(ValueError, match="folds is 5, and there are 4 recordings; it may be 4 at most"):
        assign(listing(2, 1, named=False), "kfold", 0, 5, 0)
    with pytest.raises(ValueError, match="split is 'subject', and the recordings have no subjects; it may be 'kfold'"):
        assign(listing(named=False), "subject", 0, 5, 0)
    with pytest.raises(
        ValueError, match=r"'given', which these recordings do not have; it may be .*'subject', 'kfold'"
    ):
        assign(listing(), "given", 0, 5, 0)
    with pytest.raises(ValueError, match=r"do not have; it may be one of \['kfold'\]"):
        assign(listing(named=False), "given", 0, 5, 0)
    some = listing()
    some.recordings[3] = Recording("who", 0)
    with pytest.raises(ValueError, match=r"1 recordings have no subject \(who is one\), others have"):
        assign(some, "kfold", 0, 5, 0)
    made = listing(3, 1)
    made.published["given"] = ["train"] * 5 + ["validation"]
    with pytest.raises(ValueError, match="split is 'given', which leaves no recordings for test"):
        assign(made, "given", 0, 5, 0)
