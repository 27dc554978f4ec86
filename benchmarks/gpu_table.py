"""Print the tables of docs/design/gpu.md: `python benchmarks/gpu_table.py`. Needs Triton but no GPU, and ten minutes.

Registers, shared memory and occupancy come from the compilers; flops and bytes are counted from the kernels.
"""

from __future__ import annotations

import argparse

from muonssm.ops.memory.kernels import aot as memory
from muonssm.ops.selective.kernels import aot as selective
from muonssm.ops.triton.aot import TARGETS, Report, compile_for
from muonssm.ops.triton.config import CHUNK as C

PEAK, BANDWIDTH = 989e12, 3.35e12  # H100 SXM, NVIDIA's data sheet: dense bfloat16 flops and bytes per second


def flops(D: int, momentum: bool) -> tuple[float, float]:
    """Count forward and backward flops of products per step and head, d = m = D. tf32 counts twice: half the rate."""
    n = int(momentum)
    square, cube, state = C * C * D, C**3, C * D * D
    solve = (2 + n) * square + square + (4 + n) * 2 * cube + cube  # G, WS (WM), WU; the inverse (and Cm), T lost
    states, output = (2 + 2 * n) * state, (1 + n) * state + 3 * square + n * 2 * cube
    forward = solve + states + output
    backward = solve + 3 * square + cube + states  # Q K^T, RS, RU
    backward += (3 + 2 * n) * state  # the states' gradients
    backward += (1 + n) * state + 4 * square + n * 2 * cube  # values
    backward += 6 * square + n * 2 * cube  # scores
    backward += (3 + 3 * n) * state + 3 * square  # keys
    backward += (1 + n) * 2 * cube + n * 4 * cube  # gates
    return 2 * forward / C, 2 * backward / C


def traffic(D: int, momentum: bool) -> tuple[float, float]:
    """Count forward and backward bytes per step and head in bfloat16, every tensor once per kernel.

    The unit is a row of D numbers; one state per chunk is D / C rows, a C x C matrix C / D rows.
    """
    n, s, square = int(momentum), D / C, C / D
    measure = 2 * n  # without normalization no norms are computed
    forward = measure + (2 + 2 + n) + (5 + n + (1 + n) * s) + (5 + (1 + n) * s)  # solve, states, output
    backward = measure + (4 + 4 + n) + (5 + n + (1 + n) * s)  # solve, states
    backward += 6 + (1 + n) * s  # the states' gradients
    backward += 7 + (1 + n) * s  # values
    backward += 6 + 6 * square  # scores
    backward += 8 + (2 + 2 * n) * s + 2 * square  # keys
    backward += 3 + 4 * square  # gates
    gates = 4 * 20  # bytes of the 20 planes of `vectors`
    return 2 * D * forward + 2 * gates, 2 * D * backward + 4 * gates


def roofline() -> None:
    print("| head size | pass | | kflop per step | bytes per step | flop / byte | bound by | ratio to plain |")
    print("|---|---|---|---|---|---|---|---|")
    for D in (64, 128):
        for which, title in ((0, "forward"), (1, "backward")):
            plain = max(flops(D, False)[which] / PEAK, traffic(D, False)[which] / BANDWIDTH)
            for momentum in (True, False):
                f, b = flops(D, momentum)[which], traffic(D, momentum)[which]
                bound = "memory" if b / BANDWIDTH > f / PEAK else "arithmetic"
                ratio = max(f / PEAK, b / BANDWIDTH) / plain
                rule = "Muon" if momentum else "plain"
                print(f"| {D} | {title} | {rule} | {f / 1e3:.0f} | {b:.0f} | {f / b:.0f} | {bound} | {ratio:.2f} |")
        both = [sum(traffic(D, n)) for n in (True, False)]
        print(f"| {D} | both | Muon | | | | memory | {both[0] / both[1]:.2f} |")


def compiled(architectures: list[str], sizes: list[int]) -> None:
    """Print a row for every kernel and size (head size, or states per channel), a column for every target."""
    print("| kernel | size |", " | ".join(architectures), "|")
    print("|---" * (2 + len(architectures)) + "|")
    for operator, variants, own_sizes in (
        ("memory", memory.variants, sizes),
        ("selective", selective.variants, [16, 64]),
    ):
        for size in own_sizes:
            by_target = {name: variants(name, size) for name in architectures}
            for kernel in by_target[architectures[0]]:
                reports = [compile_for(by_target[name][kernel], TARGETS[name]) for name in architectures]
                print(f"| {operator} {kernel.removeprefix('memory_')} | {size} |", end=" ")
                print(" | ".join(map(cell, reports)), "|", flush=True)


def cell(report: Report) -> str:
    """Format registers, shared memory, occupancy, and spills if there are any."""
    spills = f", SPILLS {report.spills}" if report.spills else ""
    return f"{report.registers}, {report.shared / 1024:.0f} KiB, {report.occupancy:.0%}{spills}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--roofline-only", action="store_true")
    arguments = parser.parse_args()
    roofline()
    if not arguments.roofline_only:
        print()
        compiled(arguments.architectures, arguments.sizes)


if __name__ == "__main__":
    main()
