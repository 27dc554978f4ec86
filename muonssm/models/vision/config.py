"""`VisionConfig`: sizes and settings of a MambaVision network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from muonssm.checks import check_bool, check_choice, check_int, check_number
from muonssm.layers import BACKBONES
from muonssm.layers.momentum import MOMENTUM_VARIANTS
from muonssm.ops import Muon

STAGES = 4
WINDOWED = (2, 3)  # stages of mixers and attention; the stages before them are convolutions


@dataclass(frozen=True)
class VisionConfig:
    """Configuration of `MambaVision`; the defaults are the tiny size.

    Attributes:
        backbone: a name in `muonssm.layers.BACKBONES`, for the SSM in the mixers.
        muon: momentum and normalization of that SSM; `Muon.off()` is the plain backbone.
        num_classes: classes of the head; 0 leaves it out, and `forward` returns the pooled features.
        in_channels: channels of the images.
        depths: blocks of each of the four stages. In the last two the first half (rounded up) are mixers, the rest
            attention.
        dims: channels of each stage.
        stem: channels between the two convolutions of the stem.
        stem_strides: strides of these two; the stages have the strides s, 2s, 4s and 8s with s their product.
        windows: sides of the square windows of the last two stages, in positions of their maps.
        fit_windows: whether a window that is wider than the map shrinks to it; the release pads the map instead.
        heads: attention heads of the last two stages.
        mlp_ratio: width of the MLPs, in channels of their stage.
        drop_path: share of residual branches dropped in training in the last block, growing from 0 in the first.
        d_state: states per channel; for Mamba-2 and LongHorn the size of keys.
        d_conv: filter length of the mixers' convolutions.
        memory_heads: heads of the memory in DeltaNet and Gated DeltaNet.
        momentum: `"fixed"`, `"per_head"` or `"per_step"`, as in the mixers.
    """

    backbone: str = "mamba"
    muon: Muon = Muon()  # noqa: RUF009  a frozen value
    num_classes: int = 1000
    in_channels: int = 3
    depths: tuple[int, ...] = (1, 3, 8, 4)
    dims: tuple[int, ...] = (80, 160, 320, 640)
    stem: int = 32
    stem_strides: tuple[int, int] = (2, 2)
    windows: tuple[int, int] = (14, 7)
    fit_windows: bool = False
    heads: tuple[int, int] = (8, 16)
    mlp_ratio: int = 4
    drop_path: float = 0.2
    d_state: int = 8
    d_conv: int = 3
    memory_heads: int = 4
    momentum: str = "fixed"

    def __post_init__(self) -> None:
        check_choice("backbone", self.backbone, tuple(BACKBONES))
        if not isinstance(self.muon, Muon):
            raise TypeError(f"muon must be a Muon (Muon.off() is the plain backbone), got {self.muon!r}")
        for name in ("in_channels", "stem", "mlp_ratio", "d_state", "d_conv", "memory_heads"):
            check_int(name, getattr(self, name), 1)
        check_int("num_classes", self.num_classes, 0)
        for name, length in (("depths", STAGES), ("dims", STAGES), ("stem_strides", 2), ("windows", 2), ("heads", 2)):
            object.__setattr__(self, name, _check_ints(name, getattr(self, name), length))
        check_bool("fit_windows", self.fit_windows)
        check_number("drop_path", self.drop_path, 0, 1, open_high=True)
        check_choice("momentum", self.momentum, MOMENTUM_VARIANTS)
        self._check_widths()

    def _check_widths(self) -> None:
        for stage, heads in zip(WINDOWED, self.heads, strict=True):
            dim = self.dims[stage]
            if dim % 2:
                raise ValueError(f"dims[{stage}] must be even, as a mixer splits its channels in two, got {dim}")
            if dim % heads:
                raise ValueError(f"heads must divide dims[{stage}] = {dim}, got {heads}")

    @property
    def strides(self) -> tuple[int, ...]:
        """Image pixels between neighboring positions of each stage's map."""
        first = self.stem_strides[0] * self.stem_strides[1]
        return tuple(first * 2**stage for stage in range(STAGES))

    def mixers(self, stage: int) -> int:
        """Return the number of mixer blocks in a stage; the attention blocks follow them."""
        return (self.depths[stage] + 1) // 2 if stage in WINDOWED else 0

    def ssm_dims(self) -> dict[str, Any]:
        """Return the arguments of the layer that replaces Mamba's SSM.

        The mixer has already convolved its input, so that layer's own filters have length 1.
        """
        mamba: dict[str, Any] = {"d_state": self.d_state, "expand": 1}
        dims = {"mamba2": mamba, "longhorn": mamba}.get(self.backbone, {"num_heads": self.memory_heads})
        return {**dims, "conv_size": 1, "momentum": self.momentum}


def _check_ints(name: str, values: Any, length: int) -> tuple[int, ...]:
    """Check that there are `length` positive integers, and return them as a tuple (recipes and JSON have lists)."""
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"{name} must be {length} integers >= 1, got {values!r}")
    if len(values) != length:
        raise ValueError(f"{name} must be {length} integers >= 1, got {values!r}")
    return tuple(check_int(f"{name}[{i}]", value, 1) for i, value in enumerate(values))
