"""The reader of `paper.toml` files."""

from __future__ import annotations

from pathlib import Path

import pytest

from muonssm.lab.core.paper import read_table, scores_by_variant

ROWS = """
[[objects]]
source = "a"
variant = "plain"
accuracy = 1.5
[[objects]]
source = "a"
variant = "muon"
accuracy = 2.5
[[objects]]
source = "b"
variant = "muon"
accuracy = 3.5
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "paper.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_are_selected_by_their_labels(tmp_path: Path) -> None:
    rows = read_table(_write(tmp_path, ROWS))["objects"]
    assert scores_by_variant(rows, source="a") == {"plain": {"accuracy": 1.5}, "muon": {"accuracy": 2.5}}
    assert scores_by_variant(rows, source="c") == {}


def test_labels_must_tell_rows_apart(tmp_path: Path) -> None:
    rows = read_table(_write(tmp_path, ROWS))["objects"]
    with pytest.raises(ValueError, match="labels"):
        scores_by_variant(rows)


@pytest.mark.parametrize(
    ("text", "error", "name"),
    [
        ("objects = 3", TypeError, "objects"),
        ('[[objects]]\nvariant = "mouon"', ValueError, "variant"),
        ("[[objects]]\naccuracy = 1.0", ValueError, "variant"),
        ('[[objects]]\nvariant = "muon"\naccuracy = 1', TypeError, "accuracy"),
    ],
)
def test_malformed_rows_are_refused(tmp_path: Path, text: str, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        read_table(_write(tmp_path, text))
