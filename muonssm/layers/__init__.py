"""Mixers: sequence layers on the MuonSSM memory, one file per backbone."""

from __future__ import annotations

import inspect
from typing import Any

from muonssm.checks import check_choice
from muonssm.ops import Muon

from .convert import export_weights, from_transformers, load_weights
from .deltanet import DeltaNet
from .gated_deltanet import GatedDeltaNet
from .longhorn import LongHorn
from .mamba import Mamba
from .mamba2 import Mamba2
from .mixer import Mixer
from .momentum_deltanet import MomentumDeltaNet
from .state import MixerState
from .upcycle import upcycle

BACKBONES: dict[str, type[Mixer]] = {
    "mamba": Mamba,
    "mamba2": Mamba2,
    "deltanet": DeltaNet,
    "gated_deltanet": GatedDeltaNet,
    "longhorn": LongHorn,
    "momentum_deltanet": MomentumDeltaNet,
}


def build_mixer(name: str, d_model: int, muon: Muon = Muon(), **dims: Any) -> Mixer:  # noqa: B008  a frozen value
    """Build the mixer of a backbone.

    Args:
        name: a name in `BACKBONES`.
        d_model: width of the input and output.
        muon: momentum and normalization; `Muon.off()` is the plain backbone.
        dims: further arguments of the backbone's class, such as `num_heads=4`.

    To add a backbone, see CONTRIBUTING.md.
    """
    check_choice("name", name, tuple(BACKBONES))
    backbone = BACKBONES[name]
    known = [argument for argument in inspect.signature(backbone).parameters if argument not in ("d_model", "muon")]
    for argument in dims:
        if argument not in known:
            raise TypeError(f"dims must be arguments of {backbone.__name__} ({', '.join(known)}), got {argument!r}")
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
    "MomentumDeltaNet",
    "build_mixer",
    "export_weights",
    "from_transformers",
    "load_weights",
    "upcycle",
]
