"""MambaVision as models of timm, which knows them once this module is imported.

    timm.create_model("muonssm_mambavision_tiny", backbone="mamba", muon=False, num_classes=10)
    timm.create_model("muonssm_mambavision_micro", features_only=True)

There are no weights to download; `checkpoint_path` takes a file, and `load_published` that of the release.
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
    """What timm says of a model: how its images are prepared, and where its first and last layers are."""
    grey = channels == 1
    return {
        "url": "", "num_classes": num_classes, "input_size": (channels, pixels, pixels), "pool_size": None,
        "crop_pct": 1.0, "interpolation": "bicubic", "fixed_input_size": False, "license": "apache-2.0",
        "mean": (0.5,) if grey else IMAGENET_DEFAULT_MEAN, "std": (0.5,) if grey else IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.conv_down.0", "classifier": "head",
    }  # fmt: skip


default_cfgs = {"muonssm_mambavision_tiny": _cfg(224, 3, 1000), "muonssm_mambavision_micro": _cfg(32, 1, 10)}


class TimmMambaVision(MambaVision):
    """The network with timm's methods. `forward_features` has timm's meaning here: the last map, normalised."""

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
            raise ValueError(f"global_pool is {global_pool!r}; it may be 'avg'")
        config = vision_config(size, backbone, as_muon(muon), num_classes, in_chans, drop_path_rate, momentum)
        super().__init__(config)
        self.num_classes = num_classes
        self.head_hidden_size = self.num_features
        each = zip(config.dims, config.strides, strict=True)
        self.feature_info = [
            {"num_chs": channels, "reduction": stride, "module": f"levels.{i}"}
            for i, (channels, stride) in enumerate(each)
        ]

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """`[B, dims[-1], H', W']`."""
        return self.norm(self.stages(x)[-1])

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What `forward_features` gave, averaged, to logits."""
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
        """The maps of the stages in `indices` (a number: the last so many); with `norm` the last is normalised."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt is {output_fmt!r}; it may be 'NCHW'")
        take, _ = feature_take_indices(len(self.levels), indices)
        maps = self.stages(x)
        last = self.norm(maps[-1])
        if norm:
            maps[-1] = last
        chosen = [maps[i] for i in take]
        return chosen if intermediates_only else (last, chosen)

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new head for so many classes; 0 for none."""
        if global_pool not in (None, "avg"):
            raise ValueError(f"global_pool is {global_pool!r}; it may be None or 'avg'")
        self.num_classes = num_classes
        self.head = self.make_head(num_classes)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Which parameters form a layer, for rates that fall from layer to layer."""
        stage, last = r"^levels\.(\d+)", (99999,)
        fine = [(rf"{stage}\.blocks\.(\d+)", None), (rf"{stage}\.downsample", last), (r"^norm", last)]
        return {"stem": r"^patch_embed", "blocks": [(stage, None), (r"^norm", last)] if coarse else fine}


def _create(size: str, pretrained: bool, given: dict[str, Any]) -> nn.Module:
    if pretrained:
        raise ValueError("pretrained is True; it may be False, for there are no weights to download (checkpoint_path)")
    features = {"out_indices": (0, 1, 2, 3), "feature_cls": "getter"}
    return build_model_with_cfg(
        TimmMambaVision, f"muonssm_mambavision_{size}", False, feature_cfg=features, size=size, **given
    )


# timm hands settings of its own beside those of the network to these two; whatever neither knows is refused there.


@register_model
def muonssm_mambavision_tiny(pretrained: bool = False, **given: Any) -> nn.Module:
    """See `mambavision_tiny`; the arguments are those of `TimmMambaVision`."""
    return _create("tiny", pretrained, given)


@register_model
def muonssm_mambavision_micro(pretrained: bool = False, **given: Any) -> nn.Module:
    """See `mambavision_micro`; the arguments are those of `TimmMambaVision`."""
    return _create("micro", pretrained, given)
