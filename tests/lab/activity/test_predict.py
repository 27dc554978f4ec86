"""`predict` and `stream` on files and pipes, through the command line."""

from __future__ import annotations

import io

import pytest

from muonssm.cli import main


@pytest.fixture(scope="module")
def run(tmp_path_factory, changes):
    output = tmp_path_factory.mktemp("runs") / "run"
    command = ["train", "folder", "--output", str(output)]
    for change in [*changes, "training.epochs=1"]:
        command += ["--set", change]
    assert main(command) == 0
    return output


@pytest.mark.slow
def test_predict_and_stream_agree(run, recordings, capsys, monkeypatch):
    file = recordings / "0-fast-0.csv"
    assert main(["predict", str(run), str(file)]) == 0
    predicted = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in predicted] == ["0", "24", "48", "72", "96"]
    assert main(["stream", str(run), str(file)]) == 0
    streamed = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in streamed] == [line.split()[:5] for line in predicted]
    assert all("us a sample" in line for line in streamed)
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text()))
    assert main(["stream", str(run), "-"]) == 0
    piped = capsys.readouterr()
    assert [line.split()[:5] for line in piped.out.splitlines()] == [line.split()[:5] for line in predicted]
    rows = [line.split(",") for line in file.read_text().splitlines()]
    turned = "\n".join(",".join(["0.5" if i else "time", *row[::-1]]) for i, row in enumerate(rows))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" + turned))  # other order, a time, a blank line: names decide
    assert main(["stream", str(run), "-"]) == 0
    streamed = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in streamed] == [line.split()[:5] for line in predicted]
    assert main(["eval", str(run)]) == 0
    assert "test" in capsys.readouterr().out


@pytest.mark.slow
def test_bad_files_and_folders_say_what_is_wrong(run, tmp_path, capsys, monkeypatch):
    empty = tmp_path / "empty.csv"
    empty.write_text("")
    assert main(["predict", str(run), str(empty)]) == 2
    assert "empty.csv" in capsys.readouterr().err
    assert main(["predict", str(tmp_path), str(empty)]) == 2
    assert "has no recipe.json; it may be the folder of a finished run" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("1,2\n"))
    assert main(["stream", str(run), "-"]) == 2
    assert "sample 0 has 2 numbers; it may have 3: acc_x, acc_y, acc_z" in capsys.readouterr().err
    for line in ("1,b,3", "1,nan,3"):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"1,2,3\n{line}\n"))
        assert main(["stream", str(run), "-"]) == 2
        assert f"a line is {line!r}; it may be finite numbers separated by commas" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("1,2,3\n4,5,6\n"))
    assert main(["stream", str(run), "-"]) == 2
    assert "2 samples came" in capsys.readouterr().err  # fewer than a window: nothing could be said of them
    monkeypatch.setattr("sys.stdin", io.StringIO("acc_x,acc_y\n"))
    assert main(["stream", str(run), "-"]) == 2
    assert "the first line lacks acc_z; it may name acc_x, acc_y, acc_z" in capsys.readouterr().err
    assert main(["predict", str(run), str(tmp_path)]) == 2
    assert main(["train", "folder", "--set", f"data.root={tmp_path}", "--output", str(empty)]) == 2
