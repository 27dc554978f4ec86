"""From a configuration to standardised windows: the whole way, on real and on small made data."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from muonssm.lab.activity.dataset import ActivityConfig, TooManyLostError, load_activity, read_recording
from muonssm.lab.activity.sources import watch
from muonssm.lab.activity.windows import standardise, windows_of

from . import trees

PARTS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def watched():
    return load_activity(ActivityConfig(), progress=False)


def made(root, **changes):
    settings = {"length": 32, "split": "subject", **changes}
    return load_activity(ActivityConfig("folder", root, **settings), progress=False)


def equal(one, other) -> bool:
    pairs = [(getattr(one, part), getattr(other, part)) for part in PARTS]
    return all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in ("x", "y", "recording"))


# the embedded data


def test_watch_has_the_shapes_promised(watched):
    assert watched.channels == ("ax", "ay", "az", "wx", "wy", "wz")
    assert len(watched.classes) == 7
    assert watched.rate == 50.0
    assert watched.lost == []
    for part in PARTS:
        windows = getattr(watched, part)
        assert windows.x.shape == (len(windows), 512, 6)
        assert windows.x.dtype == torch.float32
        assert windows.y.dtype == windows.recording.dtype == torch.int64
        assert windows.y.shape == windows.recording.shape == (len(windows),)
        assert set(windows.y.tolist()) == set(range(7))
    assert watched.mean.shape == watched.std.shape == (6,)
    assert watched.mean.dtype == watched.std.dtype == torch.float32


def test_watch_windows_are_those_of_its_recordings(watched):
    samples = dict(zip([r.name for r in watched.recordings], watch.load()["X"], strict=True))
    for part in PARTS:
        windows = getattr(watched, part)
        for i in windows.recording.unique().tolist():
            recording = watched.recordings[i]
            assert recording.split == part
            mine = windows.recording == i
            assert (windows.y[mine] == recording.label).all()
            raw = windows_of(samples[recording.name].astype(np.float32), 512, 0.5)
            assert torch.allclose(windows.x[mine], standardise(raw, watched.mean, watched.std), atol=1e-6)


def test_watch_is_standardised_by_training_windows(watched):
    assert torch.allclose(watched.train.x.mean((0, 1)), torch.zeros(6), atol=1e-4)
    assert torch.allclose(watched.train.x.std((0, 1), correction=0), torch.ones(6), atol=1e-4)
    assert not torch.allclose(watched.test.x.mean((0, 1)), torch.zeros(6), atol=1e-3)


def test_every_watch_subject_is_tested_once_with_all_classes_everywhere():
    tested = []
    for fold in range(5):
        data = load_activity(ActivityConfig(fold=fold, seed=fold, length=2048), progress=False)
        subjects = {part: {r.subject for r in data.recordings if r.split == part} for part in PARTS}
        assert [len(subjects[part]) for part in PARTS] == [6, 2, 2]
        assert len(set.union(*subjects.values())) == 10
        for part in PARTS:
            assert set(getattr(data, part).y.tolist()) == set(range(7))
        tested += sorted(subjects["test"], key=int)
        assert tuple(sorted(subjects["test"], key=int)) in watch.PAIRS
    assert sorted(tested, key=int) == [str(number) for number in range(1, 11)]


def test_the_same_configuration_gives_the_same_bits(watched):
    again = load_activity(ActivityConfig(), progress=False)
    assert equal(watched, again)
    assert torch.equal(watched.mean, again.mean)
    assert watched.recordings == again.recordings


def test_clips_are_one_window_a_recording():
    data = load_activity(ActivityConfig(mode="clips", length=100), progress=False)
    assert [len(getattr(data, part)) for part in PARTS] == [84, 28, 28]
    assert data.stretched == data.outside == 0
    assert "clips of 100" in data.summary()


def test_another_rate():
    data = load_activity(ActivityConfig(rate=25, length=256), progress=False)
    assert data.rate == 25
    assert abs(len(data.train) - len(load_activity(ActivityConfig(), progress=False).train)) <= 5


def test_the_summary_says_what_there_is(watched):
    text = watched.summary()
    assert "watch: 140 recordings at 50 Hz, 7 classes, 6 channels, windows of 512, split 'subject'" in text
    assert f"train          84 recordings {len(watched.train):>7} windows    7 of 7 classes    6 subjects" in text
    assert "of the samples come after the last window" in text
    assert text.endswith("lost 0 of 140 files")


# parts and statistics


@pytest.mark.parametrize("split", ["subject", "kfold"])
@pytest.mark.parametrize("mode", ["windows", "clips"])
def test_no_recording_straddles(tmp_path, split, mode):
    trees.folder(tmp_path)
    data = made(tmp_path, split=split, mode=mode)
    recordings = [set(getattr(data, part).recording.tolist()) for part in PARTS]
    assert set.union(*recordings) == set(range(20))
    assert sum(len(part) for part in recordings) == 20
    subjects = [{data.recordings[i].subject for i in part} for part in recordings]
    assert sum(len(part) for part in subjects) == 5


@pytest.mark.parametrize("part", ["validation", "test"])
def test_statistics_and_rate_are_of_training_alone(tmp_path, part):
    trees.folder(tmp_path)
    before = made(tmp_path)
    for recording in before.recordings:
        if recording.split == part:
            trees.write(tmp_path / recording.name, trees.table(trees.timed(1e3 + trees.waves(99, 2), 20), "time,ax,ay"))
    after = made(tmp_path)
    assert torch.equal(before.mean, after.mean)
    assert torch.equal(before.std, after.std)
    assert before.rate == after.rate == 50
    assert torch.equal(before.train.x, after.train.x)
    assert not torch.equal(getattr(before, part).x.mean(), getattr(after, part).x.mean())


def test_statistics_follow_training(tmp_path):
    trees.folder(tmp_path)
    before = made(tmp_path)
    name = next(r.name for r in before.recordings if r.split == "train")
    trees.write(tmp_path / name, trees.table(trees.timed(100 + trees.waves(80, 2)), "time,ax,ay"))
    assert (made(tmp_path).mean > before.mean + 1).all()


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


def test_recordings_at_different_rates_come_to_the_usual_one(tmp_path):
    trees.folder(tmp_path)
    slow = [r.name for r in made(tmp_path).recordings if r.split == "test"]
    for name in slow:
        trees.write(tmp_path / name, trees.table(trees.timed(trees.waves(41, 2, rate=25), 25), "time,ax,ay"))
    data = made(tmp_path)
    assert data.rate == 50
    assert len(data.test) == 4 * (1 + (81 - 32) // 16)
    assert data.outside == pytest.approx((16 * ((80 - 32) % 16) + 4 * ((81 - 32) % 16)) / (16 * 80 + 4 * 81))


def test_the_usual_rate_is_that_of_training_even_if_most_recordings_are_not(tmp_path):
    rows = trees.folder(tmp_path)
    parts = ["train" if i < 4 else "validation" if i < 8 else "test" for i in range(20)]
    for row in rows[4:]:
        text = trees.table(trees.timed(trees.waves(80, 2, rate=20), 20), "time,ax,ay")
        trees.write(tmp_path / row.split(",")[0], text)
    trees.index(tmp_path, [f"{row},{part}" for row, part in zip(rows, parts, strict=True)], "path,label,subject,split")
    assert made(tmp_path, split="given").rate == 50


def test_duplicates_and_short_recordings_are_counted(tmp_path):
    trees.folder(tmp_path)
    path = tmp_path / "s0-run-0.csv"
    lines = path.read_text().splitlines()
    trees.write(path, "\n".join([*lines[:20], lines[19], lines[5]]))
    data = made(tmp_path)
    assert data.duplicates == 2
    assert data.stretched == 1
    assert "2 samples left out for a time stamp that was there before" in data.summary()
    assert "1 recordings shorter than a window, resampled to one" in data.summary()


def test_recordings_without_time_are_taken_as_they_are(tmp_path):
    for i in range(10):
        trees.write(tmp_path / f"{i}.csv", trees.table(trees.waves(40, 2, seed=i), "ax,ay"))
    trees.index(tmp_path, [f"{i}.csv,{i % 2}" for i in range(10)], "path,label")
    data = made(tmp_path, split="kfold")
    assert data.rate is None
    assert len(data.train) == 6
    assert "10 recordings at their own rates" in data.summary()
    with pytest.raises(ValueError, match="split is 'subject', and the recordings have no subjects"):
        made(tmp_path)


def test_a_new_file_is_standardised_like_the_test_part(tmp_path):
    """What `predict` does with a file is what loading did with it."""
    trees.folder(tmp_path)
    data = made(tmp_path, rate=40.0)
    i = int(data.test.recording[0])
    x = read_recording(tmp_path / data.recordings[i].name, data.channels, data.rate)
    windows = standardise(windows_of(x, 32, 0.5), data.mean, data.std)
    assert torch.equal(windows, data.test.x[data.test.recording == i])


# lost files


def test_more_than_a_hundredth_lost_stops(tmp_path):
    rows = trees.folder(tmp_path, subjects=25)  # 100 files
    trees.write(tmp_path / "s0-run-0.csv", "")
    assert len(made(tmp_path).lost) == 1
    trees.write(tmp_path / "s1-run-0.csv", "time,ax,ay\n0,nan,1\n1,1,1\n")
    with pytest.raises(TooManyLostError) as caught:
        made(tmp_path)
    message = str(caught.value)
    assert message.startswith("2 of 100 files cannot be used, which is 2.0%; max_lost is 0.01, it may be set higher")
    assert "s0-run-0.csv: is empty" in message
    assert "s1-run-0.csv: has nan in row 1 of 'ax'" in message
    assert [file for file, _ in caught.value.lost] == ["s0-run-0.csv", "s1-run-0.csv"]
    assert len(made(tmp_path, max_lost=0.02).recordings) == 98
    assert len(rows) == 100


def test_many_lost_files_are_counted_after_the_first_ten(tmp_path):
    rows = trees.folder(tmp_path)
    trees.index(tmp_path, [*rows, *(f"gone{i:02d}.csv,run,p0" for i in range(13))])
    with pytest.raises(TooManyLostError, match=r"and 3 more$") as caught:
        made(tmp_path)
    assert len(caught.value.lost) == 13


def test_nothing_usable(tmp_path):
    for i in range(6):
        trees.write(tmp_path / f"{i}.csv", "")
    trees.index(tmp_path, [f"{i}.csv,x,p{i}" for i in range(6)])
    with pytest.raises(TooManyLostError, match="none of 6 files can be used:"):
        made(tmp_path, max_lost=1)
    trees.index(tmp_path, ["a.csv,,p1"])
    with pytest.raises(TooManyLostError, match=r"none of 1 files can be used:\n    a.csv: has no label"):
        made(tmp_path, max_lost=1)


def test_a_part_that_is_lost_whole(tmp_path):
    trees.folder(tmp_path)
    for recording in made(tmp_path).recordings:
        if recording.split == "validation":
            (tmp_path / recording.name).unlink()
    with pytest.raises(ValueError, match="split is 'subject', and of the recordings for validation none can be used"):
        made(tmp_path, max_lost=1)


# configuration

ERRORS = {
    "source": ({"source": "walks"}, ValueError, r"source is 'walks'; it may be one of \('watch', 'MuWiGes', 'UESTC"),
    "no root": ({"source": "folder"}, ValueError, "root is None with source 'folder'; it may be the folder with"),
    "root": ({"root": "x"}, ValueError, "root is 'x' with source 'watch'; it may be None: the data is embedded"),
    "split": (
        {"split": "given"},
        ValueError,
        r"split is 'given' with source 'watch'; it may be one of \('subject', 'kf",
    ),
    "mode": ({"mode": "pieces"}, ValueError, r"mode is 'pieces'; it may be one of \('windows', 'clips'\)"),
    "length": ({"length": 1}, ValueError, "length is 1; it may be an integer >= 2"),
    "length type": ({"length": 512.0}, ValueError, "length is 512.0; it may be an integer >= 2"),
    "folds": ({"folds": 2}, ValueError, "folds is 2; it may be an integer >= 3"),
    "fold": ({"fold": 5}, ValueError, "fold is 5 with folds 5; it may be 0 to 4"),
    "negative fold": ({"fold": -1}, ValueError, "fold is -1; it may be an integer >= 0"),
    "seed": ({"seed": True}, ValueError, "seed is True; it may be an integer >= 0"),
    "overlap": ({"overlap": 1.0}, ValueError, r"overlap is 1.0; it may be in \[0, 1\)"),
    "overlap type": ({"overlap": "half"}, ValueError, r"overlap is 'half'; it may be in \[0, 1\)"),
    "max_lost": ({"max_lost": 1.5}, ValueError, r"max_lost is 1.5; it may be in \[0, 1\]"),
    "rate": ({"rate": 0}, ValueError, "rate is 0; it may be None or samples a second, > 0"),
    "nan rate": ({"rate": float("nan")}, ValueError, "rate is nan; it may be None or samples a second, > 0"),
    "channels": ({"channels": ("ax", "bx")}, ValueError, r"channels has 'bx'; with source 'watch' it may be \('ax'"),
    "channel twice": ({"channels": ("ax", "ax")}, ValueError, "it may be one or more names, each once"),
    "no channels": ({"channels": ()}, ValueError, r"channels is \(\); it may be one or more names, each once"),
    "channels type": ({"channels": "ax"}, TypeError, "channels is 'ax'; it may be None or a tuple of names"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_configuration_errors(case):
    changes, kind, message = ERRORS[case]
    with pytest.raises(kind, match=message):
        ActivityConfig(**changes)


def test_the_root_must_be_a_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"root is '.*/gone', which is no folder; it may be the folder with the data"
    ):
        made(tmp_path / "gone")


def test_a_configuration_is_frozen_and_can_be_written_down(tmp_path):
    config = ActivityConfig("folder", tmp_path, channels=["ax"])
    assert json.loads(json.dumps(dataclasses.asdict(config)))["root"] == str(tmp_path)
    assert config == ActivityConfig("folder", str(tmp_path), split="given", channels=("ax",))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.length = 3


def test_channels_are_picked():
    data = load_activity(ActivityConfig(channels=("wz", "ax"), length=1024), progress=False)
    whole = load_activity(ActivityConfig(length=1024), progress=False)
    assert torch.equal(data.train.x, whole.train.x[..., [5, 0]])


def test_importing_the_package_leaves_the_data_alone():
    code = "import sys, muonssm; print([m for m in sys.modules if m.startswith(('muonssm.lab', 'seglearn', 'pandas'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_sources_are_imported_without_seglearn():
    code = "import sys, muonssm.lab.activity.dataset; print([m for m in ('seglearn', 'pandas') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
