"""Reading files of others: regular files alone, limits that errors name, and text that is text."""

from __future__ import annotations

import os
import socket

import pytest

from muonssm.lab.core import untrusted
from muonssm.lab.core.untrusted import (
    UntrustedFileError,
    check_regular_file,
    read_bytes,
    read_json,
    read_lines,
    read_text,
)


def irregular(folder):
    """What can have the name of a file without being one, and what the error says."""
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "device").symlink_to("/dev/zero")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket"))
    return {
        "fifo": "got a pipe",
        "loop": "got an error: Too many levels of symbolic links",
        "device": "got a device",
        "folder": "got a folder",
        "socket": "got a socket",
        "a" * 300: "got an error: File name too long",
        "zero\0": "got an error: embedded null",
    }


def test_what_is_no_regular_file_is_never_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    for name, reason in irregular(tmp_path.relative_to(tmp_path)).items():
        with pytest.raises(UntrustedFileError, match="must be a regular file") as caught:
            read_bytes(name)
        assert str(caught.value).startswith(f"{name} must be a regular file")
        assert reason in caught.value.reason


def test_a_file_that_takes_the_place_of_another_is_checked_again(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("x")
    status = check_regular_file(path)
    path.unlink()
    os.mkfifo(path)
    monkeypatch.setattr(untrusted, "check_regular_file", lambda path: status)
    with pytest.raises(UntrustedFileError, match="got a pipe"):
        read_bytes(path)


def test_links_to_files_and_missing_files(tmp_path):
    (tmp_path / "a").write_bytes(b"\x00\xff")
    (tmp_path / "link").symlink_to("a")
    assert read_bytes(tmp_path / "link") == b"\x00\xff"
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("gone", "dangling"):
        with pytest.raises(FileNotFoundError, match=name):
            read_bytes(tmp_path / name)


def test_limits_are_named(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("abcd\nefghij\n")
    with pytest.raises(UntrustedFileError, match=r"a.txt must have 11 bytes or less \(HERE.X\), got 12"):
        read_bytes(path, 11, "HERE.X")
    assert read_bytes(path, 12) == b"abcd\nefghij\n"
    monkeypatch.setattr(untrusted, "MAX_LINE", 5)
    with pytest.raises(UntrustedFileError, match=r"5 characters or less \(.*untrusted.MAX_LINE\), got 6 in line 2"):
        read_lines(path)
    monkeypatch.setattr(untrusted, "MAX_BYTES", 11)
    with pytest.raises(UntrustedFileError, match=r"11 bytes or less \(.*untrusted.MAX_BYTES\), got 12"):
        read_lines(path)


def test_a_file_without_a_size_is_refused():
    with pytest.raises(UntrustedFileError, match="must keep its size while it is read"):
        read_bytes("/proc/self/status")


def test_text_is_utf_8_without_zeros(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\x0b\n")
    assert read_text(path) == "one\ntwo\nthree\x0b\n"
    assert read_lines(path) == ["one", "two", "three\x0b", ""]
    for content, reason in ((b"ab\xff", "got byte 2"), (b"ab\x00", "got a zero at character 2")):
        path.write_bytes(content)
        with pytest.raises(UntrustedFileError, match=f"a.txt must be UTF-8 text, {reason}"):
            read_text(path)


@pytest.mark.parametrize("text", ["{", "[NaN]", "[-Infinity]", "[1e999]", "[" * 100_000, "9" * 5000, ""])
def test_json_is_valid_and_finite(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5]}')
    assert read_json(path) == {"a": [1, 2.5]}
    path.write_text(text)
    with pytest.raises(UntrustedFileError, match=r"a\.json is not valid JSON"):
        read_json(path)
