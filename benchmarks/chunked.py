"""Measure speed and memory of `chunked`: `python benchmarks/chunked.py`.

Compares it with transformers' chunked gated delta rule (without momentum and normalization) and with Algorithm 1 of the
paper, as ratios from one run. Every output is first compared with the float64 reference.
"""

from __future__ import annotations

import argparse

import torch

from muonssm.lab.bench.measure import forward, peak_bytes, threads, training
from muonssm.lab.bench.workloads import MemoryWorkload, check
from muonssm.lab.core.timing import best_seconds, fit_exponent
from muonssm.ops import Muon

HEADS, DIM = 8, 64


def against_transformers(rounds: int) -> None:
    work = MemoryWorkload.make(1, 2048, HEADS, DIM, DIM)
    ours, peer = work.contender("chunked"), work.gated_delta_rule("chunk")
    check(work, [ours, peer])
    weight = torch.randn_like(work.v)
    for title, bound, prepare in (
        ("forward", 1.5, forward),
        ("forward + backward", 2.0, lambda f: training(f, weight, work.inputs)),
    ):
        show(title, best_seconds({c.name: prepare(c.run) for c in (ours, peer)}, rounds), f"<= {bound}")


def against_algorithm_1(rounds: int) -> None:
    work = MemoryWorkload.make(1, 512, HEADS, DIM, DIM)
    contenders = [work.contender("scan"), work.contender("chunked")]
    check(work, contenders)
    show("forward, L = 512", best_seconds({c.name: forward(c.run) for c in contenders}, rounds), ">= 100")


def show(title: str, seconds: dict[str, float], bound: str) -> None:
    (first, a), (second, b) = seconds.items()
    print(f"{title:<20} {first} {1e3 * a:.1f} ms   {second} {1e3 * b:.1f} ms   ratio {a / b:.2f}  ({bound})")


def memory() -> None:
    lengths = [1024, 2048, 4096, 8192]
    peaks = []
    for L in lengths:
        work = MemoryWorkload.make(1, L, HEADS, DIM, DIM)
        peaks.append(peak_bytes(training(work.ours("chunked", Muon()), torch.randn_like(work.v), work.inputs)))
    shown = ", ".join(f"{peak / 2**20:.0f} MiB at {L}" for L, peak in zip(lengths, peaks, strict=True))
    print(f"{'peak of a step':<20} {shown}   exponent {fit_exponent(lengths, peaks):.2f}  (= 1)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="number of rounds; the best one counts")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    print(f"muon_memory, full Muon, float32, B 1, H {HEADS}, d = m = {DIM}, eta 1, {arguments.threads} threads")
    print("best of several alternating rounds; L = 2048 unless noted otherwise")
    with threads(arguments.threads):
        against_transformers(arguments.rounds)
        against_algorithm_1(max(3, arguments.rounds // 3))
        memory()


if __name__ == "__main__":
    main()
