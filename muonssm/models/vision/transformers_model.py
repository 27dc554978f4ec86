"""MambaVision as a transformers backbone; `import muonssm` makes it known to `AutoBackbone`.

backbone = MambaVisionBackboneConfig.of(vision_config("tiny"), out_features=["stage1", ..., "stage4"])
UperNetForSemanticSegmentation(UperNetConfig(backbone_config=backbone, num_labels=150))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
from transformers.modeling_outputs import BackboneOutput

from ..muon_settings import as_muon, muon_settings
from ..remote_code import RemoteCode, RemoteModel
from .config import STAGES, VisionConfig
from .features import VisionFeatures

STAGE_NAMES = [f"stage{number}" for number in range(1, STAGES + 1)]


class MambaVisionBackboneConfig(RemoteCode, BackboneConfigMixin, PreTrainedConfig):  # type: ignore[misc]
    """The fields of `VisionConfig` except `num_classes`; `muon` is a dict of settings, True or False.

    `out_features` are names of stages, `"stage1"` to `"stage4"` (`out_indices`: 0 to 3); the last stage by default.
    """

    model_type = "muonssm_mambavision"
    package_module = "muonssm.models.vision.transformers_model"
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "MambaVisionBackboneConfig",
        "AutoModel": "MambaVisionBackbone",
        "AutoBackbone": "MambaVisionBackbone",
    }

    backbone: str = "mamba"
    muon: Any = True
    in_channels: int = 3
    depths: list[int] | tuple[int, ...] = (1, 3, 8, 4)
    dims: list[int] | tuple[int, ...] = (80, 160, 320, 640)
    stem: int = 32
    stem_strides: list[int] | tuple[int, ...] = (2, 2)
    windows: list[int] | tuple[int, ...] = (14, 7)
    fit_windows: bool = False
    heads: list[int] | tuple[int, ...] = (8, 16)
    mlp_ratio: int = 4
    drop_path: float = 0.2
    d_state: int = 8
    d_conv: int = 3
    memory_heads: int = 4
    momentum: str = "fixed"
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **others: Any) -> None:
        self.muon = muon_settings(self.muon)
        self.build()  # checks the fields
        self.stage_names = list(STAGE_NAMES)
        features, indices = others.pop("out_features", None), others.pop("out_indices", None)
        self.set_output_features_output_indices(features, indices)
        super().__post_init__(**others)

    @classmethod
    def of(cls, config: VisionConfig, out_features: Sequence[str] = STAGE_NAMES) -> MambaVisionBackboneConfig:
        """Convert a `VisionConfig`."""
        values = {field.name: getattr(config, field.name) for field in fields(config) if field.name != "num_classes"}
        return cls(**values, out_features=list(out_features))  # type: ignore[call-arg]  # one of `others`

    def build(self) -> VisionConfig:
        """Build the `VisionConfig`."""
        values = {f.name: getattr(self, f.name) for f in fields(VisionConfig) if f.name not in ("num_classes", "muon")}
        return VisionConfig(**values, muon=as_muon(self.muon), num_classes=0)


class MambaVisionBackbone(RemoteModel, BackboneMixin, PreTrainedModel):
    """Compute the maps of the stages `out_features`, each through its own norm."""

    config: MambaVisionBackboneConfig
    config_class = MambaVisionBackboneConfig
    base_model_prefix = "features"
    main_input_name = "pixel_values"
    input_modalities = ["image"]  # noqa: RUF012
    has_attentions = False
    _no_split_modules = VisionFeatures._no_split_modules

    def __init__(self, config: MambaVisionBackboneConfig) -> None:
        super().__init__(config)
        self.num_features = list(config.dims)
        self.features = self._make()
        self.post_init()

    def _make(self) -> VisionFeatures:
        return VisionFeatures(self.config.build(), self.config.out_indices)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Treat the model like transformers' own: `_init_weights` checks each parameter's flag itself."""
        super()._initialize_weights(module, is_custom_code=False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Give parameters that a checkpoint lacks the network's initial values."""
        if isinstance(module, VisionFeatures):
            fresh = self._make().state_dict()
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                init.copy_(tensor, fresh[name])

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BackboneOutput | tuple[tuple[Tensor, ...]]:
        """Compute `feature_maps` of images `[B, in_channels, H, W]`; `hidden_states` are the same maps."""
        maps = tuple(self.features(pixel_values))
        if return_dict is False:
            return (maps,)
        return BackboneOutput(feature_maps=maps, hidden_states=maps if output_hidden_states else None)
