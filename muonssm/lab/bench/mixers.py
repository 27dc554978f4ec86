"""`muonssm bench --mixers`: a training step of every mixer, plain and with Muon, beside transformers' own module.

Where transformers has the module, ours gets its weights, and its output is compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.layers import Mixer, build_mixer, from_transformers
from muonssm.ops import Muon

from .measure import best_seconds, threads, training
from .operators import Row, table, write_record
from .workloads import TOLERANCE

Contenders = dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]
WIDTH, LENGTH, BATCH = 256, 1024, 4
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "deltanet": ("deltanet", {}),
    "gated_deltanet": ("gated_deltanet", {}),
    "longhorn": ("longhorn", {}),
    "longhorn, diagonal": ("longhorn", {"form": "diagonal"}),
}


def originals() -> dict[str, nn.Module]:
    """transformers' modules of this width, with the dimensions ours have by default."""
    from transformers import Mamba2Config, MambaConfig, Qwen3NextConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mamba = MambaConfig(hidden_size=WIDTH, num_hidden_layers=1, use_mambapy=True)
    mamba2 = Mamba2Config(hidden_size=WIDTH, num_hidden_layers=1, num_heads=8, head_dim=64, n_groups=1, state_size=128)
    gated = Qwen3NextConfig(
        hidden_size=WIDTH, num_hidden_layers=1, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=48, linear_value_head_dim=96, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    return {
        "mamba": MambaMixer(mamba, layer_idx=0),
        "mamba2": Mamba2Mixer(mamba2, layer_idx=0),
        "gated_deltanet": Qwen3NextGatedDeltaNet(gated, layer_idx=0),
    }


def contenders(name: str, module: nn.Module | None) -> Contenders:
    """Who takes part: the layer, and how it is called."""
    backbone, dims = BACKBONES[name]
    ours: dict[str, Mixer] = {}
    for kind, muon in (("plain", Muon.off()), ("muon", Muon())):
        torch.manual_seed(0)
        ours[kind] = build_mixer(backbone, WIDTH, muon, **dims) if module is None else from_transformers(module, muon)
    everyone: Contenders = {kind: (mixer, partial(output_of, mixer)) for kind, mixer in ours.items()}
    return everyone if module is None else {**everyone, "transformers": (module, module)}


def output_of(mixer: Mixer, x: Tensor) -> Tensor:
    """y alone."""
    return mixer(x)[0]


@torch.no_grad()
def check(name: str, everyone: Contenders, x: Tensor) -> None:
    """No speed is reported for a wrong result."""
    if "transformers" not in everyone:
        return
    found, wanted = everyone["plain"][1](x), everyone["transformers"][1](x)
    error = ((found - wanted).norm() / wanted.norm()).item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name} is off by {error:.2e} (it may be {TOLERANCE:g}): no speed is reported")


def run(output: Path, rounds: int, thread_count: int) -> int:
    """All mixers; prints the table and writes mixers.json into `output`."""
    from tqdm import tqdm

    rows, metadata, modules = [], {}, originals()
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    x.requires_grad_()
    with threads(thread_count), tqdm(BACKBONES, unit="mixer") as progress:
        for name in progress:
            progress.set_description(name)
            everyone = contenders(name, modules.get(name))
            check(name, everyone, x[:, :128])
            steps = {
                kind: training(partial(call, x), weight, (x, *layer.parameters()))
                for kind, (layer, call) in everyone.items()
            }
            seconds = best_seconds(steps, rounds, budget=20.0)
            title = f"{name}, training step"
            rows += [Row(title, kind, 1e3 * value, value / seconds["plain"]) for kind, value in seconds.items()]
            metadata[f"muon over plain, {name}"] = seconds["muon"] / seconds["plain"]
            if "transformers" in seconds:
                metadata[f"transformers over plain, {name}"] = seconds["transformers"] / seconds["plain"]
    print(f"\nd_model {WIDTH}, {BATCH} sequences of {LENGTH} steps, float32, {thread_count} threads")
    print(table(rows, metadata))
    print("\nms: best of several, in turns; x: times the first of the section (more than 1 is slower than it)")
    write_record(output / "mixers.json", thread_count, rows, metadata)
    return 0
