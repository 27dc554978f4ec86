"""Loading: from a configuration to standardized windows, on the embedded data and on small folders."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from muonssm.lab.activity.config import ActivityConfig
from muonssm.lab.activity.dataset import TooManyLostError, load_activity, read_recording
from muonssm.lab.activity.sources import watch
from muonssm.lab.activity.splits import SPLITS
from muonssm.lab.activity.windows import cut_windows, standardize

from . import trees


@pytest.fixture(scope="module")
def watched():
    return load_activity(ActivityConfig(), progress=False)


def made(root, **changes):
    settings = {"length": 32, "split": "subject", **changes}
    return load_activity(ActivityConfig("folder", root, **settings), progress=False)


def equal(one, other) -> bool:
    pairs = [(getattr(one, split), getattr(other, split)) for split in SPLITS]
    return all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in ("x", "y", "recording"))


# the embedded data


def test_watch_has_the_documented_shapes(watched):
    assert watched.channels == ("ax", "ay", "az", "wx", "wy", "wz")
    assert len(watched.classes) == 7
    assert watched.rate == 50.0
    assert watched.lost == []
    for split in SPLITS:
        windows = getattr(watched, split)
        assert windows.x.shape == (len(windows), 512, 6)
        assert windows.x.dtype == torch.float32
        assert windows.y.dtype == windows.recording.dtype == torch.int64
        assert windows.y.shape == windows.recording.shape == (len(windows),)
        assert set(windows.y.tolist()) == set(range(7))
    assert watched.mean.shape == watched.std.shape == (6,)
    assert watched.mean.dtype == watched.std.dtype == torch.float32


def test_watch_windows_are_slices_of_its_recordings(watched):
    samples = dict(zip([r.name for r in watched.recordings], watch.load_seglearn()["X"], strict=True))
    for split in SPLITS:
        windows = getattr(watched, split)
        for i in windows.recording.unique().tolist():
            recording = watched.recordings[i]
            assert recording.split == split
            own = windows.recording == i
            assert (windows.y[own] == recording.label).all()
            raw = cut_windows(samples[recording.name].astype(np.float32), 512, 0.5)
            assert torch.allclose(windows.x[own], standardize(raw, watched.mean, watched.std), atol=1e-6)


def test_watch_is_standardized_by_training_windows(watched):
    assert torch.allclose(watched.train.x.mean((0, 1)), torch.zeros(6), atol=1e-4)
    assert torch.allclose(watched.train.x.std((0, 1), correction=0), torch.ones(6), atol=1e-4)
    assert not torch.allclose(watched.test.x.mean((0, 1)), torch.zeros(6), atol=1e-3)


@pytest.mark.full
def test_every_watch_subject_is_tested_once_with_all_classes_everywhere():
    tested = []
    for fold in range(5):
        data = load_activity(ActivityConfig(fold=fold, seed=fold, length=2048), progress=False)
        subjects = {split: {r.subject for r in data.recordings if r.split == split} for split in SPLITS}
        assert [len(subjects[split]) for split in SPLITS] == [6, 2, 2]
        assert len(set.union(*subjects.values())) == 10
        for split in SPLITS:
            assert set(getattr(data, split).y.tolist()) == set(range(7))
        tested += sorted(subjects["test"], key=int)
        assert tuple(sorted(subjects["test"], key=int)) in watch.PAIRS
    assert sorted(tested, key=int) == [str(number) for number in range(1, 11)]


@pytest.mark.full
def test_loading_is_deterministic(watched):
    again = load_activity(ActivityConfig(), progress=False)
    assert equal(watched, again)
    assert torch.equal(watched.mean, again.mean)
    assert watched.recordings == again.recordings


@pytest.mark.full
def test_clips_are_one_window_per_recording():
    data = load_activity(ActivityConfig(mode="clips", length=100), progress=False)
    assert [len(getattr(data, split)) for split in SPLITS] == [84, 28, 28]
    assert data.short_recordings == data.dropped_share == 0
    assert "clips of 100" in data.summary()


@pytest.mark.full
def test_another_rate():
    data = load_activity(ActivityConfig(rate=25, length=256), progress=False)
    assert data.rate == 25
    assert abs(len(data.train) - len(load_activity(ActivityConfig(), progress=False).train)) <= 5


def test_summary(watched):
    text = watched.summary()
    assert "watch: 140 recordings at 50 Hz, 7 classes, 6 channels, windows of 512, split 'subject'" in text
    assert f"train          84 recordings {len(watched.train):>7} windows    7 of 7 classes    6 subjects" in text
    assert "of the samples come after the last window" in text
    assert text.endswith("0 of 140 files cannot be used")


# splits and statistics


@pytest.mark.parametrize(
    ("split", "mode"),
    [
        ("subject", "windows"),
        ("kfold", "clips"),
        pytest.param("subject", "clips", marks=pytest.mark.full),
        pytest.param("kfold", "windows", marks=pytest.mark.full),
    ],
)
def test_no_recording_is_in_two_splits(tmp_path, split, mode):
    trees.folder(tmp_path)
    data = made(tmp_path, split=split, mode=mode)
    recordings = [set(getattr(data, split).recording.tolist()) for split in SPLITS]
    assert set.union(*recordings) == set(range(20))
    assert sum(len(members) for members in recordings) == 20
    subjects = [{data.recordings[i].subject for i in members} for members in recordings]
    assert sum(len(members) for members in subjects) == 5


@pytest.mark.parametrize("split", [pytest.param("validation", marks=pytest.mark.full), "test"])
def test_statistics_and_rate_come_from_training_alone(tmp_path, split):
    trees.folder(tmp_path)
    before = made(tmp_path)
    for recording in before.recordings:
        if recording.split == split:
            trees.write(tmp_path / recording.name, trees.table(trees.timed(1e3 + trees.waves(99, 2), 20), "time,ax,ay"))
    after = made(tmp_path)
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.std, after.std)
    assert before.rate == after.rate == 50
    assert torch.equal(before.train.x, after.train.x)
    assert not torch.equal(getattr(before, split).x.mean(), getattr(after, split).x.mean())


def test_statistics_follow_training(tmp_path):
    trees.folder(tmp_path)
    before = made(tmp_path)
    name = next(r.name for r in before.recordings if r.split == "train")
    trees.write(tmp_path / name, trees.table(trees.timed(100 + trees.waves(80, 2)), "time,ax,ay"))
    assert (made(tmp_path).mean > before.mean + 1).all()


@pytest.mark.full
def test_a_seed_decides_the_split(tmp_path):
    trees.folder(tmp_path)
    assert equal(made(tmp_path, seed=1), made(tmp_path, seed=1))
    splits = {tuple(r.split for r in made(tmp_path, seed=seed).recordings) for seed in range(4)}
    assert len(splits) > 1


def test_a_damaged_file_does_not_move_the_others(tmp_path):
    trees.folder(tmp_path)
    before = made(tmp_path)
    trees.write(tmp_path / before.recordings[3].name, "")
    after = made(tmp_path, max_lost=0.1)
    assert after.recordings == before.recordings[:3] + before.recordings[4:]


def test_recordings_are_resampled_to_the_training_rate(tmp_path):
    trees.folder(tmp_path)
    slow = [r.name for r in made(tmp_path).recordings if r.split == "test"]
    for name in slow:
        trees.write(tmp_path / name, trees.table(trees.timed(trees.waves(41, 2, rate=25), 25), "time,ax,ay"))
    data = made(tmp_path)
    assert data.rate == 50
    assert len(data.test) == 4 * (1 + (81 - 32) // 16)
    assert data.dropped_share == pytest.approx((16 * ((80 - 32) % 16) + 4 * ((81 - 32) % 16)) / (16 * 80 + 4 * 81))


def test_the_training_rate_wins_over_a_majority_of_other_recordings(tmp_path):
    rows = trees.folder(tmp_path)
    splits = ["train" if i < 4 else "validation" if i < 8 else "test" for i in range(20)]
    for row in rows[4:]:
        text = trees.table(trees.timed(trees.waves(80, 2, rate=20), 20), "time,ax,ay")
        trees.write(tmp_path / row.split(",")[0], text)
    trees.index(
        tmp_path, [f"{row},{split}" for row, split in zip(rows, splits, strict=True)], "path,label,subject,split"
    )
    assert made(tmp_path, split="given").rate == 50


def test_duplicates_and_short_recordings_are_counted(tmp_path):
    trees.folder(tmp_path)
    path = tmp_path / "s0-run-0.csv"
    lines = path.read_text().splitlines()
    trees.write(path, "\n".join([*lines[:20], lines[19], lines[5]]))
    data = made(tmp_path)
    assert data.duplicates == 2
    assert data.short_recordings == 1
    assert "2 samples with a repeated time stamp were dropped" in data.summary()
    assert "1 recordings are shorter than a window" in data.summary()


def test_recordings_without_time_stamps_are_not_resampled(tmp_path):
    for i in range(10):
        trees.write(tmp_path / f"{i}.csv", trees.table(trees.waves(40, 2, seed=i), "ax,ay"))
    trees.index(tmp_path, [f"{i}.csv,{i % 2}" for i in range(10)], "path,label")
    data = made(tmp_path, split="kfold")
    assert data.rate is None
    assert len(data.train) == 6
    assert "10 recordings at their own rates" in data.summary()
    with pytest.raises(ValueError, match="split must be 'kfold'"):
        made(tmp_path)


def test_a_new_file_is_standardized_like_the_test_set(tmp_path):
    """`predict` processes a file exactly as loading did."""
    trees.folder(tmp_path)
    data = made(tmp_path, rate=40.0)
    i = int(data.test.recording[0])
    x = read_recording(tmp_path / data.recordings[i].name, data.channels, data.rate)
    windows = standardize(cut_windows(x, 32, 0.5), data.mean, data.std)
    assert torch.equal(windows, data.test.x[data.test.recording == i])


# unusable files


def test_loading_stops_above_one_percent_of_unusable_files(tmp_path):
    rows = trees.folder(tmp_path, subjects=25)  # 100 files
    trees.write(tmp_path / "s0-run-0.csv", "")
    assert len(made(tmp_path).lost) == 1
    trees.write(tmp_path / "s1-run-0.csv", "time,ax,ay\n0,nan,1\n1,1,1\n")
    with pytest.raises(TooManyLostError) as caught:
        made(tmp_path)
    message = str(caught.value)
    assert message.startswith("max_lost must cover the unusable files, 2 of 100 (2.0%), got 0.01")
    assert "s0-run-0.csv: is empty" in message
    assert "s1-run-0.csv: must have finite numbers in column 'ax', got nan in row 1" in message
    assert [file for file, _ in caught.value.lost] == ["s0-run-0.csv", "s1-run-0.csv"]
    assert len(made(tmp_path, max_lost=0.02).recordings) == 98
    assert len(rows) == 100


def test_unusable_files_after_the_tenth_are_counted(tmp_path):
    rows = trees.folder(tmp_path)
    trees.index(tmp_path, [*rows, *(f"gone{i:02d}.csv,run,p0" for i in range(13))])
    with pytest.raises(TooManyLostError, match=r"and 3 more$") as caught:
        made(tmp_path)
    assert len(caught.value.lost) == 13


def test_no_usable_files(tmp_path):
    for i in range(6):
        trees.write(tmp_path / f"{i}.csv", "")
    trees.index(tmp_path, [f"{i}.csv,x,p{i}" for i in range(6)])
    with pytest.raises(TooManyLostError, match="none of 6 files can be used:"):
        made(tmp_path, max_lost=1)
    trees.index(tmp_path, ["a.csv,,p1"])
    with pytest.raises(TooManyLostError, match=r"none of 1 files can be used:\n    a.csv: has no label"):
        made(tmp_path, max_lost=1)


def test_a_split_without_usable_files(tmp_path):
    trees.folder(tmp_path)
    for recording in made(tmp_path).recordings:
        if recording.split == "validation":
            (tmp_path / recording.name).unlink()
    with pytest.raises(ValueError, match=r"split .* validation"):
        made(tmp_path, max_lost=1)


def test_one_class_is_refused(tmp_path):
    """A model of one class would be right in 100% of all cases."""
    rows = trees.folder(tmp_path)
    trees.index(tmp_path, [row.replace(",walk,", ",run,") for row in rows])
    with pytest.raises(ValueError, match="training data must have 2 or more classes, got 1: run"):
        made(tmp_path)
    splits = ["train", "train", "test", "validation"]  # a subject's rows: run, run, walk, walk
    given = [f"{row},{splits[i % 4]}" for i, row in enumerate(rows)]
    trees.index(tmp_path, given, "path,label,subject,split")
    with pytest.raises(ValueError, match="training data must have 2 or more classes, got 1: run"):
        made(tmp_path, split="given")


@pytest.mark.parametrize("split", ["train", "test"])
def test_values_that_overflow_when_standardized_are_listed(tmp_path, split):
    trees.folder(tmp_path)
    bad = next(r.name for r in made(tmp_path).recordings if r.split == split)
    for i in range(5):  # tiny values: their deviation is tiny, too
        for path in tmp_path.glob(f"s{i}-*.csv"):
            trees.write(path, trees.table(trees.timed(1e-30 * trees.waves(80, 2, seed=i)), "time,ax,ay"))
    rows = trees.timed(trees.waves(80, 2))
    rows[:, 1] = 3.4e38 if split == "test" else np.where(np.arange(80) == 70, -3.4e38, 3.4e38)
    trees.write(tmp_path / bad, trees.table(rows, "time,ax,ay"))
    data = made(tmp_path, max_lost=0.1)
    assert all(getattr(data, name).x.isfinite().all() for name in SPLITS)
    assert data.mean.isfinite().all()
    if split == "test":
        assert data.lost == [(bad, "must be finite after standardization, got values up to 3.4e+38")]


def test_a_deviation_too_small_for_float32_is_one(tmp_path):
    trees.folder(tmp_path)
    for path in tmp_path.glob("s*.csv"):
        rows = trees.timed(trees.waves(80, 2))
        rows[:, 1] = 1e-45 * (np.arange(80) == 70)
        trees.write(path, trees.table(rows, "time,ax,ay"))
    data = made(tmp_path)
    assert data.std[0] == 1
    assert data.train.x.isfinite().all()


# configuration

ERRORS = {
    "source": ({"source": "walks"}, ValueError, "source"),
    "no root": ({"source": "folder"}, ValueError, "root"),
    "root": ({"root": "x"}, ValueError, "root"),
    "split": ({"split": "given"}, ValueError, "split"),
    "mode": ({"mode": "pieces"}, ValueError, "mode"),
    "length": ({"length": 1}, ValueError, "length"),
    "length type": ({"length": 512.0}, TypeError, "length"),
    "folds": ({"folds": 2}, ValueError, "folds"),
    "fold": ({"fold": 5}, ValueError, "fold must be less than folds"),
    "negative fold": ({"fold": -1}, ValueError, "fold"),
    "seed": ({"seed": True}, TypeError, "seed"),
    "overlap": ({"overlap": 1.0}, ValueError, "overlap"),
    "overlap type": ({"overlap": "half"}, TypeError, "overlap"),
    "max_lost": ({"max_lost": 1.5}, ValueError, "max_lost"),
    "rate": ({"rate": 0}, ValueError, "rate"),
    "nan rate": ({"rate": float("nan")}, ValueError, "rate"),
    "channels": ({"channels": ("ax", "bx")}, ValueError, "channels"),
    "repeated channel": ({"channels": ("ax", "ax")}, ValueError, "channels"),
    "no channels": ({"channels": ()}, ValueError, "channels"),
    "channels type": ({"channels": "ax"}, TypeError, "channels"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_configuration_errors(case):
    changes, error, name = ERRORS[case]
    with pytest.raises(error, match=rf"^{name}\b"):
        ActivityConfig(**changes)


def test_the_root_must_be_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"root .*/gone"):
        made(tmp_path / "gone")


def test_a_configuration_is_frozen_and_serializable(tmp_path):
    config = ActivityConfig("folder", tmp_path, channels=["ax"])
    assert json.loads(json.dumps(dataclasses.asdict(config)))["root"] == str(tmp_path)
    assert config == ActivityConfig("folder", str(tmp_path), split="given", channels=("ax",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.length = 3


@pytest.mark.full
def test_channels_are_selected():
    data = load_activity(ActivityConfig(channels=("wz", "ax"), length=1024), progress=False)
    whole = load_activity(ActivityConfig(length=1024), progress=False)
    assert torch.equal(data.train.x, whole.train.x[..., [5, 0]])


@pytest.mark.full
def test_imports_are_lazy():
    """Importing the package does not import the lab; importing the sources does not import seglearn."""
    code = """
        import sys
        import muonssm
        print([name for name in sys.modules if name.startswith(("muonssm.lab", "seglearn", "pandas"))])
        import muonssm.lab.activity.dataset
        print([name for name in ("seglearn", "pandas") if name in sys.modules])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "[]"]
