"""What `make demo` shows: the operator's algorithms on one input, with their differences and times."""

from __future__ import annotations

import torch

from muonssm.bench.measure import best_seconds, training
from muonssm.bench.workloads import MemoryWorkload
from muonssm.ops import IMPLEMENTATIONS, Muon, muon_memory

B, L, H, DIM = 1, 512, 4, 32


def main() -> None:
    work = MemoryWorkload.make(B, L, H, DIM, DIM)
    wide = [x.detach().double() for x in work.inputs]
    weight = torch.randn(work.v.shape, generator=torch.Generator().manual_seed(1))
    print(f"One input: {B} sequence of {L} steps, {H} heads of {DIM} x {DIM}, float32; forward + backward.")
    for title, muon in (("plain gated delta rule", Muon.off()), ("with Muon", Muon())):
        wanted = muon_memory(*wide, muon=muon, impl="reference")[0]
        functions = {name: training(work.ours(name, muon), weight, work.inputs) for name in IMPLEMENTATIONS}
        seconds = best_seconds(functions, rounds=5, budget=5.0)
        print(f"\n{title}\n  {'algorithm':<11} {'difference':>10} {'time':>11} {'speed':>8}   what it is")
        for name, implementation in IMPLEMENTATIONS.items():
            with torch.no_grad():
                error = (work.ours(name, muon)().double() - wanted).norm() / wanted.norm()
            speed = seconds["reference"] / seconds[name]
            print(
                f"  {name:<11} {error:>10.1e} {1e3 * seconds[name]:>8.1f} ms {speed:>7.2f}x   {implementation.summary}"
            )
    print("\ndifference: relative, to the reference in float64; speed: against the reference in this run")


if __name__ == "__main__":
    main()
