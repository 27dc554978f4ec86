"""Language models on transformers' contracts; importing this module registers them with `AutoModelForCausalLM`."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import MuonSSMCache
from .config import MuonSSMConfig
from .network import MuonSSMForCausalLM, MuonSSMModel, check_mixer
from .presets import PRESETS, preset

AutoConfig.register(MuonSSMConfig.model_type, MuonSSMConfig)
AutoModel.register(MuonSSMConfig, MuonSSMModel)
AutoModelForCausalLM.register(MuonSSMConfig, MuonSSMForCausalLM)

__all__ = [
    "PRESETS",
    "MuonSSMCache",
    "MuonSSMConfig",
    "MuonSSMForCausalLM",
    "MuonSSMModel",
    "check_mixer",
    "preset",
]
