"""Sizes of models with a name."""

from __future__ import annotations

from typing import Any

from .config import MuonSSMConfig

# Arguments of the mixers in the paper's 170M table; whatever is not said there are the backbones' defaults.
HEADS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"num_heads": 9},
    "deltanet": {"num_heads": 12},
    "mamba": {},
    "mamba2": {},
    "longhorn": {},
}
PRESETS: dict[str, dict[str, Any]] = {
    "170m": {"vocab_size": 32000, "hidden_size": 672, "intermediate_size": 6144, "num_hidden_layers": 10},
}


def preset(name: str, backbone: str = "gated_deltanet", muon: Any = True, hybrid: bool = False) -> MuonSSMConfig:
    """The configuration of a model in `PRESETS`.

    Args:
        name: its name.
        backbone: any of `muonssm.layers.BACKBONES`.
        muon: as in `MuonSSMConfig`.
        hybrid: whether every other layer is attention over a window of 2048 steps.
    """
    if name not in PRESETS:
        raise ValueError(f"name is {name!r}; it may be one of {tuple(PRESETS)}")
    if backbone not in HEADS:
        raise ValueError(f"backbone is {backbone!r}; it may be one of {tuple(HEADS)}")
    every = 2 if hybrid else 1
    return MuonSSMConfig(**PRESETS[name], backbone=backbone, muon=muon, mixer=HEADS[backbone], ssm_every=every)
