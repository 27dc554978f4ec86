"""`muonssm bench`: the operators, our implementations and their peers; a table of ratios and a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muonssm.lab.core.files import atomic
from muonssm.lab.core.timing import best_seconds, fit_exponent
from muonssm.ops import Muon

from .measure import forward, peak_bytes, repeated, threads, training
from .record import LEGEND, Row, rows_of, table, write_record
from .workloads import Contender, DecodeWorkload, MemoryWorkload, SelectiveWorkload, Workload, check

HEADS, DIM, ONE_HEAD_LENGTH = 8, 64, 16384
COMPILED_PEER = True  # whether to time transformers' chunked rule under `torch.compile` too
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
LONGEST_CHECKED = 4096  # the float64 reference takes too long beyond; shorter sections check the same contenders
LONGEST_ATTENTION, LONGEST_PEER, LONGEST_REFERENCE = 16384, 16384, 1024
SECONDS_PER_CONTENDER = 10.0
TimeCurves = dict[str, dict[int, float]]  # seconds by contender and length


@dataclass
class Suite:
    """Runs one section after the other and collects the results.

    Attributes:
        rounds: the number of rounds of which the best counts.
        progress: a tqdm bar.
        rows: the times so far.
        summary: ratios, shares and exponents so far.
    """

    rounds: int
    progress: Any
    rows: list[Row] = field(default_factory=list)
    summary: dict[str, float] = field(default_factory=dict)

    def section(
        self, title: str, workload: Workload, contenders: list[Contender], train: bool, times: int = 1
    ) -> dict[str, float]:
        """Check the contenders, then time them (`times` calls in a row); the first one is the baseline."""
        self.progress.set_description(title)
        if not (isinstance(workload, MemoryWorkload) and workload.q.shape[1] > LONGEST_CHECKED):
            check(workload, contenders)
        prepare = _training_of(workload) if train else forward
        calls = {c.name: prepare(c.run if times == 1 else repeated(c.run, times)) for c in contenders}  # type: ignore[arg-type]
        best = best_seconds(calls, self.rounds, SECONDS_PER_CONTENDER)
        seconds = {name: total / times for name, total in best.items()}
        self.rows += rows_of(title, seconds, contenders[0].name)
        self.progress.update()
        return seconds


def _training_of(workload: Workload) -> Callable[[Callable], Callable]:
    """A function that adds the backward pass to a contender."""
    output = workload.v if isinstance(workload, MemoryWorkload) else workload.x  # type: ignore[union-attr]
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return lambda run: training(run, weight, workload.inputs)  # type: ignore[union-attr]


def memory_sections(suite: Suite) -> None:
    """The matrix memory at L = 2048 against its peers, and all implementations at L = 512."""
    work = MemoryWorkload.make(1, 2048, HEADS, DIM, DIM)
    contenders = [work.contender("native"), work.plain("native"), work.residual("native"), work.contender("chunked")]
    contenders += [work.gated_delta_rule("chunk"), work.attention()]
    if COMPILED_PEER:
        contenders.append(work.compiled_gated_delta_rule())
    for train in (False, True):
        passes = "forward + backward" if train else "forward"
        seconds = suite.section(f"memory, L 2048, {passes}", work, contenders, train)
        suite.summary[f"muon over plain, memory, {passes}"] = seconds["native"] / seconds["native, plain"]
        suite.summary[f"residual over muon, memory, {passes}"] = seconds["native, residual"] / seconds["native"]
        for name in seconds:
            if name.startswith("transformers"):
                suite.summary[f"{name} over native, plain, {passes}"] = seconds[name] / seconds["native, plain"]
    short = MemoryWorkload.make(1, 512, HEADS, DIM, DIM)
    implementations = [short.contender(name) for name in ("native", "chunked", "reference", "scan")]
    implementations.append(short.gated_delta_rule("recurrent"))
    suite.section("memory, L 512, forward", short, implementations, train=False)
    square = torch.randn(2048, 2048)
    seconds = best_seconds({"sgemm": lambda: square @ square, "native": forward(contenders[0].run)}, suite.rounds)
    memory_rate, sgemm_rate = 10 * DIM * DIM * HEADS * 2048 / seconds["native"], 2 * 2048**3 / seconds["sgemm"]
    suite.summary["share of sgemm's rate, memory forward"] = memory_rate / sgemm_rate


def one_head_section(suite: Suite, thread_count: int) -> None:
    """One head of one sequence, whose rows the threads share: all threads against one."""
    work = MemoryWorkload.make(1, ONE_HEAD_LENGTH, 1, 2 * DIM, 2 * DIM)

    def on(count: int) -> Contender:
        def run() -> Tensor:
            with threads(count):
                return work.ours("native", Muon())()

        return Contender(f"{count} threads", run)

    def backward_on(count: int) -> Callable[[], object]:
        step = _training_of(work)(work.ours("native", Muon()))

        def run() -> object:
            with threads(count):
                return step()

        return run

    counts = sorted({thread_count, 1}, reverse=True)
    title = f"memory, one head of {2 * DIM} x {2 * DIM}, L {ONE_HEAD_LENGTH}"
    for passes in ("forward", "forward + backward"):
        calls = {f"{n} threads": forward(on(n).run) if passes == "forward" else backward_on(n) for n in counts}
        best = best_seconds(calls, suite.rounds, SECONDS_PER_CONTENDER)
        suite.rows += rows_of(f"{title}, {passes}", best, f"{counts[0]} threads")
        ratio = best["1 threads"] / best[f"{counts[0]} threads"]
        suite.summary[f"1 thread over {counts[0]}, one head, {passes}"] = ratio
    suite.progress.update()


def selective_sections(suite: Suite) -> None:
    """Mamba's selective scan against mambapy."""
    for N in (16, 64):
        work = SelectiveWorkload.make(4, 1024, 256, N)
        contenders = [work.contender("native"), work.plain("native"), work.contender("chunked"), work.mambapy()]
        seconds = suite.section(f"selective scan, N {N}, forward + backward", work, contenders, train=True)
        suite.summary[f"muon over plain, selective scan N {N}"] = seconds["native"] / seconds["native, plain"]


def decode_section(suite: Suite) -> None:
    """One decoding step."""
    work = DecodeWorkload.make(1, 12, DIM, DIM)
    contenders = [work.contender("native"), work.contender("reference"), work.transformers()]
    suite.section("one decoding step, H 12", work, contenders, train=False, times=100)


def length_section(suite: Suite, lengths: tuple[int, ...]) -> TimeCurves:
    """Forward + backward by length, each contender up to the length it can do, and the peak memory of `native`."""
    curves: TimeCurves = {}
    peaks = []
    for L in lengths:
        work = MemoryWorkload.make(1, L, HEADS, DIM, DIM)
        contenders = [work.contender("native")]
        contenders += [work.contender("chunked"), work.gated_delta_rule("chunk")] if L <= LONGEST_PEER else []
        contenders += [work.attention()] if L <= LONGEST_ATTENTION else []
        contenders += [work.contender("reference")] if L <= LONGEST_REFERENCE else []
        title = f"memory, L {L}, forward + backward, length"
        rounds, suite.rounds = suite.rounds, max(2, min(suite.rounds, 16384 // L))
        for name, value in suite.section(title, work, contenders, train=True).items():
            curves.setdefault(name, {})[L] = value
        suite.rounds = rounds
        peaks.append(float(peak_bytes(training(work.ours("native", Muon()), torch.ones_like(work.v), work.inputs))))
    suite.summary["exponent of time in length"] = fit_exponent(lengths, [curves["native"][L] for L in lengths])
    suite.summary["exponent of memory in length"] = fit_exponent(lengths, peaks)
    return curves


def draw(curves: TimeCurves, path: Path) -> None:
    """Write the figure of time against length, with logarithmic axes."""
    from muonssm.lab.report import figures

    ours = {"native": "muonssm native", "chunked": "muonssm chunked", "reference": "muonssm reference"}
    points = {ours.get(name, name): [[(L, 1e3 * s) for L, s in curve.items()]] for name, curve in curves.items()}
    figure = figures.lines(points, "sequence length", "ms, forward + backward", log_x=True, log_y=True)
    with atomic(path) as temporary:
        temporary.write_text(figures.standalone(figure))
    print(f"wrote {path}")


def run(output: Path, rounds: int, thread_count: int, longest: int) -> int:
    """Run all sections; write bench.json and bench.svg into `output`."""
    from tqdm import tqdm

    lengths = tuple(L for L in LENGTHS if longest >= L)
    if len(lengths) < 2:
        raise ValueError(f"--longest must be {LENGTHS[1]} or more, to compare two lengths, got {longest}")
    with threads(thread_count), tqdm(total=7 + len(lengths), unit="section") as progress:
        suite = Suite(rounds, progress)
        memory_sections(suite)
        one_head_section(suite, thread_count)
        selective_sections(suite)
        decode_section(suite)
        curves = length_section(suite, lengths)
    print(table(suite.rows, suite.summary))
    print(f"\n{LEGEND}")
    write_record(output / "bench.json", thread_count, suite.rows, suite.summary)
    draw(curves, output / "bench.svg")
    return 0
