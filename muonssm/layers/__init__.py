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
    """Build the mixer of a backbone.

    Args:
        name: a name in `BACKBONES`.
        d_model: width of the input and output.
        muon: momentum and normalization; `Muon.off()` is the plain backbone.
        dims: further arguments of the backbone's class, such as `num_heads=4`.

    To add a backbone:

    1. Write `muonssm/layers/<name>.py` with a subclass of `Mixer`. Its constructor takes `d_model`, its own sizes,
       and `muon`, `momentum`, `bidirectional`, and makes `conv1d` (`ShortConvolution`), `momentum` (`Momentum`) and
       `out_proj`. Its method `mix(x, state, sequences)` is the whole computation in order: projections,
       `sequences.add_reversed`, convolution, gates, `muon_memory` or `muon_selective_scan`,
       `sequences.mean_of_directions`, output projection. `gated_deltanet.py` is a good one to start from. `Mixer` does
       the rest: argument checks, padding, packing, decoding.
    2. Add it to `BACKBONES` above.
    3. Add it to the table `DIMS` in `tests/layers/variants.py`. Every test of the contract then runs on it: split,
       stepwise, padded and packed sequences, gradients, bfloat16, both directions, every implementation.
    4. Models choose its sizes in `ActivityModelConfig.mixer_dims` (`models/activity.py`), `VisionConfig.ssm_dims`
       (`models/vision/config.py`) and `MIXER_DIMS` (`models/language/presets.py`).
    5. If other libraries have weights for it, add a map to `MAPS` in `convert.py`.
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
    "build_mixer",
    "export_weights",
    "from_transformers",
    "load_weights",
    "upcycle",
]
