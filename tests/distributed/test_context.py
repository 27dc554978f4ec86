"""Sequences that are split over processes: outputs, states and gradients are those of one process."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest

from muonssm.distributed import context_parallel
from muonssm.distributed.exchange import neighbors, reaches_the_first, rounds

from .processes import ROOT, run_processes

FUNCTIONS = {
    1: "training",
    2: "rules empty_pieces convolutions traffic errors mixers training",
    3: "rules empty_pieces convolutions traffic odd_calls implementations mixers",
    4: "rules empty_pieces convolutions traffic odd_calls mixers training",
}


@pytest.fixture(scope="module", params=FUNCTIONS)
def counts(request, tmp_path_factory):
    """Run everything that a number of processes is tested with, once: starting them takes longest."""
    return run_processes(FUNCTIONS[request.param], request.param, tmp_path_factory.mktemp("group") / "store")


@pytest.mark.slow
def test_pieces_give_the_results_of_one_process(counts):
    """All rules to 1e-10 in float64 and 1e-5 in float32: a batch and packed, ragged and empty pieces, states."""
    assert counts.pop("rules", 150) >= 150
    assert counts.pop("empty_pieces", 10) == 10
    assert counts.pop("convolutions", 7) == 7
    assert counts.pop("traffic", 36) == 36  # bytes sent: exactly those of the cost model, for any length
    assert counts.pop("training", 2) in (2, 4, 6)  # and for whole training steps with DDP and FSDP2
    assert counts.pop("mixers", 15) >= 15  # every backbone, among them momentum_deltanet with its learned gates
    assert counts.pop("odd_calls", 8) == 8
    assert counts in ({}, {"errors": 18}, {"implementations": 18})


def test_without_a_process_group_it_says_so():
    with pytest.raises(ValueError, match="must be initialized for context_parallel"), context_parallel():
        pass


def test_the_page_has_the_tables_of_the_cost_model(capsys):
    runpy.run_path(str(ROOT / "benchmarks" / "scale.py"), run_name="__main__")
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "scale.md").read_text()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 13, 64])
def test_a_prefix_reaches_every_piece(size):
    """Follow the messages with sets of pieces instead of maps."""
    held = [{position} for position in range(size)]
    before: list[set[int]] = [set() for _ in range(size)]
    for distance in rounds(size):
        sent = {}
        for position in range(size):
            target, source = neighbors(position, distance, size)
            assert source is None or neighbors(source, distance, size)[0] == position
            if target is not None:
                sent[target] = held[position]
                assert reaches_the_first(position, distance) == (0 in held[position])
        for position, pieces in sent.items():
            assert not pieces & before[position]
            before[position] = before[position] | pieces
        held = before
    assert before == [set(range(position)) for position in range(size)]


def test_import_muonssm_does_not_import_it():
    code = "import sys, muonssm; print('muonssm.distributed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
