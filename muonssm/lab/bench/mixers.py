"""`muonssm bench --mixers`: a training step of every mixer, plain and with Muon, beside transformers' own module.

Where transformers has the module, ours gets its weights, and the outputs are compared before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from muonssm.lab.core.timing import best_seconds
from muonssm.layers import Mixer, build_mixer, from_transformers
from muonssm.ops import Muon

from .measure import check_close, threads, training
from .record import LEGEND, Row, rows_of, table, write_record

Contenders = dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]  # the layer, and a function that returns y
WIDTH, LENGTH, BATCH = 256, 1024, 4
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {}),
    "mamba2": ("mamba2", {}),
    "deltanet": ("deltanet", {}),
    "gated_deltanet": ("gated_deltanet", {}),
    "longhorn": ("longhorn", {}),
    "longhorn, diagonal": ("longhorn", {"form": "diagonal"}),
}


def transformers_modules() -> dict[str, nn.Module]:
    """transformers' modules of this width, with the dimensions that ours have by default."""
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
    """Our mixer, plain and with Muon, and transformers' module if there is one, all with the same weights."""
    backbone, dims = BACKBONES[name]
    ours: dict[str, Mixer] = {}
    for variant, muon in (("plain", Muon.off()), ("muon", Muon())):
        torch.manual_seed(0)
        ours[variant] = (
            build_mixer(backbone, WIDTH, muon, **dims) if module is None else from_transformers(module, muon)
        )
    all_contenders: Contenders = {variant: (mixer, partial(_output, mixer)) for variant, mixer in ours.items()}
    return all_contenders if module is None else {**all_contenders, "transformers": (module, module)}


def _output(mixer: Mixer, x: Tensor) -> Tensor:
    """y alone, without the state."""
    return mixer(x)[0]


@torch.no_grad()
def check(name: str, everyone: Contenders, x: Tensor) -> None:
    """Check our plain mixer against transformers' module, if there is one."""
    if "transformers" in everyone:
        check_close(name, everyone["plain"][1](x), everyone["transformers"][1](x))


def run(output: Path, rounds: int, thread_count: int) -> int:
    """Time all mixers, print the table and write mixers.json into `output`."""
    from tqdm import tqdm

    rows: list[Row] = []
    summary, modules = {}, transformers_modules()
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    x.requires_grad_()
    with threads(thread_count), tqdm(BACKBONES, unit="mixer") as progress:
        for name in progress:
            progress.set_description(name)
            everyone = contenders(name, modules.get(name))
            check(name, everyone, x[:, :128])
            steps = {
                contender: training(partial(call, x), weight, (x, *layer.parameters()))
                for contender, (layer, call) in everyone.items()
            }
            seconds = best_seconds(steps, rounds, budget=20.0)
            rows += rows_of(f"{name}, training step", seconds, "plain")
            for contender in ("muon", "transformers"):
                if contender in seconds:
                    summary[f"{contender} over plain, {name}"] = seconds[contender] / seconds["plain"]
    print(f"\nd_model {WIDTH}, {BATCH} sequences of {LENGTH} steps, float32, {thread_count} threads")
    print(table(rows, summary))
    print(f"\n{LEGEND}")
    write_record(output / "mixers.json", thread_count, rows, summary)
    return 0
