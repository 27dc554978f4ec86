"""Measure both operators on a GPU: `python benchmarks/gpu.py`.

Compares the Triton kernels with full Muon and plain, `chunked`, and, if flash-linear-attention is installed, its gated
delta rule (the plain operator), as ratios from one run. Every output is first compared with the float64 reference;
inaccurate contenders are reported and not timed. Times are medians of alternating rounds, by the clock of the device.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from muonssm.ops import MemoryState, Muon, muon_memory, muon_selective_scan
from muonssm.ops.triton import support

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}  # relative RMS to float64
CHECKED = 512  # steps on which outputs are compared


class Contender(NamedTuple):
    """An implementation to time, and the float64 operator that it must equal."""

    name: str
    run: Callable[..., Tensor]
    oracle: Callable[..., Tensor]


def memory_contenders() -> list[Contender]:
    """Return the contenders for `muon_memory`, with momentum and normalization or with neither."""

    def ours(impl: str, muon: Muon) -> Callable[..., Tensor]:
        return lambda *tensors: muon_memory(*tensors, muon=muon, impl=impl)[0]

    muon, plain = ours("reference", Muon()), ours("reference", Muon.off())
    contenders = [
        Contender("triton", ours("triton", Muon()), muon),
        Contender("triton, plain", ours("triton", Muon.off()), plain),
        Contender("chunked", ours("chunked", Muon()), muon),
    ]
    if importlib.util.find_spec("fla") is not None:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        def peer(q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor, beta: Tensor) -> Tensor:
            return chunk_gated_delta_rule(q, k, v, g=log_alpha, beta=beta, scale=1.0)[0]

        contenders.append(Contender("fla gated delta rule", peer, plain))
    return contenders


def selective_contenders() -> list[Contender]:
    """Return the contenders for `muon_selective_scan`."""

    def ours(impl: str, muon: Muon) -> Callable[..., Tensor]:
        return lambda *tensors: muon_selective_scan(*tensors, muon=muon, impl=impl)[0]

    muon, plain = ours("reference", Muon()), ours("reference", Muon.off())
    return [
        Contender("triton", ours("triton", Muon()), muon),
        Contender("triton, plain", ours("triton", Muon.off()), plain),
        Contender("chunked", ours("chunked", Muon()), muon),
    ]


def memory_inputs(B: int, L: int, H: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v in `dtype` and gates in float32, as layers make them."""
    q, k, v = (torch.randn(B, L, H, size, device="cuda") for _ in range(3))
    gates = [-torch.rand(B, L, H, device="cuda") * 0.3, torch.rand(B, L, H, device="cuda")]
    vectors = [F.normalize(q, dim=-1), F.normalize(k, dim=-1), v]
    return [*(x.to(dtype) for x in vectors), *gates]


def selective_inputs(B: int, L: int, D: int, N: int, dtype: torch.dtype) -> list[Tensor]:
    """Return x, dt, A, B, C; A in float32."""
    x, dt = torch.randn(B, L, D, device="cuda"), 0.1 * torch.rand(B, L, D, device="cuda")
    A = -torch.arange(1, N + 1, device="cuda", dtype=torch.float32).expand(D, N).contiguous()
    Bk, C = (torch.randn(B, L, N, device="cuda") for _ in range(2))
    return [x.to(dtype), dt.to(dtype), A, Bk.to(dtype), C.to(dtype)]


def correct(contender: Contender, inputs: list[Tensor], dtype: torch.dtype) -> bool:
    """Return whether the contender equals its oracle on the first steps; print the difference if not."""
    cut = [x if x.ndim == 2 else x[:1, :CHECKED] for x in inputs]
    with torch.no_grad():
        output, wanted = contender.run(*cut).double(), contender.oracle(*(x.double() for x in cut))
    off = ((output - wanted).square().mean() / wanted.square().mean()).sqrt().item()
    if not off <= TOLERANCE[dtype]:
        print(f"  {contender.name}: NOT TIMED, relative difference {off:.1e} is above {TOLERANCE[dtype]:g}")
    return off <= TOLERANCE[dtype]


def milliseconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median time of each function, in alternating rounds, after three warm-up calls."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for round_ in range(rounds + 3):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if round_ >= 3:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def compare(title: str, contenders: list[Contender], inputs: list[Tensor], rounds: int, dtype: torch.dtype) -> None:
    """Time forward, and forward and backward, of all correct contenders; print ratios to the first."""
    correct_ones = [c for c in contenders if correct(c, inputs, dtype)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    weight = torch.randn_like(correct_ones[0].run(*inputs)) if correct_ones else None

    def forward(c: Contender) -> Callable[[], object]:
        return lambda: c.run(*inputs)

    def training(c: Contender) -> Callable[[], object]:
        return lambda: torch.autograd.grad(c.run(*leaves), leaves, weight, allow_unused=True)

    for what, prepare in (("forward", forward), ("forward + backward", training)):
        show(f"{title}, {what}", milliseconds({c.name: prepare(c) for c in correct_ones}, rounds))


def show(title: str, times: dict[str, float]) -> None:
    print(title)
    first = next(iter(times.values()), 1.0)
    for name, value in times.items():
        print(f"  {name:<22} {value:9.3f} ms   {value / first:6.2f}x the first")


def decode(B: int, H: int, size: int, rounds: int, dtype: torch.dtype) -> None:
    """Time a hundred decoding steps, each from the state of the previous one."""
    inputs = memory_inputs(B, 1, H, size, dtype)
    zero = torch.zeros(B, H, size, size, device="cuda")

    def steps(impl: str) -> Callable[[], object]:
        def run() -> None:
            state = MemoryState(zero, zero)
            with torch.no_grad():
                for _ in range(100):
                    _, state = muon_memory(*inputs, state=state, impl=impl)

        return run

    times = milliseconds({impl: steps(impl) for impl in ("triton", "reference")}, rounds)
    show(f"memory, 100 decoding steps, B {B}, H {H}, {size} x {size}", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 16384])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="head sizes of the memory")
    parser.add_argument("--tokens", type=int, default=32768, help="batch times length")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a GPU (CUDA or ROCm), but torch finds none")
    torch.manual_seed(0)
    dtype, device = DTYPES[arguments.dtype], torch.device("cuda")
    print(
        f"{torch.cuda.get_device_name()}, {support.architecture(device)}, torch {torch.__version__}, {arguments.dtype}"
    )
    for L in arguments.lengths:
        B = max(1, arguments.tokens // L)
        for size in arguments.sizes:
            inputs = memory_inputs(B, L, 2048 // size, size, dtype)
            title = f"memory, B {B}, L {L}, H {2048 // size}, {size} x {size}"
            compare(title, memory_contenders(), inputs, arguments.rounds, dtype)
        inputs = selective_inputs(B, L, 2048, 16, dtype)
        compare(f"selective, B {B}, L {L}, D 2048, N 16", selective_contenders(), inputs, arguments.rounds, dtype)
    decode(8, 16, 128, arguments.rounds, dtype)


if __name__ == "__main__":
    main()
