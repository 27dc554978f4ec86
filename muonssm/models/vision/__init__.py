"""MambaVision with any backbone as its SSM, plain or with Muon; this module needs torch alone.

Import `timm_registry` or `transformers_model` of this package to register the networks with these libraries.
"""

from __future__ import annotations

from .config import VisionConfig
from .features import VisionFeatures
from .network import MambaVision
from .presets import SIZES, mambavision_micro, mambavision_tiny, vision_config
from .released_weights import load_published

__all__ = [
    "SIZES",
    "MambaVision",
    "VisionConfig",
    "VisionFeatures",
    "load_published",
    "mambavision_micro",
    "mambavision_tiny",
    "vision_config",
]
