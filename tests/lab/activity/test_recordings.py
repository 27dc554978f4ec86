"""Reading one recording: what is accepted, what is refused and why, and one rate out of any time stamps."""

from __future__ import annotations

import numpy as np
import pytest

from muonssm.lab.activity.dataset import read_recording
from muonssm.lab.activity.recordings import DamagedFileError, even, own_rate, read_csv, read_table, seconds, signal

from .trees import stamps, table, timed, waves, write


def test_a_file_with_header_time_and_channels(tmp_path):
    samples = waves(40, 2)
    recorded = read_csv(write(tmp_path / "a.csv", table(timed(samples), "time,ax,ay")))
    assert recorded.channels == ("ax", "ay")
    assert recorded.samples.dtype == np.float32
    assert np.allclose(recorded.samples, samples, atol=1e-6)
    assert np.allclose(recorded.times, np.arange(40) / 50)
    assert recorded.duplicates == 0


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_quotes_blank_lines_and_a_byte_order_mark(tmp_path, delimiter):
    text = '\ufeff"time", ax \n0,1\n\n0.02,"2"\n0.04,3\n'.replace(",", delimiter)
    recorded = read_csv(write(tmp_path / "a.csv", text))
    assert recorded.channels == ("ax",)
    assert recorded.samples[:, 0].tolist() == [1, 2, 3]


def test_without_a_header_every_column_is_a_channel(tmp_path):
    path = write(tmp_path / "a.csv", "1,2\n3,4\n5,6\n")
    assert read_csv(path).channels == ("x0", "x1")
    assert read_csv(path).times is None
    assert read_csv(path, ("ax", "ay")).channels == ("ax", "ay")
    recorded = read_csv(path, ("ax",))
    assert recorded.times.tolist() == [1, 3, 5]
    assert recorded.samples[:, 0].tolist() == [2, 4, 6]


def test_channels_are_picked_in_the_order_asked_for(tmp_path):
    path = write(tmp_path / "a.csv", "t,ax,ay,note\n0,1,2,x\n1,3,4,y\n")
    assert read_csv(path, ("ay", "ax")).samples.tolist() == [[2, 1], [4, 3]]


@pytest.mark.parametrize(
    ("column", "scale"),
    [("time", 1), ("t", 1), ("Time_ms", 1e3), ("timestamp (us)", 1e6), ("ts_ns", 1e9), ("time[s]", 1)],
)
def test_units_of_time(tmp_path, column, scale):
    rows = np.column_stack([np.arange(10) * 0.02 * scale, np.arange(10)])
    recorded = read_csv(write(tmp_path / "a.csv", table(rows, f"{column},ax")))
    assert recorded.channels == ("ax",)
    assert np.allclose(np.diff(recorded.times), 0.02)


def test_dates_with_and_without_a_fraction():
    texts = stamps(120, 50, start=59.0)
    assert "20180423_15:01:00" in texts
    assert np.allclose(np.diff(seconds(np.array(texts))), 0.02, atol=1e-6)
    iso = np.array(["2018-04-23T15:00:00Z", "2018-04-23T15:00:00.5+02:00", "2018-04-23 15:00:01"])
    assert np.diff(seconds(iso)).tolist() == [0.5, 0.5]


def test_time_is_sorted_and_duplicates_are_counted(tmp_path):
    path = write(tmp_path / "a.csv", "time,ax\n0.04,3\n0,1\n0.02,2\n0.02,9\n0.06,4\n0,8\n")
    recorded = read_csv(path)
    assert recorded.samples[:, 0].tolist() == [1, 2, 3, 4]
    assert recorded.duplicates == 2


def test_a_sine_at_ragged_times_comes_out_even():
    """Linear interpolation of a curve with |f''| <= w^2 over steps <= h is within w^2 h^2 / 8."""
    generator = np.random.default_rng(0)
    times = np.sort(generator.uniform(0, 10, 4000))
    times[[0, -1]] = 0, 10
    recorded = signal(np.sin(2 * np.pi * times)[:, None], times, ("ax",))
    out = even(recorded, 50.0)
    assert out.shape == (501, 1)
    assert out.dtype == np.float32
    bound = (2 * np.pi * np.diff(times).max()) ** 2 / 8
    assert np.abs(out[:, 0] - np.sin(2 * np.pi * np.arange(501) / 50)).max() < bound + 1e-6


def test_samples_at_the_rate_already_stay_as_they_are():
    samples = waves(333, 3).astype(np.float32)
    start = 1.5e9  # an epoch: differences must not suffer from it
    assert np.allclose(even(signal(samples, start + np.arange(333) / 50, ("a", "b", "c")), 50.0), samples, atol=1e-4)
    assert np.array_equal(even(signal(samples, np.arange(333) / 50, ("a", "b", "c"))), samples)
    assert np.array_equal(even(signal(samples, None, ("a", "b", "c")), 50.0), samples)


def test_half_the_rate_is_every_second_sample():
    samples = waves(101, 2).astype(np.float32)
    assert np.allclose(even(signal(samples, np.arange(101) / 100, ("a", "b")), 50.0), samples[::2], atol=1e-6)


def test_the_own_rate_is_not_moved_by_a_gap():
    times = np.concatenate([np.arange(100) / 50, 7 + np.arange(100) / 50])
    assert own_rate(times) == 50.0


DAMAGED = {
    "empty": ("", "is empty"),
    "blank": ("\n \n", "is empty"),
    "header alone": ("time,ax\n", "has a header and no rows"),
    "one sample": ("time,ax\n0,1\n", "has 1 sample, with repeated times counted once; it takes 2 or more"),
    "one time": ("time,ax\n0,1\n0,2\n", "has 1 sample, with repeated times counted once; it takes 2 or more"),
    "nan": ("time,ax\n0,1\n1,nan\n2,3\n", "has nan in row 2 of 'ax'"),
    "infinite": ("time,ax\n0,1\n1,2\n2,-inf\n", "has -inf in row 3 of 'ax'"),
    "missing cell": ("time,ax,ay\n0,1,2\n1,,3\n", "has '' for a number in row 2 of 'ax'"),
    "garbage": ("time,ax\n0,1\n1,abc\n", "has 'abc' for a number in row 2 of 'ax'"),
    "ragged": ("time,ax\n0,1\n1,2,3\n", "is no table: the number of columns changed from 2 to 3 at row 3"),
    "nan time": ("time,ax\n0,1\nnan,2\n1,3\n", "has nan in row 2 of 'time'"),
    "text time": ("time,ax\nsoon,1\nlater,2\n", "has a time stamp that is neither a number nor a date: .*soon"),
    "missing date": ("time,ax\n20180423_15:00:00,1\n,2\n", "has no time stamp in row 2"),
    "no channels": ("time\n0.5\n1\n", "has no channels; it has time"),
    "nameless": (",time,ax\n0,0,1\n1,1,1\n", "has 1 column called ''; every column needs its own name"),
    "twice": ("time,ax,ax\n0,0,1\n1,1,1\n", "has 2 column called 'ax'; every column needs its own name"),
    "two clocks": ("time,ts,ax\n0,0,1\n1,1,1\n", r"has 2 time columns \(time, ts\); it may have one"),
    "wrong unit": (
        "time,ax\n" + "".join(f"{20 * i},1\n" for i in range(9)),
        "has 9 time stamps over 160 s, which is 8001 samples at 50 Hz; a time column that is not in seconds may be",
    ),
    "too short": ("time,ax\n0,1\n0.001,2\n", "lasts 0.001 s, which is 1 sample at 50 Hz; it takes 2 or more"),
}


@pytest.mark.parametrize("case", DAMAGED, ids=str)
def test_what_is_damaged_is_said(tmp_path, case):
    text, reason = DAMAGED[case]
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(DamagedFileError, match=reason):
        even(read_csv(path), 50.0)
    with pytest.raises(DamagedFileError, match=rf"a\.csv {reason}"):
        read_recording(path, rate=50.0)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"time,ax\n\xff\xfe\x00")
    with pytest.raises(DamagedFileError, match="is not text: its byte 8 is not UTF-8"):
        read_table(tmp_path / "a.csv")


def test_columns_asked_for_must_be_there(tmp_path):
    named = write(tmp_path / "a.csv", "time,ax\n0,1\n1,2\n")
    with pytest.raises(DamagedFileError, match="has no column 'gx'; it has time, ax"):
        read_csv(named, ("ax", "gx"))
    bare = write(tmp_path / "b.csv", "0,1,2,3\n1,2,3,4\n")
    with pytest.raises(DamagedFileError, match=r"has 4 columns and no header; it may have 2 \(ax, gx\), or one more"):
        read_csv(bare, ("ax", "gx"))
    with pytest.raises(DamagedFileError, match="has no column 'gx'; it has ax"):
        read_csv(named).select(("gx",))


def test_read_recording_takes_any_csv_at_any_rate(tmp_path):
    samples = waves(101, 2, rate=100)
    path = write(tmp_path / "a.csv", table(timed(samples, 100), "time,ax,ay"))
    assert read_recording(path).shape == (101, 2)
    half = read_recording(str(path), channels=["ay"], rate=50)
    assert half.shape == (51, 1)
    assert half.dtype == np.float32
    assert np.allclose(half[:, 0], samples[::2, 1], atol=1e-5)


def test_read_recording_refuses_what_it_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="source is 'walks'; it may be one of"):
        read_recording(tmp_path / "a.csv", source="walks")
    with pytest.raises(FileNotFoundError):
        read_recording(tmp_path / "a.csv")
