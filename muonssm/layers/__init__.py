"""Mixers: sequence layers on the MuonSSM memory, one file per backbone."""

from __future__ import annotations

import inspect
from typing import Any

from muonssm.ops import Muon

from .convert import export_weights, from_transformers, load_weights
from .deltanet import DeltaNet
from .gated_deltanet import GatedDeltaNet
from .longhorn import LongHorn
from .mamba import Mamba
from .mamba2 import Mamba2
from .mixer import Mixer
from .state import MixerState
from .upcycle import upcycle

BACKBONES: dict[str, type[Mixer]] = {
    "mamba": Mamba,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "longhorn": LongHorn,
}


def build_mixer(name: str, d_model: int, muon: Muon = Muon(), **dims: Any) -> Mixer:  # noqa: B008  a frozen value
    """The mixer of a backbone in `BACKBONES`; `dims` are arguments of its class."""
    if not isinstance(name, str) or name not in BACKBONES:
        raise ValueError(f"name is {name!r}; it may be one of {tuple(BACKBONES)}")
    backbone = BACKBONES[name]
    known = [argument for argument in inspect.signature(backbone).parameters if argument not in ("d_model", "muon")]
    for argument in dims:
        if argument not in known:
            raise TypeError(f"{argument} is not an argument of {backbone.__name__}; it has {', '.join(known)}")
    return backbone(d_model, muon=muon, **dims)  # type: ignore[call-arg]


__all__ = [
    "BACKBONES",
    "DeltaNet",
    "GatedDeltaNet",
    "LongHorn",
    "Mamba",
    "Mamba2",
    "Mixer",
    "MixerState",
    "build_mixer",
    "export_weights",
    "from_transformers",
    "load_weights",
    "upcycle",
]
