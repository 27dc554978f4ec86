"""Reading one recording from a CSV file: accepted formats, and the reasons for which a file is refused."""

from __future__ import annotations

import numpy as np
import pytest

from muonssm.lab.activity.csv_files import parse_times, read_cells, read_csv
from muonssm.lab.activity.dataset import read_recording
from muonssm.lab.activity.recordings import DamagedFileError, resample

from .trees import stamps, table, timed, waves, write


def test_a_file_with_header_time_and_channels(tmp_path):
    samples = waves(40, 2)
    signal = read_csv(write(tmp_path / "a.csv", table(timed(samples), "time,ax,ay")))
    assert signal.channels == ("ax", "ay")
    assert signal.samples.dtype == np.float32
    assert np.allclose(signal.samples, samples, atol=1e-6)
    assert np.allclose(signal.times, np.arange(40) / 50)
    assert signal.duplicates == 0


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_delimiters_quotes_blank_lines_and_a_byte_order_mark(tmp_path, delimiter):
    text = '\ufeff"time", ax \n0,1\n\n0.02,"2"\n0.04,3\n'.replace(",", delimiter)
    signal = read_csv(write(tmp_path / "a.csv", text))
    assert signal.channels == ("ax",)
    assert signal.samples[:, 0].tolist() == [1, 2, 3]


def test_without_a_header_every_column_is_a_channel(tmp_path):
    path = write(tmp_path / "a.csv", "1,2\n3,4\n5,6\n")
    assert read_csv(path).channels == ("x0", "x1")
    assert read_csv(path).times is None
    assert read_csv(path, ("ax", "ay")).channels == ("ax", "ay")
    signal = read_csv(path, ("ax",))
    assert signal.times.tolist() == [1, 3, 5]
    assert signal.samples[:, 0].tolist() == [2, 4, 6]


def test_channels_are_selected_in_the_given_order(tmp_path):
    path = write(tmp_path / "a.csv", "t,ax,ay,note\n0,1,2,x\n1,3,4,y\n")
    assert read_csv(path, ("ay", "ax")).samples.tolist() == [[2, 1], [4, 3]]


@pytest.mark.parametrize(
    ("column", "scale"),
    [("time", 1), ("t", 1), ("Time_ms", 1e3), ("timestamp (us)", 1e6), ("ts_ns", 1e9), ("time[s]", 1)],
)
def test_units_of_time(tmp_path, column, scale):
    rows = np.column_stack([np.arange(10) * 0.02 * scale, np.arange(10)])
    signal = read_csv(write(tmp_path / "a.csv", table(rows, f"{column},ax")))
    assert signal.channels == ("ax",)
    assert np.allclose(np.diff(signal.times), 0.02)


def test_dates_with_and_without_a_fraction():
    texts = stamps(120, 50, start=59.0)
    assert "20180423_15:01:00" in texts
    assert np.allclose(np.diff(parse_times(np.array(texts))), 0.02, atol=1e-6)
    iso = np.array(["2018-04-23T15:00:00Z", "2018-04-23T15:00:00.5+02:00", "2018-04-23 15:00:01"])
    assert np.diff(parse_times(iso)).tolist() == [0.5, 0.5]


def test_time_is_sorted_and_duplicates_are_counted(tmp_path):
    path = write(tmp_path / "a.csv", "time,ax\n0.04,3\n0,1\n0.02,2\n0.02,9\n0.06,4\n0,8\n")
    signal = read_csv(path)
    assert signal.samples[:, 0].tolist() == [1, 2, 3, 4]
    assert signal.duplicates == 2


DAMAGED = {
    "empty": ("", "empty"),
    "blank": ("\n \n", "empty"),
    "header alone": ("time,ax\n", "no rows"),
    "one sample": ("time,ax\n0,1\n", "2 or more samples .* got 1"),
    "one time": ("time,ax\n0,1\n0,2\n", "2 or more samples .* got 1"),
    "nan": ("time,ax\n0,1\n1,nan\n2,3\n", "'ax', got nan in row 2"),
    "infinite": ("time,ax\n0,1\n1,2\n2,-inf\n", "'ax', got -inf in row 3"),
    "missing cell": ("time,ax,ay\n0,1,2\n1,,3\n", "'ax', got '' in row 2"),
    "text in a cell": ("time,ax\n0,1\n1,abc\n", "'ax', got 'abc' in row 2"),
    "ragged": ("time,ax\n0,1\n1,2,3\n", "columns changed from 2 to 3 at row 3"),
    "nan time": ("time,ax\n0,1\nnan,2\n1,3\n", "'time', got nan in row 2"),
    "text time": ("time,ax\nsoon,1\nlater,2\n", "time stamps, got 'soon'"),
    "missing date": ("time,ax\n20180423_15:00:00,1\n,2\n", "no time stamp in row 2"),
    "no channels": ("time\n0.5\n1\n", "channels, got time"),
    "no name": (",time,ax\n0,0,1\n1,1,1\n", "unique name .* got ''"),
    "repeated name": ("time,ax,ax\n0,0,1\n1,1,1\n", "unique name .* got 'ax'"),
    "two time columns": ("time,ts,ax\n0,0,1\n1,1,1\n", "one time column, got time, ts"),
    "wrong unit": ("time,ax\n" + "".join(f"{20 * i},1\n" for i in range(9)), "got 9 .* 160 s.* 8001 samples at 50 Hz"),
    "too short": ("time,ax\n0,1\n0.001,2\n", "2 samples .* at 50 Hz, got 0.001 s"),
}


@pytest.mark.parametrize("case", DAMAGED, ids=str)
def test_damaged_files_say_why(tmp_path, case):
    text, reason = DAMAGED[case]
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(DamagedFileError, match=reason):
        resample(read_csv(path), 50.0)
    with pytest.raises(DamagedFileError, match=rf"a\.csv .*{reason}"):
        read_recording(path, rate=50.0)


def test_a_binary_file_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"time,ax\n\xff\xfe\x00")
    with pytest.raises(DamagedFileError, match="UTF-8 text, got byte 8"):
        read_cells(tmp_path / "a.csv")


def test_selected_columns_must_exist(tmp_path):
    named = write(tmp_path / "a.csv", "time,ax\n0,1\n1,2\n")
    with pytest.raises(DamagedFileError, match="'gx', got time, ax"):
        read_csv(named, ("ax", "gx"))
    bare = write(tmp_path / "b.csv", "0,1,2,3\n1,2,3,4\n")
    with pytest.raises(DamagedFileError, match=r"2 columns \(ax, gx\).* got 4"):
        read_csv(bare, ("ax", "gx"))
    with pytest.raises(DamagedFileError, match="'gx', got ax"):
        read_csv(named).select(("gx",))


def test_read_recording_resamples_any_csv(tmp_path):
    samples = waves(101, 2, rate=100)
    path = write(tmp_path / "a.csv", table(timed(samples, 100), "time,ax,ay"))
    assert read_recording(path).shape == (101, 2)
    half = read_recording(str(path), channels=["ay"], rate=50)
    assert half.shape == (51, 1)
    assert half.dtype == np.float32
    assert np.allclose(half[:, 0], samples[::2, 1], atol=1e-5)


def test_read_recording_checks_its_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"source .* got 'walks'"):
        read_recording(tmp_path / "a.csv", source="walks")
    with pytest.raises(FileNotFoundError):
        read_recording(tmp_path / "a.csv")


HOSTILE = {
    "beyond float32": ("time,ax\n0,1\n1,1e39\n2,3\n", r"'ax', got 1e\+39 \(float32 ends at 3.4e38\) in row 2"),
    "times of 1e300": ("time,ax\n0,1\n1e300,2\n2e300,3\n", r"'time', got 1e\+300 .* in row 2"),
    "times of 1e30": ("time,ax\n0,1\n1,5\n2,5\n1e30,2\n", r"got 4 of them over 1e\+30 s.* \(.*MAX_GROWTH is 100\)"),
    "tiny steps": ("time,ax\n0,1\n1e-320,2\n2e-320,3\n", r"time step of 1e-09 s or more \(.*MAX_RATE\), got"),
    "a long line": (
        "time,ax\n0,1\n1," + "0" * 6_000_000 + "1\n",
        r"1000000 characters .*MAX_LINE\), got 6000",
    ),
    "a break in quotes": ('time,ax\n0,1\n1,"2\n3"\n2,3\n', "no line break in a quoted cell, got one in row 3"),
    "an open quote": ('time,ax\n0,1\n1,"2', "no line break in a quoted cell, got one in row 3"),
    "the present": ("time,ax\nnow,1\ntoday,2\n", "numbers or dates as time stamps, got 'now'"),
    "a late year": ("time,ax\n2018-04-23T15:00:00,1\n9999999999-01-01T00:00:00,2\n", "time stamps"),
    "a number of Python": ("time,ax\n0,1\n1,1_5\n2,3\n", "'ax', got '1_5' in row 2"),
    "a zero": ("time,ax\n0,1\n1,2\0\n", "UTF-8 text, got a zero at character 15"),
}


@pytest.mark.parametrize("case", HOSTILE, ids=str)
@pytest.mark.parametrize("rate", [50.0, None])
def test_hostile_files_say_why(tmp_path, case, rate):
    text, reason = HOSTILE[case]
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(DamagedFileError, match=rf"a\.csv .*{reason}"):
        read_recording(path, rate=rate)


def test_the_number_of_samples_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr("muonssm.lab.activity.recordings.MAX_SAMPLES", 90)
    path = write(tmp_path / "a.csv", table(timed(waves(90, 1)), "time,ax"))
    assert len(read_recording(path, rate=50.0)) == 90
    with pytest.raises(DamagedFileError, match=r"90 samples or less at 100 Hz \(.*MAX_SAMPLES\), got 179"):
        read_recording(path, rate=100.0)


def test_one_long_cell_does_not_make_all_cells_long(tmp_path):
    cells = read_cells(write(tmp_path / "a.csv", "a,b\n" + "1,2\n" * 9 + "3," + "4" * 900_000 + "\n"))[1]
    assert cells.dtype == object
    assert len(cells[9, 1]) == 900_000


def test_the_largest_float32_is_accepted(tmp_path):
    path = write(tmp_path / "a.csv", "ax\n3.4028234663852886e38\n-3.4028234663852886e38\n")
    assert np.isfinite(read_recording(path)).all()
