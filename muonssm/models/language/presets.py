"""Named model sizes."""

from __future__ import annotations

from typing import Any

from muonssm.checks import check_choice

from .config import MuonSSMConfig

# Mixer arguments of the paper's 170M table; what the paper does not state keeps the backbone's default.
MIXER_DIMS: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"num_heads": 9},
    "deltanet": {"num_heads": 12},
    "mamba": {},
    "mamba2": {},
    "longhorn": {},
    "momentum_deltanet": {"num_heads": 9},
}
PRESETS: dict[str, dict[str, Any]] = {
    "170m": {"vocab_size": 32000, "hidden_size": 672, "intermediate_size": 6144, "num_hidden_layers": 10},
}


def preset(name: str, backbone: str = "gated_deltanet", muon: Any = True, hybrid: bool = False) -> MuonSSMConfig:
    """Build the configuration of a named size.

    Args:
        name: a name in `PRESETS`.
        backbone: a name in `muonssm.layers.BACKBONES`.
        muon: as in `MuonSSMConfig`.
        hybrid: whether every second layer is attention over a window of 2048 steps.
    """
    check_choice("name", name, tuple(PRESETS))
    check_choice("backbone", backbone, tuple(MIXER_DIMS))
    ssm_every = 2 if hybrid else 1
    return MuonSSMConfig(**PRESETS[name], backbone=backbone, muon=muon, mixer=MIXER_DIMS[backbone], ssm_every=ssm_every)
