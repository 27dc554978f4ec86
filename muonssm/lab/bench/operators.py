"""`muonssm bench`: one run over our implementations and the peers, a table of ratios and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from muonssm.lab.core.files import atomic
from muonssm.lab.core.info import describe
from muonssm.ops import Muon

from .measure import best_seconds, exponent, forward, peak_bytes, repeated, threads, training
from .workloads import Contender, DecodeWorkload, MemoryWorkload, SelectiveWorkload, Workload, check

HEADS, DIM = 8, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ATTENTION_UP_TO, PEER_UP_TO, SLOW_UP_TO = 16384, 16384, 1024


@dataclass(frozen=True)
class Row:
    """One contender in one section; `times` is how often as long it takes as the first of its section."""

    section: str
    name: str
    milliseconds: float
    times: float


@dataclass
class Suite:
    """Runs sections one after the other, and keeps what they measured."""

    rounds: int
    progress: Any  # a tqdm bar
    rows: list[Row]
    metadata: dict[str, float]

    def section(
        self, title: str, workload: Workload, contenders: list[Contender], train: bool, times: int = 1
    ) -> dict[str, float]:
        """Checks, then times, the contenders (`times` calls in a row); the others are compared with the first."""
        self.progress.set_description(title)
        if not (isinstance(workload, MemoryWorkload) and workload.q.shape[1] > 4096):  # checked at a shorter length
            check(workload, contenders)
        prepare = self._training(workload) if train else forward
        functions = {contender.name: self._often(prepare, contender.run, times) for contender in contenders}
        seconds = {name: total / times for name, total in best_seconds(functions, self.rounds, budget=10.0).items()}
        first = seconds[contenders[0].name]
        self.rows += [Row(title, name, 1e3 * value, value / first) for name, value in seconds.items()]
        self.progress.update()
        return seconds

    @staticmethod
    def _often(prepare: Callable[[Callable], Callable], run: Callable, times: int) -> Callable:
        """Without gradients, as a decoding loop runs it; single calls otherwise."""
        return prepare(run) if times == 1 else prepare(repeated(run, times))

    @staticmethod
    def _training(workload: Workload) -> Callable[[Callable], Callable]:
        output = workload.v if isinstance(workload, MemoryWorkload) else workload.x  # type: ignore[union-attr]
        weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        return lambda run: training(run, weight, workload.inputs)  # type: ignore[union-attr]


def memory_sections(suite: Suite) -> None:
    """The matrix memory at L = 2048 against its peers, and all implementations at L = 512."""
    work = MemoryWorkload.make(1, 2048, HEADS, DIM, DIM)
    contenders = [work.contender("native"), work.plain("native"), work.contender("chunked")]
    contenders += [work.gated_delta_rule("chunk"), work.attention()]
    for train in (False, True):
        kind = "forward + backward" if train else "forward"
        seconds = suite.section(f"memory, L 2048, {kind}", work, contenders, train)
        suite.metadata[f"muon over plain, memory, {kind}"] = seconds["native"] / seconds["native, plain"]
    short = MemoryWorkload.make(1, 512, HEADS, DIM, DIM)
    everyone = [short.contender(name) for name in ("native", "chunked", "reference", "scan")]
    everyone.append(short.gated_delta_rule("recurrent"))
    suite.section("memory, L 512, forward", short, everyone, train=False)
    square = torch.randn(2048, 2048)
    rate = best_seconds({"sgemm": lambda: square @ square, "native": forward(contenders[0].run)}, suite.rounds)
    flops = 10 * DIM * DIM * HEADS * 2048
    suite.metadata["share of sgemm's rate, memory forward"] = flops / rate["native"] / (2 * 2048**3 / rate["sgemm"])


def selective_sections(suite: Suite) -> None:
    """Mamba's scan against mambapy's."""
    for N in (16, 64):
        work = SelectiveWorkload.make(4, 1024, 256, N)
        contenders = [work.contender("native"), work.plain("native"), work.contender("chunked"), work.mambapy()]
        seconds = suite.section(f"selective scan, N {N}, forward + backward", work, contenders, train=True)
        suite.metadata[f"muon over plain, selective scan N {N}"] = seconds["native"] / seconds["native, plain"]


def decode_section(suite: Suite) -> None:
    """One token."""
    work = DecodeWorkload.make(1, 12, DIM, DIM)
    contenders = [work.contender("native"), work.contender("reference"), work.transformers()]
    suite.section("one decoding step, H 12", work, contenders, train=False, times=100)


def length_section(suite: Suite, lengths: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Seconds of forward + backward by length, for those who can go that far, and our peak memory."""
    curves: dict[str, dict[int, float]] = {}
    peaks = []
    for L in lengths:
        work = MemoryWorkload.make(1, L, HEADS, DIM, DIM)
        contenders = [work.contender("native")]
        contenders += [work.contender("chunked"), work.gated_delta_rule("chunk")] if L <= PEER_UP_TO else []
        contenders += [work.attention()] if L <= ATTENTION_UP_TO else []
        contenders += [work.contender("reference")] if L <= SLOW_UP_TO else []
        title = f"memory, L {L}, forward + backward, length"
        rounds, suite.rounds = suite.rounds, max(2, min(suite.rounds, 16384 // L))
        for name, value in suite.section(title, work, contenders, train=True).items():
            curves.setdefault(name, {})[L] = value
        suite.rounds = rounds
        peaks.append(float(peak_bytes(training(work.ours("native", Muon()), torch.ones_like(work.v), work.inputs))))
    ours = [curves["native"][L] for L in lengths]
    suite.metadata["exponent of time in length"] = exponent(list(lengths), ours)
    suite.metadata["exponent of memory in length"] = exponent(list(lengths), peaks)
    return curves


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Time against length, log-log."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    names = {"native": "muonssm native", "chunked": "muonssm chunked", "reference": "muonssm reference"}
    for name, curve in curves.items():
        own = name in names
        axes.plot(list(curve), [1e3 * s for s in curve.values()], "o-" if own else "s--", label=names.get(name, name))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({L for curve in curves.values() for L in curve}))
    axes.xaxis.set_major_formatter(lambda L, _: f"{int(L):,}")
    axes.tick_params(axis="x", rotation=30)
    axes.set_xlabel("sequence length")
    axes.set_ylabel("milliseconds, forward + backward")
    axes.set_title(f"One sequence, {HEADS} heads of {DIM} x {DIM}, float32, CPU")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(rows: list[Row], metadata: dict[str, float]) -> str:
    """What is printed: one block a section, ratios to its first line."""
    lines, section = [], None
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(f"\n{section}")
        lines.append(f"  {row.name:<24} {row.milliseconds:>10.3f} ms {row.times:>9.2f}x")
    lines.append("")
    lines += [f"{name:<45} {value:.2f}" for name, value in metadata.items()]
    return "\n".join(lines)


def write_record(path: Path, thread_count: int, rows: list[Row], metadata: dict[str, float]) -> None:
    """What was measured, and on what machine, as JSON; all of it or nothing."""
    record = {"info": describe(), "threads": thread_count, "rows": [asdict(row) for row in rows], "metadata": metadata}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic(path) as part:
        part.write_text(json.dumps(record, indent=1))
    print(f"wrote {path}")


def run(output: Path, rounds: int, thread_count: int, longest: int) -> int:
    """The whole suite; writes bench.json and bench.png into `output`."""
    from tqdm import tqdm

    lengths = tuple(L for L in LENGTHS if longest >= L)
    if len(lengths) < 2:
        raise SystemExit(f"--longest is {longest}; it may be {LENGTHS[1]} or more, to have two lengths to compare")
    with threads(thread_count), tqdm(total=6 + len(lengths), unit="section") as progress:
        suite = Suite(rounds, progress, [], {})
        memory_sections(suite)
        selective_sections(suite)
        decode_section(suite)
        curves = length_section(suite, lengths)
    print(table(suite.rows, suite.metadata))
    print("\nms: best of several, in turns; x: times the first of the section (more than 1 is slower than it)")
    write_record(output / "bench.json", thread_count, suite.rows, suite.metadata)
    draw(curves, output / "bench.png")
    print(f"wrote {output / 'bench.png'}")
    return 0
