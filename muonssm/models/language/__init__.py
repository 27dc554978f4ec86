"""Language models on transformers' contracts; `import muonssm` makes them known to its Auto classes."""

from __future__ import annotations

from .. import transformers_check  # noqa: F401, first: its error says what to do
from .cache import MuonSSMCache
from .config import MuonSSMConfig
from .network import (
    MuonSSMForCausalLM,
    MuonSSMForSequenceClassification,
    MuonSSMForTokenClassification,
    MuonSSMModel,
    check_mixer,
    mixer_with_double_state,
)
from .presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "MuonSSMCache",
    "MuonSSMConfig",
    "MuonSSMForCausalLM",
    "MuonSSMForSequenceClassification",
    "MuonSSMForTokenClassification",
    "MuonSSMModel",
    "check_mixer",
    "mixer_with_double_state",
    "preset",
]
