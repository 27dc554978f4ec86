"""MambaVision as timm models; importing this module registers them.

    timm.create_model("muonssm_mambavision_tiny", backbone="mamba", muon=False, num_classes=10)
    timm.create_model("muonssm_mambavision_micro", features_only=True)

There are no weights to download: pass `checkpoint_path`, or load those of the release with `load_published`.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, register_model
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from ..muon_settings import as_muon
from .network import MambaVision
from .presets import vision_config


def _cfg(pixels: int, channels: int, num_classes: int) -> dict[str, Any]:
    """Return timm's metadata of a model: how to prepare images, and where its first and last layers are."""
    gray = channels == 1
    return {
        "url": "", "num_classes": num_classes, "input_size": (channels, pixels, pixels), "pool_size": None,
        "crop_pct": 1.0, "interpolation": "bicubic", "fixed_input_size": False, "license": "apache-2.0",
        "mean": (0.5,) if gray else IMAGENET_DEFAULT_MEAN, "std": (0.5,) if gray else IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.conv_down.0", "classifier": "head",
    }  # fmt: skip


default_cfgs = {"muonssm_mambavision_tiny": _cfg(224, 3, 1000), "muonssm_mambavision_micro": _cfg(32, 1, 10)}


class TimmMambaVision(MambaVision):
    """The network with timm's methods; `forward_features` returns the last map, normalized, as in timm."""

    def __init__(
        self,
        size: str,
        backbone: str = "mamba",
        muon: Any = True,
        num_classes: int = 1000,
        in_chans: int = 3,
        drop_path_rate: float | None = None,
        momentum: str = "fixed",
        global_pool: str = "avg",
    ) -> None:
        if global_pool != "avg":
            raise ValueError(f"global_pool must be 'avg', got {global_pool!r}")
        config = vision_config(size, backbone, as_muon(muon), num_classes, in_chans, drop_path_rate, momentum)
        super().__init__(config)
        self.num_classes = num_classes
        self.head_hidden_size = self.num_features
        stages = zip(config.dims, config.strides, strict=True)
        self.feature_info = [
            {"num_chs": channels, "reduction": stride, "module": f"levels.{i}"}
            for i, (channels, stride) in enumerate(stages)
        ]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Compute the last map `[B, dims[-1], H', W']`, normalized."""
        return self.norm(self.stages(x)[-1])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the output of `forward_features`, and compute logits unless `pre_logits`."""
        pooled = x.mean(dim=(2, 3))
        return pooled if pre_logits else self.head(pooled)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Compute the maps of the stages `indices` (an integer n: the last n); `norm` normalizes the last one."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', got {output_fmt!r}")
        take, _ = feature_take_indices(len(self.levels), indices)
        maps = self.stages(x)
        last = self.norm(maps[-1])
        if norm:
            maps[-1] = last
        chosen = [maps[i] for i in take]
        return chosen if intermediates_only else (last, chosen)

    def get_classifier(self) -> nn.Module:
        """Return the head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head by a new one; 0 classes remove it."""
        if global_pool not in (None, "avg"):
            raise ValueError(f"global_pool must be None or 'avg', got {global_pool!r}")
        self.num_classes = num_classes
        self.head = self.make_head(num_classes)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Group parameters into layers, for layer-wise learning rate decay."""
        stage, last = r"^levels\.(\d+)", (99999,)
        fine = [(rf"{stage}\.blocks\.(\d+)", None), (rf"{stage}\.downsample", last), (r"^norm", last)]
        return {"stem": r"^patch_embed", "blocks": [(stage, None), (r"^norm", last)] if coarse else fine}


def _create(size: str, pretrained: bool, options: dict[str, Any]) -> nn.Module:
    if pretrained:
        raise ValueError("pretrained must be False, as there are no weights to download, got True; use checkpoint_path")
    features = {"out_indices": (0, 1, 2, 3), "feature_cls": "getter"}
    return build_model_with_cfg(
        TimmMambaVision, f"muonssm_mambavision_{size}", False, feature_cfg=features, size=size, **options
    )


# timm passes its own options besides those of the network; `build_model_with_cfg` rejects unknown ones.


@register_model
def muonssm_mambavision_tiny(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build `mambavision_tiny` with the arguments of `TimmMambaVision`."""
    return _create("tiny", pretrained, options)


@register_model
def muonssm_mambavision_micro(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build `mambavision_micro` with the arguments of `TimmMambaVision`."""
    return _create("micro", pretrained, options)
