"""Named sizes: `tiny` as published; `mini` for photographs of about 32 pixels, and `micro`, both for CPUs."""

from __future__ import annotations

from muonssm.checks import check_choice
from muonssm.ops import Muon

from .config import VisionConfig
from .network import MambaVision

SIZES = ("tiny", "mini", "micro")


def vision_config(
    size: str,
    backbone: str = "mamba",
    muon: Muon = Muon(),  # noqa: B008  a frozen value
    num_classes: int = 1000,
    in_channels: int = 3,
    drop_path: float | None = None,
    momentum: str = "fixed",
) -> VisionConfig:
    """Build the configuration of a size in `SIZES`; `drop_path` None is that size's default."""
    check_choice("size", size, SIZES)
    if size == "tiny":
        share = 0.2 if drop_path is None else drop_path
        return VisionConfig(backbone, muon, num_classes, in_channels, drop_path=share, momentum=momentum)
    # Strides from 2 (micro) or 1 (mini) where tiny has 4: 28 pixels still have micro's maps of 14, 7, 4 and 2, and
    # 32 pixels mini's of 32, 16, 8 and 4, so that its mixers see 64 and 16 positions.
    width, stride = (16, 2) if size == "micro" else (32, 1)
    return VisionConfig(
        backbone, muon, num_classes, in_channels, depths=(1, 1, 2, 2), dims=(width, 2 * width, 4 * width, 8 * width),
        stem=width, stem_strides=(1, stride), windows=(8, 4), fit_windows=True, heads=(4, 8),
        drop_path=0.0 if drop_path is None else drop_path, momentum=momentum,
    )  # fmt: skip


def mambavision_tiny(
    backbone: str = "mamba",
    muon: Muon = Muon(),  # noqa: B008  a frozen value
    num_classes: int = 1000,
    in_channels: int = 3,
    drop_path: float = 0.2,
    momentum: str = "fixed",
) -> MambaVision:
    """Build MambaVision-T: 31.8 M parameters, strides 4 to 32, windows that span the maps of 224 x 224 pixels.

    Args:
        backbone: a name in `muonssm.layers.BACKBONES`.
        muon: `Muon.off()` is the plain backbone.
        num_classes: 0 leaves the head out.
        in_channels, drop_path, momentum: see `VisionConfig`.
    """
    return MambaVision(vision_config("tiny", backbone, muon, num_classes, in_channels, drop_path, momentum))


def mambavision_micro(
    backbone: str = "mamba",
    muon: Muon = Muon(),  # noqa: B008  a frozen value
    num_classes: int = 10,
    in_channels: int = 1,
    drop_path: float = 0.0,
    momentum: str = "fixed",
) -> MambaVision:
    """Build a small MambaVision for images of 28 to about 200 pixels and a CPU: 0.6 M parameters, strides 2 to 16.

    The arguments are those of `mambavision_tiny`.
    """
    return MambaVision(vision_config("micro", backbone, muon, num_classes, in_channels, drop_path, momentum))
