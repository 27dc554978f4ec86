"""The layouts of the data sets: finding recordings, reading them, and reporting files that cannot be used."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from collections import Counter

import numpy as np
import pytest
from scipy.io import savemat

from muonssm.lab.activity.config import ActivityConfig
from muonssm.lab.activity.dataset import load_activity, read_recording
from muonssm.lab.activity.mat_files import HEADER, read_matrix
from muonssm.lab.activity.recordings import DamagedFileError
from muonssm.lab.activity.sources import folder, mmact, motionsense, muwiges, uci_har, uestc, watch

from . import trees


def load(source: str, root, **changes):
    settings = {"length": 32, "max_lost": 1.0, **changes}
    return load_activity(ActivityConfig(source, root, **settings), progress=False)


def reason(data, file: str) -> str:
    return dict(data.lost)[file]


# watch


def test_watch_is_seglearns_data():
    listing = watch.find_recordings(None, None)
    assert len(listing.recordings) == len({recording.name for recording in listing.recordings}) == 140
    assert listing.classes == ("PEN", "ABD", "FEL", "IR", "ER", "TRAP", "ROW")
    signal = listing.read(listing.recordings[0])
    assert signal.channels == watch.CHANNELS == watch.SOURCE.channels
    assert np.array_equal(signal.samples, watch.load_seglearn()["X"][0].astype(np.float32))
    assert np.allclose(np.diff(signal.times), 0.02)


def test_watch_without_seglearn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "seglearn.datasets", None)
    with pytest.raises(ImportError, match=r"source 'watch' needs seglearn: pip install 'muonssm\[activity\]'"):
        load_activity(ActivityConfig())


def test_other_sources_do_not_need_seglearn(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "seglearn.datasets", None)
    trees.folder(tmp_path)
    assert len(load("folder", tmp_path, split="kfold").recordings) == 20


# folder


def test_folder_finds_the_files_of_the_index(tmp_path):
    trees.folder(tmp_path)
    listing = folder.find_recordings(tmp_path, None)
    assert len(listing.recordings) == 20
    assert listing.classes == ("run", "walk")
    assert listing.recordings[0].subject == "p0"
    assert listing.published_splits == {}
    data = load("folder", tmp_path, split="subject")
    assert data.channels == ("ax", "ay")
    assert data.rate == 50.0


def test_folder_with_a_split_column(tmp_path):
    rows = trees.folder(tmp_path)
    names = ["train", "Val", "validation", "test", ""]
    rows = [f"{row},{names[i % 5]}" for i, row in enumerate(rows)]
    trees.index(tmp_path, rows, "Path,label,subject,split")
    data = load("folder", tmp_path)
    assert data.config.split == "given"
    counts = Counter(recording.split for recording in data.recordings)
    assert counts == {"train": 4, "validation": 8, "test": 4, None: 4}
    assert "4 recordings are not used" in data.summary()


def test_numeric_labels_are_sorted_by_value(tmp_path):
    for label in ("10", "9", "b", "2"):
        trees.write(tmp_path / f"{label}.csv", "ax\n1\n2\n")
    trees.index(tmp_path, [f"{label}.csv,{label}" for label in ("10", "9", "b", "2")], "path,label")
    assert folder.find_recordings(tmp_path, None).classes == ("2", "9", "10", "b")


DAMAGED = {
    "": "empty",
    "time,ax,ay\n0,1,2\n0.02,nan,2\n": "got nan in row 2",
    "this is not\na recording\n": "'this is not', got 'a recording' in row 1",
    "a letter, in two columns\n1,2\n3,4\n": "ax, ay, got a letter, in two columns",
    "time,ax\n0,1\n0.02,2\n": "ax, ay, got ax",
    "time,ax,ay,az\n0,1,1,1\n0.02,2,1,1\n": "ax, ay, got ax, ay, az",
    "time,ax,ay\n0,1,1\n86400,2,1\n0.02,2,1\n0.04,2,1\n": "got 4 of them over 86400 s",
}


@pytest.mark.parametrize("text", DAMAGED)
def test_folder_names_damaged_files(tmp_path, text):
    rows = trees.folder(tmp_path)
    trees.write(tmp_path / "bad.csv", text)
    trees.index(tmp_path, [*rows, "bad.csv,run,p0", "gone.csv,run,p1", "s0.csv,,p1"])
    data = load("folder", tmp_path, split="kfold")
    assert len(data.lost) == 3
    assert DAMAGED[text] in reason(data, "bad.csv")
    assert reason(data, "gone.csv") == "No such file or directory"
    assert reason(data, "s0.csv") == "has no label in index.csv"
    assert len(data.recordings) == 20
    assert "3 of 23 files cannot be used" in data.summary()


def test_columns_are_brought_into_one_order(tmp_path):
    trees.folder(tmp_path)
    before = load("folder", tmp_path, split="subject")
    path = tmp_path / "s3-walk-1.csv"
    rows = [line.split(",") for line in path.read_text().splitlines()]
    trees.write(path, "\n".join(f"{ay},{time},{ax}" for time, ax, ay in rows))
    after = load("folder", tmp_path, split="subject")
    for split in ("train", "validation", "test"):
        assert np.array_equal(getattr(before, split).x, getattr(after, split).x)


def test_only_selected_channels_are_read(tmp_path):
    rows = trees.folder(tmp_path)
    trees.write(tmp_path / "more.csv", "az,ay,ax\n1,2,x\n3,4,x\n")
    trees.index(tmp_path, [*rows, "more.csv,run,p0"])
    data = load("folder", tmp_path, split="subject", channels=["ay"])
    assert data.channels == ("ay",)
    assert data.lost == []
    assert data.train.x.shape[-1] == 1


def test_folder_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"root .*index\.csv"):
        folder.find_recordings(tmp_path, None)
    for text, message in (
        ("", "index.csv is empty"),
        ("file,label\na,b\n", "columns path, label, subject, split, got file, label"),
        ("1,2\n3,4\n", "columns path, .* got no header"),
        ("path,label\na.csv,x\n./a.csv,y\n", r"path .* './a.csv' in rows 2 and 3"),
        ("path,label,split\na.csv,x,dev\n", "split .* got 'dev' in row 2"),
    ):
        trees.write(tmp_path / "index.csv", text)
        with pytest.raises(ValueError, match=message):
            folder.find_recordings(tmp_path, None)


# MuWiGes


@pytest.mark.parametrize("unit", [1.0, 1e3, *(pytest.param(unit, marks=pytest.mark.full) for unit in (1e6, 1e9))])
def test_muwiges_in_any_unit_of_time(tmp_path, unit):
    trees.muwiges(tmp_path, unit=unit)
    data = load("MuWiGes", tmp_path)
    assert data.config.split == "kfold"
    assert data.rate == 50.0
    assert len(data.classes) == 12
    assert {recording.label for recording in data.recordings} == {0, 11}
    assert {recording.subject for recording in data.recordings} == {"1", "2", "3", "4", "5"}
    assert data.lost == []


def test_muwiges_splits_by_its_folders(tmp_path):
    trees.muwiges(tmp_path, splits=("data_train", "data_test", "data_train"))
    data = load("MuWiGes", tmp_path, split="given", mode="clips")
    assert all(r.split == "test" for r in data.recordings if r.name.startswith("data_test/"))
    assert {r.split for r in data.recordings if r.name.startswith("data_train/")} == {"train", "validation"}


def test_muwiges_reads_and_refuses(tmp_path):
    trees.muwiges(tmp_path)
    good = sorted(tmp_path.rglob("01*.csv"))[0]
    x = read_recording(good, rate=50, source="MuWiGes")
    assert x.shape == (60, 6)
    assert np.allclose(x, np.loadtxt(good, delimiter=",")[:, 1:], atol=1e-5)
    trees.write(tmp_path / "subject1" / "13_x.csv", good.read_text())
    trees.write(tmp_path / "subject1" / "ab_x.csv", good.read_text())
    trees.write(tmp_path / "subject1" / "02_x.csv", "0,1,2,3,4,5\n1,1,2,3,4,5\n")
    trees.write(tmp_path / "subject1" / "03_x.csv", "")
    trees.write(tmp_path / "subject1" / "04_x.csv", "0,1,2,3,4,5,6\n0,1,2,3,4,5,6\n")
    data = load("MuWiGes", tmp_path)
    assert len(data.lost) == 5
    assert reason(data, "subject1/13_x.csv") == "must begin with the number of a gesture, 01 to 12, got '13'"
    assert reason(data, "subject1/ab_x.csv").endswith("01 to 12, got 'ab'")
    assert reason(data, "subject1/02_x.csv").startswith("must have 7 columns (time, acc_x")
    assert reason(data, "subject1/03_x.csv") == "is empty"
    assert reason(data, "subject1/04_x.csv") == "must have 2 or more samples at different times, got 1"


def test_muwiges_without_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"root .*01\*.csv to 12\*.csv"):
        muwiges.find_recordings(tmp_path, None)


# UESTC-MMEA-CL


@pytest.mark.parametrize("base", [0, pytest.param(1, marks=pytest.mark.full)])
def test_uestc_is_listed_and_in_physical_units(tmp_path, base):
    trees.uestc(tmp_path, base=base)
    data = load("UESTC-MMEA-CL", tmp_path, length=64)
    assert Counter(r.split for r in data.recordings) == {"train": 6, "validation": 2, "test": 2}
    assert data.classes[0] == "upstairs"
    assert data.classes[31] == "watch_TV"
    assert data.classes[1] == "activity2"
    assert {recording.label for recording in data.recordings} == {0, 31}
    assert data.rate == 25.0
    assert data.short_recordings == 10
    assert "10 recordings are shorter than a window and were resampled" in data.summary()
    assert "30 classes have no training windows: activity2, activity3" in data.summary()
    assert "activity11, and 20 more" in data.summary()
    path = tmp_path / data.recordings[0].name
    raw = np.loadtxt(path, delimiter=",")
    x = read_recording(path, source="UESTC-MMEA-CL")
    assert np.allclose(x[:, :3], raw[:, :3] / 16384, atol=1e-5)
    assert np.allclose(x[:, 3:], raw[:, 3:] / 16.4, atol=1e-2)


def test_uestc_names_damaged_files(tmp_path):
    trees.uestc(tmp_path)
    with (tmp_path / "train.txt").open("a") as file:
        file.write("x/1_upstairs/1_upstairs_2020_00 100 40 0\n")  # in test.txt too
        file.write("x/1_upstairs/gone 100 40 0\n\nnonsense\nx/33_fly/a 1 2 32\nx/1_upstairs/bad 100 40 5\n")
    trees.write(tmp_path / "sensor" / "1_upstairs" / "1_upstairs_2020_02.csv", "1,2,3\n4,5,6\n")
    data = load("UESTC-MMEA-CL", tmp_path)
    assert len(data.lost) == 6
    assert reason(data, "test.txt, line 1") == "sensor/1_upstairs/1_upstairs_2020_00.csv is already listed for train"
    assert reason(data, "sensor/1_upstairs/gone.csv") == "No such file or directory"
    assert reason(data, "train.txt, line 10") == "must be a path, frames, samples and a label, got 'nonsense'"
    assert reason(data, "train.txt, line 11").endswith("activity's number, 1 to 32, got '33_fly'")
    assert reason(data, "sensor/1_upstairs/bad.csv") == "must have the label of its folder, number 1, got 5"
    assert reason(data, "sensor/1_upstairs/1_upstairs_2020_02.csv").startswith("must have 6 columns (acc_x")


def test_uestc_needs_its_lists(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"root .*no train\.txt"):
        uestc.find_recordings(tmp_path, None)


# MMAct


def test_mmact_has_35_activities():
    assert len(mmact.CLASSES) == len(set(mmact.CLASSES)) == 35
    assert list(mmact.CLASSES) == sorted(mmact.CLASSES)


PROTOCOLS = {
    "cross-subject": ("subject17", None),
    "cross-scene": ("scene4", None),
    "cross-session": ("session4", "session5"),
}


@pytest.mark.parametrize(
    "split",
    [pytest.param(name, marks=[] if name == "cross-session" else [pytest.mark.full]) for name in PROTOCOLS],
)
def test_mmact_protocols(tmp_path, split):
    trees.mmact(tmp_path)
    data = load("MMAct", tmp_path, split=split)
    test, unused = PROTOCOLS[split]
    assert data.lost == []
    assert len(data.recordings) == 3 * 2 * 3 * 2
    for recording in data.recordings:
        assert (recording.split == "test") == (test in recording.name.split("/"))
        assert (recording.split is None) == (unused in recording.name.split("/"))
    assert data.channels == mmact.CHANNELS[:9]
    assert {data.classes[recording.label] for recording in data.recordings} == {"walking", "carrying_light"}
    train, validation = ({r.subject for r in data.recordings if r.split == split} for split in ("train", "validation"))
    assert not train & validation


def test_mmact_sensors_are_merged_over_common_time(tmp_path):
    """One sine recorded by three sensors with different starts and rates agrees where they overlap."""
    name = "subject1/scene1/session1/walking.csv"
    for sensor, rate, start in (("acc_phone_clip", 100, 1.0), ("acc_watch_clip", 100, 1.25), ("gyro_clip", 50, 0.75)):
        times = start + np.arange(int(4 * rate)) / rate
        rows = [
            f"{s},{v:.7f},{v:.7f},{v:.7f}"
            for s, v in zip(trees.stamps(4 * rate, rate, start), np.sin(times), strict=True)
        ]
        order = np.random.default_rng(0).permutation(len(rows))  # not sorted, with repeated time stamps
        text = [rows[i] for i in order] + [f"{rows[i].split(',')[0]},9,9,9" for i in order[:7]]
        trees.write(tmp_path / sensor / name, "\n".join(text) + "\n")
    x = read_recording(tmp_path / "gyro_clip" / name, rate=50.0, source="MMAct")
    assert x.shape == (175, 9)  # from 1.25 to 4.73 s
    assert np.abs(x - np.sin(1.25 + np.arange(175) / 50)[:, None]).max() < 1e-3
    signal = mmact.read_file(tmp_path / "gyro_clip" / name)
    assert signal.duplicates == 21


@pytest.mark.full
def test_mmact_channels_decide_which_sensors_are_read(tmp_path):
    trees.mmact(tmp_path)
    six = tuple(f"{sensor}_{axis}" for sensor in ("acc_phone", "gyro") for axis in "xyz")
    assert load("MMAct", tmp_path, channels=six).channels == six
    assert len(load("MMAct", tmp_path, channels=mmact.CHANNELS).channels) == 12


def test_mmact_names_damaged_files(tmp_path):
    trees.mmact(tmp_path)
    phone = "acc_phone_clip/subject1/scene1"
    base = tmp_path / phone
    text = (base / "session1" / "walking.csv").read_text()
    trees.write(base / "session1" / "walking.csv", "")
    trees.write(base / "session4" / "walking.csv", "20180423_15:00:00,1,2\n20180423_15:00:01,1,2\n")
    trees.write(base / "session5" / "walking.csv", "yesterday,1,2,3\n20180423_15:00:01,1,2,3\n")
    trees.write(base / "session1" / "flying.csv", text)
    trees.write(base / "session1" / "CARRYING_LIGHT.csv", text)
    trees.write(base / "walking.csv", text)
    (tmp_path / "gyro_clip" / "subject2" / "scene1" / "session1" / "walking.csv").unlink()
    trees.mmact_file(tmp_path / "gyro_clip" / "subject2" / "scene1" / "session4" / "walking.csv", 50, 50, start=30)
    data = load("MMAct", tmp_path)
    assert dict(data.lost) == {
        "subject1/scene1/session1/walking": "is empty, in acc_phone_clip",
        "subject1/scene1/session4/walking": "must have 4 columns (time, x, y, z), got 3, in acc_phone_clip",
        "subject1/scene1/session5/walking": reason(data, "subject1/scene1/session5/walking"),
        f"{phone}/session1/flying.csv": "must be named after one of the 35 activities, got 'flying'",
        f"{phone}/session1/carrying_light.csv": "differs only in case from CARRYING_LIGHT.csv",
        f"{phone}/walking.csv": "is not in subjectN/sceneN/sessionN",
        "subject2/scene1/session1/walking": "has no file in gyro_clip",
        "subject2/scene1/session4/walking": reason(data, "subject2/scene1/session4/walking"),
    }
    assert "numbers or dates" in reason(data, "subject1/scene1/session5/walking")
    assert "overlap in time, got one that begins 27.51 s after" in reason(data, "subject2/scene1/session4/walking")


def test_mmact_without_its_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"root .* acc_phone_clip or acc_watch_clip or gyro_clip"):
        mmact.find_recordings(tmp_path, None)
    with pytest.raises(DamagedFileError, match=r"walking\.csv has no file in acc_phone_clip"):
        read_recording(tmp_path / "gyro_clip/subject1/scene1/session1/walking.csv", source="MMAct")


# MotionSense


def subjects(data, split: str) -> set:
    return {recording.subject for recording in data.recordings if recording.split == split}


@pytest.mark.parametrize("nested", [False, True])
def test_motionsense_by_subject(tmp_path, nested):
    folder = trees.motionsense(tmp_path)
    data = load("motionsense", tmp_path if nested else folder)
    assert data.config.split == "subject"
    assert data.rate == 50.0
    assert data.lost == []
    assert {data.classes[recording.label] for recording in data.recordings} == {"downstairs", "jogging"}
    groups = [subjects(data, split) for split in ("train", "validation", "test")]
    assert set.union(*groups) == {"1", "2", "3", "4", "5"}
    assert sum(map(len, groups)) == 5


def test_motionsense_by_trial(tmp_path):
    trees.motionsense(tmp_path)
    data = load("motionsense", tmp_path, split="trial")
    for recording in data.recordings:
        assert (recording.split == "test") == (recording.name.split("/")[1] in ("dws_11", "jog_16"))
    assert len(subjects(data, "test")) == 5
    assert not subjects(data, "train") & subjects(data, "validation")


def test_motionsense_adds_gravity(tmp_path):
    path = trees.motionsense(tmp_path) / "dws_1" / "sub_2.csv"
    raw = np.loadtxt(path, delimiter=",", skiprows=1)
    x = read_recording(path, rate=50, source="motionsense")
    assert np.allclose(x[:, :3], raw[:, 4:7] + raw[:, 10:13], atol=1e-5)
    assert np.allclose(x[:, 3:], raw[:, 7:10], atol=1e-5)
    gyro = motionsense.read_file(path, ("gyro_z", "acc_x"))
    assert gyro.channels == ("gyro_z", "acc_x")
    assert np.array_equal(gyro.samples, x[:, [5, 0]])


def test_motionsense_names_damaged_files(tmp_path):
    folder = trees.motionsense(tmp_path)
    text = (folder / "dws_1" / "sub_1.csv").read_text()
    trees.write(folder / "dws_1" / "sub_1.csv", "")
    trees.write(folder / "dws_1" / "sub_2.csv", text.replace("gravity.x", "gravity.w"))
    trees.write(folder / "dws_1" / "sub_3.csv", text + "60" + ",nan" * 12 + "\n")
    for name in ("fly_1/sub_1.csv", "dws_x/sub_1.csv", "dws_1/subject_1.csv", "sub_9.csv"):
        trees.write(folder / name, text)
    data = load("motionsense", tmp_path)
    assert len(data.lost) == 7
    base = "A_DeviceMotion_data"
    assert reason(data, f"{base}/dws_1/sub_1.csv") == "is empty"
    assert reason(data, f"{base}/dws_1/sub_2.csv").startswith("must have the column 'gravity.x'")
    assert "got nan in row 61" in reason(data, f"{base}/dws_1/sub_3.csv")
    for name, got in (("fly_1/sub_1", "'fly_1'"), ("dws_x/sub_1", "'dws_x'"), ("sub_9", repr(base))):
        assert reason(data, f"{base}/{name}.csv").endswith(f"with the number of a trial, got {got}")
    assert reason(data, f"{base}/dws_1/subject_1.csv").startswith("must be named sub_N.csv after its subject")


# UCI HAR


def test_uci_har_splits_by_the_published_lists(tmp_path):
    trees.uci_har(tmp_path)
    data = load("uci-har", tmp_path)
    assert data.config.split == "given"
    assert data.lost == []
    assert data.rate == 50.0
    assert len(data.recordings) == 15
    assert {data.classes[recording.label] for recording in data.recordings} == {"walking", "sitting", "laying"}
    assert subjects(data, "test") == {"4", "5"}
    assert subjects(data, "train") | subjects(data, "validation") == {"1", "2", "3"}


def test_uci_hapt_has_transitions(tmp_path):
    trees.uci_har(tmp_path)
    data = load("uci-hapt", tmp_path / "RawData")
    assert len(data.classes) == 12
    assert len(data.recordings) == 20
    assert "sit_to_lie" in {data.classes[recording.label] for recording in data.recordings}


def test_uci_har_segments_are_samples_of_the_experiment(tmp_path):
    trees.uci_har(tmp_path)
    listing = uci_har.SOURCE.find_recordings(tmp_path, None)
    walking, sitting = (listing.read(recording) for recording in listing.recordings[:2])
    raw = [np.loadtxt(tmp_path / "RawData" / f"{sensor}_exp01_user01.txt") for sensor in ("acc", "gyro")]
    assert np.allclose(np.concatenate([walking.samples, sitting.samples]), np.column_stack(raw)[:160], atol=1e-6)
    whole = read_recording(tmp_path / "RawData" / "gyro_exp01_user01.txt", rate=50, source="uci-har")
    assert np.allclose(whole, np.column_stack(raw), atol=1e-5)


def test_uci_har_without_its_lists_has_no_given_split(tmp_path):
    trees.uci_har(tmp_path)
    (tmp_path / "Test" / "subject_id_test.txt").unlink()
    assert len(load("uci-har", tmp_path, split="subject").recordings) == 15
    with pytest.raises(ValueError, match=r"split must be one of subject, kfold .* got 'given'"):
        load("uci-har", tmp_path)


def test_uci_har_names_damaged_files(tmp_path):
    trees.uci_har(tmp_path, subjects=15)
    raw = tmp_path / "RawData"
    (raw / "gyro_exp01_user01.txt").unlink()
    trees.write(raw / "acc_exp02_user02.txt", "1 2 3\n1 2\n")
    trees.write(raw / "gyro_exp03_user03.txt", "1 2 3\n1 2 x\n")
    trees.write(raw / "acc_exp04_user04.txt", "1 2 3\n1 2 3\n")
    with (raw / "labels.txt").open("a") as file:
        file.write("nonsense\n\n5 5 13 1 9\n5 5 1 9 9\n5 5 1 1 80\n5 5 1 200 241\n99 99 1 1 80\n")
    data = load("uci-har", tmp_path, split="kfold")
    names = {1: "gyro_exp01_user01.txt", 2: "acc_exp02_user02.txt", 3: "gyro_exp03_user03.txt"}
    wanted = {
        1: f"must have the files of both sensors, got no {names[1]}",
        2: f"must have 3 columns (x, y, z), got 2 in row 2, in {names[2]}",
        3: f"must have finite numbers in column 'z', got 'x' in row 2, in {names[3]}",
        4: "must have as many samples of both sensors, got 2 and 240",
    }
    for experiment, text in wanted.items():
        assert reason(data, f"acc_exp{experiment:02d}_user{experiment:02d}.txt, samples 1 to 80") == text
    assert reason(data, "labels.txt, line 61").startswith("must have five numbers")
    assert reason(data, "labels.txt, line 63") == "must have an activity from 1 to 12, got 13"
    assert reason(data, "labels.txt, line 64") == "must have a first sample before the last, got 9 and 9"
    assert reason(data, "labels.txt, line 65") == "repeats line 17"
    assert reason(data, "acc_exp05_user05.txt, samples 200 to 241").endswith("the 240 of the experiment, got 241")
    assert reason(data, "acc_exp99_user99.txt, samples 1 to 80").endswith("got no acc_exp99_user99.txt")
    assert len(data.lost) == 4 * 3 + 6


def test_uci_har_needs_its_labels_and_sound_lists(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"root .*RawData/labels\.txt"):
        uci_har.SOURCE.find_recordings(tmp_path, None)
    trees.uci_har(tmp_path)
    for text, got in (("4\n1\n", "line 2, got '1'"), ("4\nx\n", "line 2, got 'x'")):
        trees.write(tmp_path / "Test" / "subject_id_test.txt", text)
        with pytest.raises(ValueError, match=rf"subject_id_test\.txt must have .* {got}"):
            uci_har.SOURCE.find_recordings(tmp_path, None)


# UTD-MHAD


def test_utd_mhad_splits_by_odd_and_even_subjects(tmp_path):
    trees.utd_mhad(tmp_path)
    data = load("utd-mhad", tmp_path, mode="clips")
    assert data.config.split == "cross-subject"
    assert data.lost == []
    assert len(data.recordings) == 32
    assert len(data.classes) == len(set(data.classes)) == 27
    assert subjects(data, "test") == {"2", "4", "6", "8"}
    assert subjects(data, "train") | subjects(data, "validation") == {"1", "3", "5", "7"}
    assert not subjects(data, "train") & subjects(data, "validation")
    assert {data.classes[recording.label] for recording in data.recordings} == {"swipe_left", "squat"}


@pytest.mark.parametrize("compressed", [True, False])
def test_utd_mhad_reads_a_file(tmp_path, compressed):
    path = trees.utd_mhad(tmp_path, subjects=1, compressed=compressed) / "a1_s1_t1_inertial.mat"
    x = read_recording(path, rate=50, source="utd-mhad")
    assert np.allclose(x, trees.waves(41, seed=111), atol=1e-5)


def test_utd_mhad_names_damaged_files(tmp_path):
    folder = trees.utd_mhad(tmp_path)
    good = (folder / "a1_s1_t1_inertial.mat").read_bytes()
    columns, numbers = {"d_iner": np.ones((9, 5))}, {"d_iner": np.full((9, 6), np.nan)}
    savemat(folder / "a1_s1_t2_inertial.mat", columns)
    savemat(folder / "a1_s2_t1_inertial.mat", numbers)
    (folder / "a1_s2_t2_inertial.mat").write_bytes(good[:-20])
    for name in ("a28_s1_t1", "a0_s1_t1", "b1_s1_t1"):
        (folder / f"{name}_inertial.mat").write_bytes(good)
    data = load("utd-mhad", folder, mode="clips")
    assert len(data.lost) == 6
    assert reason(data, "a1_s1_t2_inertial.mat").startswith("must have 6 columns in 'd_iner' (acc_x")
    assert "finite float32 numbers in column 'acc_x', got nan" in reason(data, "a1_s2_t1_inertial.mat")
    assert "got an element that ends 20 bytes after the file" in reason(data, "a1_s2_t2_inertial.mat")
    assert reason(data, "a28_s1_t1_inertial.mat") == "must have an action from 1 to 27 in its name, got 28"
    assert reason(data, "a0_s1_t1_inertial.mat") == "must have an action from 1 to 27 in its name, got 0"
    assert reason(data, "b1_s1_t1_inertial.mat").startswith("must be named like a1_s2_t3_inertial.mat")


def mat_file(path, compress=False, **variables) -> bytes:
    savemat(path, variables, do_compression=compress)
    return path.read_bytes()


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data


def test_matrices_in_matlab_files(tmp_path):
    """Integers are stored in few bytes, and other variables do not matter."""
    path = tmp_path / "x.mat"
    mat_file(path, True, text="abc", cell=np.array(["a", 1], dtype=object), x=np.arange(6.0).reshape(2, 3))
    assert np.array_equal(read_matrix(path, "x"), np.arange(6.0).reshape(2, 3))
    content = mat_file(path, x=np.zeros((1, 8)))
    head, numbers = content[:-72], element(9, bytes(64))
    assert content[-72:] == numbers
    matrix = head[HEADER + 8 :] + element(2, bytes(range(8)))  # eight doubles as bytes, as MATLAB writes them
    path.write_bytes(content[:HEADER] + element(14, matrix))
    assert np.array_equal(read_matrix(path, "x"), np.arange(8.0)[None])


def test_matlab_files_that_do_harm_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.mat"
    for variables, message in (
        ({"y": np.ones((2, 2))}, "must have the variable 'x', got 'y'"),
        ({"x": "abc"}, "a matrix of numbers as 'x', got char"),
        ({"x": np.ones((2, 2, 2))}, r"a matrix of numbers as 'x', got double of sizes \(2, 2, 2\)"),
        ({"x": np.ones((2, 2)) * 1j}, "real numbers as 'x', got complex128"),
        ({"x": np.array([[1, "a"]], dtype=object)}, "a matrix of numbers as 'x', got cell"),
    ):
        mat_file(path, **variables)
        with pytest.raises(DamagedFileError, match=message):
            read_matrix(path, "x")
    monkeypatch.setattr("muonssm.lab.activity.mat_files.MAX_BYTES", 100_000)
    content = mat_file(path, x=np.ones((20, 20)))
    header, plain = content[:HEADER], content[HEADER:]
    sizes = plain.replace(struct.pack("<II", 20, 20), struct.pack("<II", 2**30, 2**30))
    bomb = element(15, zlib.compress(bytes(1_000_000)))
    twice = element(15, zlib.compress(element(15, zlib.compress(plain))))
    for damaged, message in (
        (b"", "must be a MATLAB 5 file, got one that begins with b''"),
        (b"MATLAB 7.3 and more" * 20, "must be a MATLAB 5 file"),
        (header, "must have the variable 'x', got none"),
        (header + sizes, r"got double of sizes \(1073741824, 1073741824\)"),
        (header + plain + b"abc", "got 3 bytes after the last one"),
        (header + element(15, b"not zlib"), "compressed by zlib"),
        (header + element(15, zlib.compress(plain)[:-9]), "a part of a compressed element"),
        (header + twice, "compressed twice"),
        (header + bomb, "MAX_BYTES"),
        (header + sizes + plain, "must have every variable once"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFileError, match=message):
            read_matrix(path, "x")


@pytest.mark.parametrize("source", ["motionsense", "uci-har", "utd-mhad"])
def test_an_empty_folder_is_no_data_set(tmp_path, source):
    with pytest.raises(FileNotFoundError, match=r"root must be a folder with"):
        load(source, tmp_path)


# files that do harm


def test_one_bad_file_is_listed_whatever_it_is(tmp_path):
    """A pipe would wait forever, a device never ends: neither is opened."""
    rows = trees.folder(tmp_path)
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    (tmp_path / "folder.csv").mkdir()
    trees.write(tmp_path / "times.csv", "time,ax,ay\n0,1,1\n1e300,1,1\n2e300,1,1\n")
    trees.write(tmp_path / "line.csv", "time,ax,ay\n0,1," + "1" * 6_000_000 + "\n")
    long = "n" * 300
    bad = ["pipe", "loop", "device", "folder", "times", "line", long]
    trees.index(tmp_path, [*rows, *(f"{name}.csv,run,p{i % 5}" for i, name in enumerate(bad))])
    data = load("folder", tmp_path, split="kfold")
    assert len(data.recordings) == 20
    assert reason(data, "pipe.csv") == "must be a regular file, got a pipe"
    assert "Too many levels of symbolic links" in reason(data, "loop.csv")
    assert reason(data, "device.csv") == "must be a regular file, got a device"
    assert reason(data, "folder.csv") == "must be a regular file, got a folder"
    assert "'time', got 1e+300" in reason(data, "times.csv")
    assert "MAX_LINE" in reason(data, "line.csv")
    assert "File name too long" in reason(data, f"{long}.csv")
    assert len(data.lost) == 7


LAYOUTS = {
    "MuWiGes": (trees.muwiges, "*.csv", 1),
    "MMAct": (trees.mmact, "*.csv", 1),
    "UESTC-MMEA-CL": (trees.uestc, "*.csv", 1),
    "motionsense": (trees.motionsense, "*.csv", 1),
    "utd-mhad": (trees.utd_mhad, "*.mat", 1),
    "uci-har": (trees.uci_har, "gyro_*.txt", 3),  # the segments of one file
}


@pytest.mark.parametrize("source", LAYOUTS)
def test_other_layouts_never_open_a_pipe(tmp_path, source):
    write, pattern, count = LAYOUTS[source]
    write(tmp_path)
    path = sorted(path for path in tmp_path.rglob(pattern))[0]
    path.unlink()
    os.mkfifo(path)
    settings = {"split": "cross-subject"} if source == "MMAct" else {}
    lost = load(source, tmp_path, **settings).lost
    assert len(lost) == count
    assert all("must be a regular file, got a pipe" in why for _, why in lost)


def test_sensors_whose_clocks_are_centuries_long_are_listed(tmp_path):
    trees.mmact(tmp_path)
    for sensor in trees.SENSORS:
        path = tmp_path / sensor / "subject1" / "scene1" / "session1" / "walking.csv"
        path.write_text("0001-01-01T00:00:00,1,1,1\n0001-01-01T00:00:01,1,1,1\n9000-01-01T00:00:00,1,1,1\n")
    data = load("MMAct", tmp_path)
    assert "MAX_GROWTH" in reason(data, "subject1/scene1/session1/walking")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('path,label\na.csv,"walk\ning"\n', "index.csv must have no line break in a quoted cell, got one in row 2"),
        ("path,label,label\na.csv,walk,run\n", "index.csv must have every column once, got 'label' 2 times"),
        ("path,label\na.csv,\x1b[31mwalk\n", "label must have no control characters in .*index.csv.* in row 2"),
        ("path,label\na.csv,walk\0\n", "index.csv must be UTF-8 text, got a zero"),
        ("path,label\na.csv,w\n" + "x" * 2_000_000 + ",w\n", "index.csv must have lines of .*MAX_LINE"),
    ],
)
def test_damaged_indices_are_refused(tmp_path, text, message):
    trees.write(tmp_path / "index.csv", text)
    with pytest.raises(ValueError, match=message):
        folder.find_recordings(tmp_path, None)


def test_damaged_lists_are_refused_or_listed(tmp_path):
    trees.uestc(tmp_path)
    with open(tmp_path / "val.txt", "a") as file:
        file.write(f"a/1_up/x 1 1 {'9' * 5000}\na/{'1' * 5000}_up/x 1 1 0\n")
    lost = dict(uestc.find_recordings(tmp_path, None).lost)
    assert len(lost) == 2
    assert "path, frames, samples and a label" in lost["val.txt, line 3"]
    assert "an activity's number" in lost["val.txt, line 4"]
    (tmp_path / "val.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"val.txt must be UTF-8 text, got byte 0"):
        uestc.find_recordings(tmp_path, None)
